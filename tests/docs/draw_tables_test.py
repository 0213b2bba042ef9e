#!/usr/bin/env python3
"""Changes a number of a page, and a picture: docs/benchmarks/draw_tables.py must see either.

usage: draw_tables_test.py SOURCE_ROOT
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

FOLDER = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]) / "docs/benchmarks"


class DrawTables(unittest.TestCase):
    def check(self, change):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "benchmarks")
            shutil.copytree(FOLDER, copy)
            change(copy)
            done = subprocess.run([sys.executable, copy / "draw_tables.py", "--check"], capture_output=True, text=True,
                                  check=False)
            return done.returncode, done.stdout.split(" ")[0]

    @staticmethod
    def replace(folder, name, old, new):
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old}"
        (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    def test_pictures_show_the_tables(self):
        self.assertEqual(self.check(lambda folder: None), (0, ""))

    def test_another_number_is_seen(self):
        row = next(line for line in (FOLDER / "disk.md").read_text(encoding="utf-8").splitlines() if "| 16 MiB |" in line)
        self.assertEqual(self.check(lambda folder: self.replace(folder, "disk.md", row, row.replace("**", "**1", 3))),
                         (1, "docs/benchmarks/disk.svg"))

    def test_another_picture_is_seen(self):
        self.assertEqual(self.check(lambda folder: self.replace(folder, "demo.svg", "#1b6ca8", "#000000")),
                         (1, "docs/benchmarks/demo.svg"))


if __name__ == "__main__":
    unittest.main()
