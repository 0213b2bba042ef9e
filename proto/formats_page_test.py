#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds docs/formats.md to the code: its Python program must print the golden files and the vectors shown below it, and its
tables of limits and outcomes must be those of the headers.

usage: formats_page_test.py SOURCE_ROOT
"""

import contextlib
import io
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
HEADERS = {name: (ROOT / "proto" / name).read_text(encoding="utf-8") for name in ("limits.h", "prefill_limits.h", "outcome.h")}


def evaluate(expression):
    """A limit's initialiser: integers, products and shifts."""
    expression = expression.replace("'", "")  # between digits
    return eval(re.sub(r"uint64_t\{(\d+)\}", r"\1", expression), {"__builtins__": {}})


class FormatsPage(unittest.TestCase):
    def test_the_program_prints_the_golden_files(self):
        program, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL).groups()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {})
        vectors = dict(line.split() for line in printed.getvalue().splitlines())
        self.assertEqual(
            set(vectors), {"identity", "layout", "namespace", "key_segment", "key_checkpoint_media", "key_prefix_block",
                           "key_prefix_checkpoint", "key_prefix_span", "key_own_checkpoint", "key_prefix_block_media",
                           "key_prefix_checkpoint_media", "salt", "key_segment_salt", "key_prefix_checkpoint_salt",
                           "layout_tails"})
        for name, value in vectors.items():
            golden = (ROOT / "proto/testdata" / f"{name}.hex").read_text(encoding="utf-8")
            self.assertEqual(value, golden.replace("\n", ""), name)
        # The page wraps long values; a continuation is indented.
        self.assertEqual(re.sub(r"\n +", "", shown.replace(":\n  ", ": ")).split("\n"),
                         [f"{name}: {value}" for name, value in vectors.items()] + [""])

    def test_limits_are_those_of_the_header(self):
        declared = {name: evaluate(value) for header in ("limits.h", "prefill_limits.h") for name, value in
                    re.findall(r"^inline constexpr \w+ (k\w+) = ([^;]+);", HEADERS[header], re.MULTILINE)}
        shown = {name: int(value.replace(",", "")) for name, value in
                 re.findall(r"^\| `(k\w+)` \| ([\d,]+) \|", PAGE, re.MULTILINE)}
        self.assertEqual(shown, declared)

    def test_outcomes_are_those_of_the_header(self):
        for enum, body in re.findall(r"^enum class (\w+) : uint8_t \{(.*?)\};", HEADERS["outcome.h"],
                                     re.MULTILINE | re.DOTALL):
            values = re.findall(r"\bk(\w+) = (\d+)", body)
            words = [f"{number} {re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}" for name, number in values]
            self.assertIn(f"| `{enum}` | {', '.join(words)} |", PAGE)

    def test_versions_are_those_of_the_sources(self):
        def constant(path, name):
            source = (ROOT / path).read_text(encoding="utf-8")
            return re.search(rf"\b{name} = \"?([\w/]+)\"?[;,]", source).group(1)

        def shown(pattern):
            found = re.findall(pattern, PAGE)
            self.assertEqual(len(found), 1, pattern)
            return found[0]

        fields = "proto/layout_fields.h"
        self.assertEqual(shown(r"\n\| version \| u32 \| (\d+) \|"), constant(fields, "kIdentityVersion"))
        layout = tuple(constant(fields, f"kLayoutVersion{end}") for end in ("Min", "Max"))
        self.assertEqual(shown(r"\n\| version \| u32 \| (\d+), or (\d+) where"), layout)
        self.assertEqual(shown(r"magic `AshlarOb` \|\n\| 8 \| u32 \| format version, (\d+) \|"),
                         constant("proto/object_encoding.cc", "kFormatVersion"))
        ssd = constant("storage/tier/ssd_format.h", "kSsdFormatVersion")
        self.assertEqual(shown(r"magic `AshlarSl` .*\n\| 8 \| u32 \| format version, (\d+) \|"), ssd)
        self.assertEqual(shown(r"magic `AshlarSr` \|\n\| 8 \| u32 \| format version, (\d+) \|"), ssd)
        self.assertEqual(shown(r'SHA-256\( "(ashlar/namespace/\d+)"'), constant("proto/key.cc", "kNamespaceDomain"))
        self.assertEqual(shown(r"key       = SHA-256\( u8 (\d+) "), constant("proto/key.cc", "kKeyVersion"))
        chained = constant("proto/key.cc", "kChainedKeyVersion")
        self.assertEqual(set(re.findall(r"^(?:block|checkpoint|span|own).*SHA-256\( u8 (\d+) ", PAGE, re.MULTILINE)),
                         {chained})


if __name__ == "__main__":
    unittest.main()
