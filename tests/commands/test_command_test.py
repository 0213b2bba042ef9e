#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/test on a small project whose tests pass, fail, are skipped or cannot start: the last line and the exit status
must report that.

usage: test_command_test.py SOURCE_ROOT
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()

PASSES = "add_test(NAME Passes.{0} COMMAND ${{CMAKE_COMMAND}} -E true)\n"
FAILS = "add_test(NAME Fails.{0} COMMAND ${{CMAKE_COMMAND}} -E false)\n"
SKIPS = (
    "add_test(NAME Skips.{0} COMMAND ${{CMAKE_COMMAND}} -E echo skip-me)\n"
    "set_tests_properties(Skips.{0} PROPERTIES SKIP_REGULAR_EXPRESSION skip-me)\n"
)
CANNOT_START = "add_test(NAME CannotStart.{0} COMMAND /nonexistent/{0})\n"


class TestCommand(unittest.TestCase):
    def run_over(self, *tests, arguments=(), extra="", presets=("release", "asan", "tsan")):
        """Returns the last line and the exit status of tools/test over a project with these tests."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for file in ("test", "dependencies.sh"):
                (root / "tools").mkdir(exist_ok=True)
                shutil.copy(ROOT / "tools" / file, root / "tools" / file)
            packages = root / "tools" / "python-environment"  # the test fetches nothing
            packages.write_text("#!/bin/sh\n")
            packages.chmod(0o755)
            lines = "".join(test.format(number) for number, test in enumerate(tests))
            (root / "CMakeLists.txt").write_text(
                f"cmake_minimum_required(VERSION 3.25)\nproject(small NONE)\nenable_testing()\n{extra}{lines}"
            )
            (root / "CMakePresets.json").write_text(
                json.dumps(
                    {
                        "version": 6,
                        "configurePresets": [
                            {"name": name, "generator": "Ninja", "binaryDir": "${sourceDir}/build/" + name}
                            for name in presets
                        ],
                        "buildPresets": [{"name": name, "configurePreset": name} for name in presets],
                        "testPresets": [{"name": name, "configurePreset": name} for name in presets],
                    }
                )
            )
            done = subprocess.run([root / "tools/test", *arguments], capture_output=True, text=True, check=False)
            return done.stdout.splitlines()[-1], done.returncode

    def test_all_pass(self):
        self.assertEqual(self.run_over(PASSES, PASSES), ("2 passed, 0 failed", 0))

    def test_failures_fail(self):
        self.assertEqual(self.run_over(PASSES, FAILS, FAILS), ("1 passed, 2 failed", 1))

    def test_skipped_are_counted_apart(self):
        self.assertEqual(self.run_over(PASSES, SKIPS), ("1 passed, 0 failed, 1 skipped", 0))
        self.assertEqual(self.run_over(FAILS, SKIPS), ("0 passed, 1 failed, 1 skipped", 1))

    def test_a_test_that_cannot_start_fails(self):
        self.assertEqual(self.run_over(PASSES, CANNOT_START), ("1 passed, 1 failed", 1))
        self.assertEqual(self.run_over(PASSES, CANNOT_START, FAILS, SKIPS), ("1 passed, 2 failed, 1 skipped", 1))

    def test_no_tests_is_a_failure(self):
        self.assertEqual(self.run_over(), ("0 passed, 1 failed", 1))
        self.assertEqual(self.run_over(PASSES, arguments=["--filter", "Nothing"]), ("0 passed, 1 failed", 1))

    def test_a_filter_selects(self):
        self.assertEqual(self.run_over(PASSES, FAILS, arguments=["--filter", "^Passes"]), ("1 passed, 0 failed", 0))

    def test_fast_and_docs_build_and_run_their_tests(self):
        labels = (
            "add_custom_target(fast_tests COMMAND ${CMAKE_COMMAND} -E touch fast-built)\n"
            "add_custom_target(documented_programs COMMAND ${CMAKE_COMMAND} -E touch docs-built)\n"
            "add_custom_target(everything ALL COMMAND ${CMAKE_COMMAND} -E false)\n"
            "add_test(NAME Unit COMMAND ${CMAKE_COMMAND} -E cat fast-built)\n"
            "add_test(NAME Page COMMAND ${CMAKE_COMMAND} -E cat docs-built)\n"
            "set_tests_properties(Unit PROPERTIES LABELS fast)\n"
            "set_tests_properties(Page PROPERTIES LABELS docs)\n"
        )
        self.assertEqual(self.run_over(FAILS, extra=labels, arguments=["--fast"]), ("1 passed, 0 failed", 0))
        self.assertEqual(self.run_over(FAILS, extra=labels, arguments=["--docs"]), ("1 passed, 0 failed", 0))
        self.assertEqual(self.run_over(PASSES, extra=labels), ("0 passed, 1 failed", 1))  # the whole build fails

    def test_sanitize_adds_up_both_presets(self):
        self.assertEqual(
            self.run_over(PASSES, SKIPS, arguments=["--sanitize", "--jobs", "1"]), ("2 passed, 0 failed, 2 skipped", 0)
        )

    def test_a_configuration_or_build_that_fails_is_a_failure(self):
        self.assertEqual(self.run_over(PASSES, extra="message(FATAL_ERROR no)\n"), ("0 passed, 1 failed", 1))
        self.assertEqual(
            self.run_over(PASSES, extra="add_custom_target(no ALL COMMAND false)\n"), ("0 passed, 1 failed", 1)
        )

    def test_unknown_options_are_refused(self):
        done = subprocess.run([ROOT / "tools/test", "--nonsense"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown option --nonsense", done.stderr)


if __name__ == "__main__":
    unittest.main()
