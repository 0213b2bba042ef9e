#!/usr/bin/env python3
"""Runs the C example, and calls that it does not make, against a real daemon, also over the daemon's death, and beside Debian's own gRPC.

usage: example_test.py SHORTEST_C ASHLARD LIBRARY CALLS_C

LIBRARY is "none" where the programs have the code inside, as under sanitizers.
"""

import ctypes
import ctypes.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SHORTEST, ASHLARD, LIBRARY, CALLS = sys.argv[1:5]
LINE = re.compile(r"(\d+) of 3 segments hit, (\d+) of 117 tokens from the cache: ([a-z]{12})\n")


class Example(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.config = pathlib.Path(self.folder.name, "ashlard.yaml")
        self.config.write_text(
            f"listen: {{rpc_socket: {self.folder.name}/rpc.sock, session_socket: {self.folder.name}/session.sock}}\n"
            "dram: {capacity_bytes: 64MiB, arena_bytes: 8MiB}\n")
        self.start()

    def start(self):
        self.daemon = subprocess.Popen([ASHLARD, "--config", self.config], stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.daemon.stderr.close)
        self.addCleanup(self.daemon.wait)
        self.addCleanup(self.daemon.kill)
        for line in self.daemon.stderr:
            if "daemon started" in line:
                return
        self.fail("the daemon did not start")

    def sockets(self):
        return [f"{self.folder.name}/rpc.sock", f"{self.folder.name}/session.sock"]

    def run_rounds(self, between):
        """Two prompts a round; `between` is called before the second and the third round."""
        with subprocess.Popen([SHORTEST, *self.sockets(), "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True) as engine:
            lines = []
            for number in range(3):
                if number > 0:
                    between[number - 1]()
                    engine.stdin.write("\n")
                    engine.stdin.flush()
                lines += [LINE.fullmatch(engine.stdout.readline()) for _ in range(2)]
            self.assertEqual(engine.wait(60), 0)
        self.assertTrue(all(lines))
        return [(int(line[1]), int(line[2]), line[3]) for line in lines]

    def test_segments_come_from_the_cache_in_another_order(self):
        answers = self.run_rounds([lambda: None, lambda: None])
        self.assertEqual([hits for hits, _, _ in answers], [0, 3, 3, 3, 3, 3])
        self.assertEqual({cached for _, cached, _ in answers}, {83})
        self.assertEqual(answers[0][2], answers[2][2])

    def test_a_killed_daemon_costs_time_only(self):
        def kill():
            self.daemon.kill()
            self.daemon.wait()

        answers = self.run_rounds([kill, self.start])
        self.assertEqual([cached for _, cached, _ in answers[2:4]], [0, 0])
        # The engine finds the new daemon by itself, now or a little later.
        self.assertLessEqual({cached for _, cached, _ in answers[4:]}, {0, 83})

    def test_calls_that_the_example_does_not_make(self):
        for name in ("many", "present", "cold"):
            with self.subTest(name):
                done = subprocess.run([CALLS, name, *self.sockets()], capture_output=True, text=True, timeout=60)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipIf(LIBRARY == "none", "no shared library")
    def test_bad_structs_are_refused_by_name(self):
        library = ctypes.CDLL(LIBRARY)
        library.ashlar_error_message.restype = ctypes.c_char_p
        out = ctypes.c_void_p()
        for options, message in ((None, b"options: null"), (b"\0" * 256, b"options.size: not set"),
                                 ((256).to_bytes(8, "little") + b"\1" * 248, b"options.size: of a newer library")):
            self.assertEqual(library.ashlar_open(options, ctypes.byref(out)), 3)
            self.assertTrue(library.ashlar_error_message().startswith(message), library.ashlar_error_message())
            self.assertIsNone(out.value)
        old = (8 + 24).to_bytes(8, "little") + b"\0" * 248  # of a header that knew three fields
        self.assertEqual(library.ashlar_open(old, ctypes.byref(out)), 3)
        self.assertEqual(library.ashlar_error_message(), b"model: null")

    @unittest.skipIf(LIBRARY == "none", "no shared library")
    def test_it_lives_beside_another_grpc_of_the_process(self):
        code = f"""
import ctypes, ctypes.util, os, sys
other = ctypes.CDLL(ctypes.util.find_library("grpc"), mode=ctypes.RTLD_GLOBAL)
other.grpc_init()
ashlar = ctypes.CDLL({LIBRARY!r})
other.grpc_version_string.restype = ctypes.c_char_p
assert other.grpc_version_string()
ashlar.ashlar_version.restype = ctypes.c_char_p
assert ashlar.ashlar_version()
out = ctypes.c_void_p()
assert ashlar.ashlar_open(None, ctypes.byref(out)) == 3
child = os.fork()
if child == 0: os._exit(0 if ashlar.ashlar_version() else 1)
assert os.waitpid(child, 0)[1] == 0
other.grpc_shutdown()
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
