#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/demo on a small project with the real presets: it installs only the demo's packages, builds the demo and its
daemon without tests, with CUDA only on request, and passes its arguments on. Afterwards, preset release has tests and
CUDA again.

usage: demo_command_test.py SOURCE_ROOT
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(small NONE)
file(WRITE ${CMAKE_BINARY_DIR}/demo.in "#!/bin/sh\necho tests=${ASHLAR_TESTS} cuda=${ASHLAR_CUDA} \"$@\"\n")
add_custom_target(ashlar-demo COMMAND ${CMAKE_COMMAND} -E make_directory bin
  COMMAND ${CMAKE_COMMAND} -E copy demo.in bin/ashlar-demo COMMAND chmod +x bin/ashlar-demo)
add_custom_target(ashlard COMMAND ${CMAKE_COMMAND} -E touch ashlard-built)
add_custom_target(tests ALL COMMAND ${CMAKE_COMMAND} -E touch tests-built)
"""


class DemoCommand(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "tools").mkdir()
        for file in ("tools/demo", "tools/dependencies.sh", "CMakePresets.json"):
            shutil.copy(ROOT / file, self.root / file)
        (self.root / "CMakeLists.txt").write_text(PROJECT)

    def run_demo(self, *arguments, path=None):
        environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
        done = subprocess.run(
            [self.root / "tools/demo", *arguments], capture_output=True, text=True, check=False, env=environment
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()[-1]

    def cached(self, name):
        cache = (self.root / "build/release/CMakeCache.txt").read_text().splitlines()
        return next(line.split("=", 1)[1] for line in cache if line.startswith(name + ":"))

    def test_builds_only_what_it_runs(self):
        self.assertEqual(self.run_demo("--quick", "--docs", "a b"), "tests=OFF cuda=OFF --quick --docs a b")
        self.assertTrue((self.root / "build/release/ashlard-built").exists())
        self.assertFalse((self.root / "build/release/tests-built").exists())

    def test_a_bare_machine_gets_only_the_demos_packages(self):
        fakes = self.root / "fakes"
        fakes.mkdir()
        log = self.root / "installed"
        for name, script in (
            ("dpkg-query", "exit 1"),  # nothing is installed
            ("apt-get", f'echo "$@" >>{log}'),
            ("sudo", '"$@"'),
        ):
            (fakes / name).write_text(f"#!/bin/sh\n{script}\n")
            (fakes / name).chmod(0o755)
        self.run_demo(path=fakes)
        installed = set(log.read_text().split())
        self.assertLessEqual({"g++", "cmake", "libgrpc++-dev", "librocksdb-dev"}, installed)
        for part in ("prometheus", "etcd-server", "libgtest-dev", "python3-dev", "gnuplot-nox"):
            self.assertNotIn(part, installed)

    def test_cuda_is_built_when_asked_for(self):
        self.assertEqual(self.run_demo("--cuda", "--quick"), "tests=OFF cuda=ON --quick")
        self.assertEqual(self.run_demo(), "tests=OFF cuda=OFF")

    def test_tests_are_back_with_their_own_preset(self):
        self.run_demo()
        subprocess.run(["cmake", "--preset", "release"], cwd=self.root, capture_output=True, check=True)
        self.assertEqual((self.cached("ASHLAR_TESTS"), self.cached("ASHLAR_CUDA")), ("ON", "AUTO"))


if __name__ == "__main__":
    unittest.main()
