#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds one violation at a time to a small clean tree: the checker must find only that one."""

import pathlib
import tempfile
import unittest

import check_links

CLEAN = {
    "README.md": "# Top\n\n[words](docs/concepts.md#words-and-names), ![x](docs/picture.svg), [web](https://a.org)\n",
    "docs/concepts.md": "## Words, and `names`\n\n`storage/cache.h` (`CacheTest.Finds`), [up](../README.md#top)\n",
    "docs/architecture.md": "[`code`](../storage/cache.h), [a](#twice), [b](#twice-1)\n\n## Twice\n\n## Twice\n",
    "docs/picture.svg": "<svg/>\n",
    "storage/cache.h": "// docs/concepts.md says more.\n",
    "storage/cache_test.cc": "TEST(CacheTest, Finds) {}\n",
    "storage/README.md": "# storage\n\n```\n[no link](in/a/program)\n```\n\n`[nor](here)`\n",
}

BREACHES = [
    ("PAGE.md", "[x](docs/gone.md)", "PAGE.md:1: docs/gone.md: no such file"),
    ("PAGE.md", "\n[x](docs/concepts.md#gone)", "PAGE.md:2: docs/concepts.md#gone: no such heading"),
    ("PAGE.md", "[x](#gone)", "PAGE.md:1: #gone: no such heading"),
    ("PAGE.md", "![x](docs/gone.svg)", "PAGE.md:1: docs/gone.svg: no such file"),
    ("PAGE.md", "[`x`](gone.h)", "PAGE.md:1: gone.h: no such file"),
    ("PAGE.md", "[x](../../etc/passwd)", "PAGE.md:1: ../../etc/passwd: outside of the repository"),
    ("PAGE.md", "as docs/gone.md says", "PAGE.md:1: docs/gone.md: no such page"),
    ("docs/limits.md", "`storage/gone.h`", "docs/limits.md:1: storage/gone.h: no such file"),
    ("docs/limits.md", "`CacheTest.Loses`", "docs/limits.md:1: CacheTest.Loses: no such test"),
    ("PAGE.md", "| a | b |\n|---|---|\n| `x \\| y` | 1 |\n| 2 |\n", "PAGE.md:4: a row of 1 cells in a table of 2"),
    ("PAGE.md", "| a |\n|---|\n\n| a | b |\n|---|\n", "PAGE.md:5: a row of 1 cells in a table of 2"),
    (
        "storage/objects/object_table.h",
        "\n// docs/gone.md says more.",
        "storage/objects/object_table.h:2: docs/gone.md: no such page",
    ),
    ("docs/architecture.md", "word " * 1501, "docs/architecture.md:1: 1501 words, 1500 at most"),
]


class CheckLinksTest(unittest.TestCase):
    def check(self, tree):
        with tempfile.TemporaryDirectory() as root:
            for path, text in tree.items():
                file = pathlib.Path(root, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            return check_links.check(pathlib.Path(root))

    def test_a_clean_tree_passes(self):
        self.assertEqual(self.check(CLEAN), [])

    def test_each_breach_is_found(self):
        for path, text, expected in BREACHES:
            with self.subTest(expected):
                self.assertEqual(self.check({**CLEAN, path: text}), [expected])

    def test_a_missing_required_page_is_found(self):
        tree = dict(CLEAN)
        del tree["docs/architecture.md"]
        self.assertEqual(self.check(tree), ["docs/architecture.md: missing"])


if __name__ == "__main__":
    unittest.main()
