#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds one violation at a time to a small clean tree: `tools/format --check` must report it, and tools/format must fix
pure formatting.

usage: format_test.py SOURCE_ROOT
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
NOT_INSTALLED = 77
C, HASH = "// SPDX-License-Identifier: Apache-2.0\n", "# SPDX-License-Identifier: Apache-2.0\n"
CLEAN = {
    "storage/a.cc": C + "int main() {}\n",
    "kernels/cuda/a.cu": C + "constexpr int kA = 1;\n",
    "client/a.py": HASH + "import os\nimport sys\n\nprint(os.name, sys.argv)\n",
    "tools/program": "#!/usr/bin/env python3\n" + HASH + "print(1)\n",
    "tools/script": "#!/bin/bash\n" + HASH + "true\n",
    "tools/CMakeLists.txt": HASH,
    "notes.txt": "no source\n",
    "build/a.cc": "int   made_by_a_build ;",
}
# Formatting, which tools/format fixes.
FORMAT = {
    "storage/a.cc": C + "int  main() {}\n",
    "storage/a.h": C + "int   a();\n",
    "client/c/a.c": C + "int main(void) {return 0;}\n",
    "kernels/cuda/a.cu": C + "constexpr int kA=1;\n",
    "client/a.py": HASH + "print( 1 )\n",
    "client/imports.py": HASH + "import sys\nimport os\n\nprint(os.name, sys.argv)\n",
    "tools/program": "#!/usr/bin/env python3\n" + HASH + "print( 1 )\n",
}
# Violations that a person has to fix: the file, its text, and the message.
OTHER = [
    ("client/a.py", HASH + "import os\n", "F401"),
    ("client/a.py", HASH + "print(undefined)\n", "F821"),
    ("tools/program", "#!/usr/bin/env python3\n" + HASH + "import os\n", "F401"),
    ("client/a.py", "print(1)\n", "client/a.py:1: no line 'SPDX"),
    ("storage/a.cc", "int main() {}\n", "storage/a.cc:1: no line 'SPDX"),
    ("tools/script", "#!/bin/bash\ntrue\n", "tools/script:1: no line 'SPDX"),
    ("tools/CMakeLists.txt", "add_subdirectory(a)\n", "tools/CMakeLists.txt:1: no line 'SPDX"),
    (".ci/run", "#!/bin/bash\ntrue\n", ".ci/run:1: no line 'SPDX"),
    ("proto/a.proto", 'syntax = "proto3";\n', "proto/a.proto:1: no line 'SPDX"),
]


class Format(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in (".clang-format", "ruff.toml"):
            shutil.copy(ROOT / name, self.root / name)
        self.write(CLEAN)

    def write(self, files):
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text, encoding="utf-8")

    def run_format(self, *arguments):
        done = subprocess.run(
            [sys.executable, ROOT / "tools/format", *arguments, self.root], capture_output=True, text=True, check=False
        )
        if done.returncode == NOT_INSTALLED:
            self.skipTest(done.stderr)
        return done.returncode, done.stdout + done.stderr

    def test_a_clean_tree_has_no_breach(self):
        self.assertEqual(self.run_format("--check"), (0, ""))

    def test_formatting_is_reported_and_fixed(self):
        for name, text in FORMAT.items():
            with self.subTest(file=name):
                self.write({**CLEAN, name: text})
                code, report = self.run_format("--check")
                self.assertEqual((code, pathlib.Path(name).name in report), (1, True), report)
                self.assertEqual((self.root / name).read_text(encoding="utf-8"), text, "--check changes nothing")
                self.assertEqual(self.run_format(), (0, ""))
                self.assertEqual(self.run_format("--check"), (0, ""))

    def test_every_other_breach_is_reported(self):
        for name, text, expected in OTHER:
            with self.subTest(file=name, text=text):
                self.write({**CLEAN, name: text})
                code, report = self.run_format("--check")
                self.assertEqual((code, expected in report), (1, True), report)
                if name not in CLEAN:
                    (self.root / name).unlink()

    def test_build_folders_are_not_changed(self):
        self.run_format()
        self.assertEqual((self.root / "build/a.cc").read_text(encoding="utf-8"), CLEAN["build/a.cc"])


if __name__ == "__main__":
    unittest.main()
