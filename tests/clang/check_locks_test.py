#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds violations of lock annotations to a small tree, and expects check_locks.py to find each."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).with_name("check_locks.py")
ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = """#include "kernels/mutex.h"
class Counter {
 public:
  void Add();
  int Get();

 private:
  void Increase() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ashlar::Mutex mutex_;
  int value_ ABSL_GUARDED_BY(mutex_) = 0;
};
"""
SOUND = """#include "counter/counter.h"
void Counter::Increase() { ++value_; }
void Counter::Add() {
  ashlar::MutexLock lock(mutex_);
  Increase();
}
int Counter::Get() {
  ashlar::MutexLock lock(mutex_);
  return value_;
}
"""
LOCK = "  ashlar::MutexLock lock(mutex_);\n"


class CheckLocksTest(unittest.TestCase):
    def check(self, source, group=False):
        """Writes a tree with one library, and returns the check's exit status and output."""
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            (root / "counter").mkdir()
            (root / "Unity").mkdir()
            (root / "counter/counter.h").write_text(HEADER)
            (root / "counter/counter.cc").write_text(source)
            (root / "Unity/unity_0.cxx").write_text(f'#include "{root}/counter/counter.cc"\n')
            file = "Unity/unity_0.cxx" if group else "counter/counter.cc"
            command = f"c++ -std=c++20 -I{root} -I{ROOT} -Wall -fno-gnu-unique -o x.o -c {root / file}"
            entry = {"directory": str(root), "command": command, "file": str(root / file)}
            (root / "compile_commands.json").write_text(json.dumps([entry]))
            done = subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr

    def test_sound_code_passes(self):
        for group in (False, True):
            status, output = self.check(SOUND, group)
            self.assertEqual((status, output.strip()), (0, "checked 1 files: 0 with breaches"))

    def test_unguarded_read_is_found(self):
        for group in (False, True):
            status, output = self.check(SOUND.replace(LOCK + "  return", "  return"), group)
            self.assertEqual(status, 1)
            self.assertIn("reading variable 'value_' requires holding mutex 'mutex_'", output)

    def test_call_without_the_lock_is_found_in_a_file_that_names_no_mutex(self):
        status, output = self.check(SOUND.replace(LOCK, ""))
        self.assertEqual(status, 1)
        self.assertIn("calling function 'Increase' requires holding mutex 'mutex_'", output)

    def test_no_file_with_a_mutex_is_an_error(self):
        self.assertEqual(self.check("int x;\n")[0], 1)


if __name__ == "__main__":
    if shutil.which("clang++") is None:
        print("skipped: clang++ is not installed (Debian: apt-get install clang)")
        sys.exit(77)
    unittest.main()
