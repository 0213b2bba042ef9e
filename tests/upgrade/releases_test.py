#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The commits that the file of releases names exist.

usage: releases_test.py SOURCE_ROOT [ReleasesTest.test_NAME]
"""

import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2])
LINES = [
    line
    for line in (ROOT / "tests/upgrade/releases").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)


def has_history():
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except FileNotFoundError:
        return False
    return shallow.returncode == 0 and shallow.stdout.strip() == "false"


class ReleasesTest(unittest.TestCase):
    def test_lines_have_a_name_and_a_commit(self):
        self.assertTrue(LINES)
        for line in LINES:
            self.assertRegex(line, r"^\d+\.\d+\.\d+ [0-9a-f]{40}$")

    def test_names_ascend(self):
        names = [tuple(map(int, line.split()[0].split("."))) for line in LINES]
        self.assertEqual(names, sorted(set(names)))

    def test_commits_are_in_the_history(self):
        if not has_history():
            self.skipTest("the history is not there")
        for line in LINES:
            name, commit = line.split()
            ancestor = git("merge-base", "--is-ancestor", commit, "HEAD")
            self.assertEqual(ancestor.returncode, 0, f"{name}: {commit} is not in the history: {ancestor.stderr}")


if __name__ == "__main__":
    unittest.main()
