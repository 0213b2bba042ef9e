#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/measure-house counts the contents of a small tree.

usage: measure_house_test.py SOURCE_ROOT
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
PAGES = "docs"
TREE = {
    "README.md": "One two\nthree\n",
    f"{PAGES}/decisions/0001-one.md": "four\n",
    f"{PAGES}/decisions/README.md": "five\n",
    f"{PAGES}/figures.json": "{\n}\n",
    "client/include/ashlar/engine.h": "class A {\n  std::mutex mutex_;\n  int x_ ABSL_GUARDED_BY(mutex_);\n};\n",
    "storage/b.h": "class B {\n  mutable std::mutex mutex_;\n  absl::Mutex mu_;\n  int x_ ABSL_GUARDED_BY(mu_);\n};\n",
    "storage/golden.bin": "\0binary\n",
}


class MeasureHouse(unittest.TestCase):
    def test_counts(self):
        with tempfile.TemporaryDirectory() as folder:
            root, figures = pathlib.Path(folder), pathlib.Path(folder, "figures.json")
            for name, text in TREE.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            subprocess.run(["git", "-C", root, "init", "-q"], check=True)
            subprocess.run(["git", "-C", root, "add", "-A"], check=True)
            subprocess.run([ROOT / "tools/measure-house", "--json", figures, root], check=True, capture_output=True)
            self.assertEqual(
                json.loads(figures.read_text()),
                {
                    "markdown_words": 5,
                    "decisions": 1,
                    "readme_lines": 2,
                    "tracked_lines": 15,
                    "json_lines": 2,
                    "public_cc_headers": 1,
                    "unannotated_mutexes": 1,
                },
            )


if __name__ == "__main__":
    unittest.main()
