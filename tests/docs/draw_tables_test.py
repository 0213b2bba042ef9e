#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes a number, a picture or a page of docs/benchmarks: tools/bench/draw_tables.py must see each.

usage: draw_tables_test.py SOURCE_ROOT
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2])
FOLDER = ROOT / "docs/benchmarks"


class DrawTables(unittest.TestCase):
    def check(self, change):
        """Returns the exit status, and the line for each violation, after `change` of a copy of the pages."""
        with tempfile.TemporaryDirectory() as root:
            copy = pathlib.Path(root, "docs/benchmarks")
            shutil.copytree(FOLDER, copy)
            pathlib.Path(root, "tools/bench").mkdir(parents=True)
            for script in ("draw_tables.py", "bars.py", "drawing.py"):
                shutil.copy(ROOT / "tools/bench" / script, pathlib.Path(root, "tools/bench"))
            change(copy)
            done = subprocess.run(
                [sys.executable, pathlib.Path(root, "tools/bench/draw_tables.py"), "--check"],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.stderr, "")
            return done.returncode, [line.removeprefix("docs/benchmarks/") for line in done.stdout.splitlines()]

    @staticmethod
    def line(page, begin):
        """The page's first line that begins so."""
        lines = (FOLDER / page).read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(begin))

    def expect(self, change, *breaches):
        """Checks that the printed lines begin with these, in this order, and that there are no others."""
        status, found = self.check(change)
        self.assertEqual(status, 1)
        self.assertEqual([line[: len(breach)] for line, breach in zip(found, breaches)], list(breaches))
        self.assertEqual(len(found), len(breaches), found)

    @staticmethod
    def replace(folder, name, old, new):
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old}"
        (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    def test_pictures_show_the_tables(self):
        self.assertEqual(self.check(lambda folder: None), (0, []))

    def test_a_different_number_is_found(self):
        row = self.line("disk.md", "| 16 MiB |")
        self.expect(
            lambda folder: self.replace(folder, "disk.md", row, row.replace("**", "**1", 3)),
            "disk.svg does not show its page's table",
        )

    def test_a_different_picture_is_found(self):
        self.expect(
            lambda folder: self.replace(folder, "demo.svg", "#1b6ca8", "#000000"),
            "demo.svg does not show its page's table",
        )

    def test_a_page_without_a_picture_is_found(self):
        self.expect(
            lambda folder: (folder / "new.md").write_text("# New\n\n```sh\nashlar-bench new\n```\n"),
            "new.md shows no picture",
        )

    def test_a_missing_or_unlabelled_picture_is_found(self):
        shown = self.line("load.md", "![")
        for other in ("![Time](lode.svg)", "![](load.svg)"):
            self.expect(
                lambda folder, other=other: self.replace(folder, "load.md", shown, other), "load.md shows no picture"
            )

    def test_another_pages_picture_is_found(self):
        self.expect(
            lambda folder: self.replace(folder, "router.md", "(router.svg)", "(remote.svg)"),
            "router.md does not show router.svg",
        )

    def test_an_unneeded_reason_is_found(self):
        reasons = 'WITHOUT = {"gone": "", "load": "", '
        self.expect(
            lambda folder: self.replace(folder.parents[1] / "tools/bench", "draw_tables.py", "WITHOUT = {", reasons),
            "load.md has a picture, and a reason",
            "gone.md is not there",
        )

    def test_a_page_without_a_command_is_found(self):
        self.expect(lambda folder: self.replace(folder, "load.md", "```sh", "```text"), "load.md has no command")


if __name__ == "__main__":
    unittest.main()
