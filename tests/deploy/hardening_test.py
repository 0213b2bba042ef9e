#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the hardening of binaries: position-independent, relocations read-only, stack protector, fortified libc calls,
and marked targets of indirect branches.

usage: hardening_test.py BINARY...
"""

import re
import subprocess
import sys
import unittest

BINARIES = sys.argv[1:]


def read(option, binary):
    return subprocess.run(["readelf", "-W", option, binary], capture_output=True, text=True, check=True).stdout


class Hardening(unittest.TestCase):
    def each(self, check):
        self.assertTrue(BINARIES)
        for binary in BINARIES:
            with self.subTest(binary=binary):
                check(binary)

    def test_code_is_position_independent(self):
        self.each(lambda binary: self.assertRegex(read("-h", binary), r"Type:\s+DYN"))

    def test_relocations_are_read_only(self):
        def check(binary):
            self.assertIn("GNU_RELRO", read("-l", binary))
            self.assertRegex(read("-d", binary), r"BIND_NOW|FLAGS.*NOW")

        self.each(check)

    def test_no_stack_is_executable(self):
        self.each(lambda binary: self.assertNotRegex(read("-l", binary), r"GNU_STACK.*RWE"))

    def test_stacks_are_protected_and_calls_fortified(self):
        def check(binary):
            symbols = read("--dyn-syms", binary)
            self.assertIn("__stack_chk_fail", symbols)
            self.assertRegex(symbols, r"__(memcpy|snprintf|printf|fprintf|read|memset|strncpy|vsnprintf)_chk")

        self.each(check)

    def test_indirect_branches_are_marked(self):
        # The linker drops the note if one object lacks the marks, as Debian's start files and libraries may. This
        # build's objects have them.
        def check(binary):
            code = subprocess.run(
                ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", binary],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            ours = re.findall(r"^[0-9a-f]+ <(_ZN6ashlar\w*)>:\n\s*[0-9a-f]+:\s+(\w+)", code, re.M)
            marked = sum(first == "endbr64" for _, first in ours)
            self.assertGreater(len(ours), 100)
            self.assertGreater(marked / len(ours), 0.5)

        self.each(check)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
