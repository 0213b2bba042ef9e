#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares docs/formats.md with the code: testdata/vectors.py, which the page cites, must print the golden files, and
the page's versions and outcomes must equal the sources'.

usage: formats_page_test.py SOURCE_ROOT
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
OUTCOMES = (ROOT / "proto/outcome.h").read_text(encoding="utf-8")


class FormatsPage(unittest.TestCase):
    def test_the_program_prints_the_golden_files(self):
        program = ROOT / "proto/testdata/vectors.py"
        printed = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True).stdout
        vectors = dict(line.split() for line in printed.splitlines())
        self.assertEqual(
            set(vectors),
            {
                "identity",
                "layout",
                "namespace",
                "key_segment",
                "key_checkpoint_media",
                "key_prefix_block",
                "key_prefix_checkpoint",
                "key_prefix_span",
                "key_own_checkpoint",
                "key_prefix_block_media",
                "key_prefix_checkpoint_media",
                "salt",
                "key_segment_salt",
                "key_prefix_checkpoint_salt",
                "layout_tails",
                "layout_opaque",
            },
        )
        for name, value in vectors.items():
            golden = (ROOT / "proto/testdata" / f"{name}.hex").read_text(encoding="utf-8")
            self.assertEqual(value, golden.replace("\n", ""), name)

    def test_outcomes_are_those_of_the_header(self):
        for enum, body in re.findall(r"^enum class (\w+) : uint8_t \{(.*?)\};", OUTCOMES, re.MULTILINE | re.DOTALL):
            values = re.findall(r"\bk(\w+) = (\d+)", body)
            words = [f"{number} {re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}" for name, number in values]
            self.assertIn(f"\n- `{enum}`: {', '.join(words)}\n", PAGE)

    def test_versions_are_those_of_the_sources(self):
        def constant(path, name):
            source = (ROOT / path).read_text(encoding="utf-8")
            return re.search(rf"\b{name} = \"?([\w/]+)\"?[;,]", source).group(1)

        def shown(pattern):
            found = re.findall(pattern, PAGE)
            self.assertEqual(len(found), 1, pattern)
            return found[0]

        fields = "proto/layout_fields.h"
        self.assertEqual(shown(r"\nversion +u32 +(\d+)\n"), constant(fields, "kIdentityVersion"))
        layout = tuple(constant(fields, f"kLayoutVersion{end}") for end in ("Min", "Max"))
        self.assertEqual(shown(r"\nversion +u32 +(\d+); \d+ where [^;]*; (\d+) with an opaque layer"), layout)
        self.assertEqual(
            shown(r"magic AshlarOb\n8 +u32 +format version, (\d+)\n"),
            constant("proto/object_encoding.cc", "kFormatVersion"),
        )
        ssd = constant("storage/tier/ssd_format.h", "kSsdFormatVersion")
        self.assertEqual(shown(r"magic AshlarSl .*\n8 +u32 +format version, (\d+) "), ssd)
        self.assertEqual(shown(r"magic AshlarSr\n8 +u32 +format version, (\d+)\n"), ssd)
        self.assertEqual(shown(r'SHA-256\( "(ashlar/namespace/\d+)"'), constant("proto/key.cc", "kNamespaceDomain"))
        self.assertEqual(shown(r"key       = SHA-256\( u8 (\d+), "), constant("proto/key.cc", "kKeyVersion"))
        chained = constant("proto/key.cc", "kChainedKeyVersion")
        self.assertEqual(
            set(re.findall(r"^(?:block|checkpoint|span|own).*SHA-256\( u8 (\d+), ", PAGE, re.MULTILINE)), {chained}
        )


if __name__ == "__main__":
    unittest.main()
