#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/release reports what is not ready, and tags a tree that is.

usage: release_command_test.py SOURCE_ROOT
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
NAMES = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Release(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "tools").mkdir()
        shutil.copy(ROOT / "tools/release", self.root / "tools")
        self.write("CMakeLists.txt", "project(ashlar VERSION 1.2.0 LANGUAGES CXX)\n")
        self.write("CHANGELOG.md", "## 1.2.0 (2030-01-02)\n\n## 1.1.0 (2029-01-02)\n")
        self.write("tests/upgrade/releases", "# lines\n1.1.0 " + 40 * "a" + "\n")
        self.write("deploy/kustomize/base/kustomization.yaml", "    newTag: 1.2.0\n")
        self.write("deploy/kustomize/components/gpu/kustomization.yaml", "    newTag: 1.2.0-cuda\n")
        self.git("init", "-q")
        self.commit()

    def write(self, name, text):
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def git(self, *arguments):
        return subprocess.run(
            ["git", "-C", self.root, *arguments],
            env={**os.environ, **NAMES},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "All")

    def release(self, *arguments):
        done = subprocess.run(
            [sys.executable, self.root / "tools/release", *arguments],
            env={**os.environ, **NAMES},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def test_a_ready_release_is_tagged_and_listed(self):
        self.assertEqual(self.release(), (0, "1.2.0 is ready to be tagged\n"))
        self.assertEqual(self.release("--tag")[0], 0)
        head = self.git("rev-parse", "HEAD")
        self.assertEqual(self.git("rev-parse", "v1.2.0^{commit}"), head)
        self.assertTrue((self.root / "tests/upgrade/releases").read_text().endswith(f"\n1.2.0 {head}\n"))
        self.commit()
        code, said = self.release()
        self.assertEqual(code, 1)
        self.assertIn("version 1.2.0 is not above 1.2.0", said)
        self.assertIn("the tag v1.2.0 is there already", said)

    def test_missing_preparations_are_named(self):
        for name, text, wrong in (
            ("CHANGELOG.md", "## 1.2.0 (not released)\n", 'section 1.2.0 says "not released"'),
            ("CHANGELOG.md", "", "no section ## 1.2.0"),
            ("CHANGELOG.md", "## 1.3.0 (2031-01-01)\n## 1.2.0 (2030-01-01)\n", "a section behind 1.2.0"),
            ("CHANGELOG.md", "## 1.2.0 (2030-01-02)\n## 1.0.0 (2028-01-02)\n", "no line for 1.0.0"),
            (
                "deploy/kustomize/base/kustomization.yaml",
                "    newTag: 1.1.0\n",
                "base/kustomization.yaml: newTag is not 1.2.0",
            ),
            ("CMakeLists.txt", "project(ashlar VERSION 1.1.0 LANGUAGES CXX)\n", "version 1.1.0 is not above 1.1.0"),
        ):
            with self.subTest(wrong):
                kept = (self.root / name).read_text()
                self.write(name, text)
                self.commit()
                code, said = self.release("--tag")
                self.assertEqual(code, 1)
                self.assertIn(wrong, said)
                self.write(name, kept)
                self.commit()
        self.write("CMakeLists.txt", "project(ashlar VERSION 1.2.0 LANGUAGES CXX)\n# more\n")
        self.assertIn("changes that are not committed", self.release()[1])
        self.assertEqual(self.git("tag"), "")


if __name__ == "__main__":
    unittest.main()
