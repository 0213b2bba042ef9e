#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/lint over a small checkout: it checks only changed files, with the options of a build that compiles in groups.

usage: lint_test.py SOURCE_ROOT
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
# bugprone-integer-division
FAULT = "double Half(int a) { return a / 2; }\n"
CLEAN = "double Half(int a) { return a / 2.0; }\n"


@unittest.skipUnless(shutil.which("clang-tidy"), "clang-tidy is not installed")
class Lint(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        shutil.copy(ROOT / ".clang-tidy", self.root)
        self.write(".gitignore", "/build/\n")
        self.write("old.cc", FAULT)
        self.write("new.cc", "#ifndef OPTION\n#error the option of the build is not passed\n#endif\n" + CLEAN)
        unity = "build/release/CMakeFiles/a.dir/Unity/unity_a_0_cxx.cxx"
        self.write(unity, f'#include "{self.root}/old.cc"\n#include "{self.root}/new.cc"\n')
        command = f"/usr/bin/ccache /usr/bin/c++ -DOPTION -std=c++20 -Werror -o a.o -c {self.root}/{unity}"
        entry = {"directory": str(self.root / "build/release"), "command": command, "file": f"{self.root}/{unity}"}
        self.write("build/release/compile_commands.json", json.dumps([entry]))
        self.git("init", "-q", "-b", "main")
        self.commit()

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def git(self, *arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", self.root, *names, *arguments], check=True, capture_output=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "one", "--allow-empty")

    def lint(self, *arguments):
        done = subprocess.run(
            [ROOT / "tools/lint", "--root", self.root, *arguments], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def append(self, text):
        with (self.root / "new.cc").open("a", encoding="utf-8") as file:
            file.write(text)

    def test_only_changed_files_are_checked(self):
        self.append("int One() { return 1; }\n")
        self.assertEqual(self.lint("--base", "HEAD"), (0, "1 files checked, 0 with findings\n"))
        self.append("double Third(int a) { return a / 3; }\n")
        code, report = self.lint("--base", "HEAD")
        self.assertEqual((code, "new.cc:6" in report, "bugprone-integer-division" in report), (1, True, True), report)
        self.assertNotIn("old.cc", report)

    def test_the_base_is_where_the_branch_left_main(self):
        self.git("checkout", "-q", "-b", "branch")
        self.append("double Third(int a) { return a / 3; }\n")
        self.commit()
        self.commit()  # HEAD~1 already has the change
        self.assertEqual(self.lint()[0], 1)
        self.git("checkout", "-q", "main")
        self.commit()
        self.assertEqual(self.lint(), (0, "0 files checked, 0 with findings\n"))

    def test_headers_are_checked_and_what_is_not_built_is_named(self):
        self.write("only.h", FAULT.replace("double", "inline double"))
        self.write("elsewhere/new.cc", FAULT)
        code, report = self.lint("--base", "HEAD")
        self.assertEqual((code, "only.h:1" in report, "elsewhere/new.cc is skipped" in report), (1, True, True), report)

    def test_named_files_are_checked(self):
        code, report = self.lint(self.root / "old.cc")
        self.assertEqual((code, "old.cc:1" in report), (1, True), report)

    def test_an_unknown_base_or_a_missing_build_is_an_error(self):
        code, report = self.lint("--base", "nonsense")
        self.assertEqual((code, "base: nonsense is no commit" in report), (2, True), report)
        code, report = self.lint("--build", self.root / "none")
        self.assertEqual((code, "is not configured" in report), (2, True), report)

    def test_only_findings_in_changed_lines_count(self):
        self.write("new.cc", (self.root / "old.cc").read_text(encoding="utf-8"))
        self.commit()
        self.append("int One() { return 1; }\n")
        self.assertEqual(self.lint("--base", "HEAD", "--lines"), (0, "1 files checked, 0 with findings\n"))
        self.append("double Third(int a) { return a / 3; }\n")
        code, report = self.lint("--base", "HEAD", "--lines")
        self.assertEqual((code, "new.cc:3" in report, "new.cc:1" in report), (1, True, False), report)
        (self.root / "new.cc").rename(self.root / "old.cc")
        self.git("add", "-A")
        self.assertEqual(self.lint("--base", "HEAD", "--lines", self.root / "old.cc")[0], 1)

    def newest(self):
        done = subprocess.run(
            [ROOT / "tests/style/lint_newest.py", ROOT, self.root / "build/release", self.root],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def test_the_newest_three_files_are_checked(self):
        for name in ("a.cc", "b.cc"):
            self.write(name, CLEAN)
            self.commit()
        self.append("int One() { return 1; }\n")
        self.commit()
        self.write("page.md", "")
        self.commit()
        code, report = self.newest()
        self.assertEqual((code, "1 files checked" in report), (0, True), report)
        self.assertTrue("a.cc is skipped" in report and "b.cc is skipped" in report, report)
        self.append("double Third(int a) { return a / 3; }\n")
        self.assertEqual(self.newest()[0], 1)
        for name in ("c.cc", "d.cc", "e.cc"):
            self.write(name, CLEAN)
            self.commit()
        code, report = self.newest()
        self.assertEqual((code, "0 files checked" in report), (0, True), report)

    def test_without_history_nothing_is_checked(self):
        code, report = self.newest()
        self.assertEqual((code, "skipped: git knows no commit" in report), (77, True), report)


if __name__ == "__main__":
    unittest.main()
