#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the C example, and calls that it does not make, against a real daemon, also across the daemon's death, and
together with Debian's own gRPC.

usage: example_test.py SHORTEST_C ASHLARD LIBRARY CALLS_C [EMULATED_ASHLARD]

LIBRARY is "none" if the programs contain the library's code, as under sanitizers.
"""

import ctypes
import ctypes.util
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

SHORTEST, ASHLARD, LIBRARY, CALLS = sys.argv[1:5]
EMULATED = "".join(sys.argv[5:])  # a daemon with an emulated GPU; empty: not in this build
ABI = pathlib.Path(__file__).parents[1] / "abi.txt"
LINE = re.compile(r"(\d+) of 3 segments hit, (\d+) of 117 tokens from the cache: ([a-z]{12})\n")


class Example(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.config = pathlib.Path(self.folder.name, "ashlard.yaml")
        self.config.write_text(
            f"listen: {{rpc_socket: {self.folder.name}/rpc.sock, session_socket: {self.folder.name}/session.sock}}\n"
            "dram: {capacity_bytes: 64MiB, arena_bytes: 8MiB}\n"
        )
        self.start()

    def start(self, program=ASHLARD):
        self.daemon = subprocess.Popen([program, "--config", self.config], stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.daemon.stderr.close)
        self.addCleanup(self.daemon.wait)
        self.addCleanup(self.daemon.kill)
        for line in self.daemon.stderr:
            if "daemon started" in line:
                return
        self.fail("the daemon did not start")

    def sockets(self):
        return [f"{self.folder.name}/rpc.sock", f"{self.folder.name}/session.sock"]

    def engine(self):
        """Starts the example; it serves two prompts, and two more for each line of its input."""
        engine = subprocess.Popen(
            [SHORTEST, *self.sockets(), "1000000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(engine.stdout.close)
        self.addCleanup(engine.wait)
        self.addCleanup(engine.kill)
        return engine

    def round(self, engine):
        """Reads the two prompts of a round: (segments hit, tokens from the cache, answer) each."""
        lines = [LINE.fullmatch(engine.stdout.readline()) for _ in range(2)]
        self.assertTrue(all(lines))
        return [(int(line[1]), int(line[2]), line[3]) for line in lines]

    def next_round(self, engine):
        engine.stdin.write("\n")
        engine.stdin.flush()
        return self.round(engine)

    def end(self, engine):
        engine.stdin.close()
        self.assertEqual(engine.wait(60), 0)

    def test_segments_come_from_the_cache_in_another_order(self):
        engine = self.engine()
        answers = self.round(engine) + self.next_round(engine) + self.next_round(engine)
        self.end(engine)
        self.assertEqual([hits for hits, _, _ in answers], [0, 3, 3, 3, 3, 3])
        self.assertEqual({cached for _, cached, _ in answers}, {83})
        self.assertEqual(answers[0][2], answers[2][2])

    def test_a_killed_daemon_only_costs_time(self):
        engine = self.engine()
        first = self.round(engine)
        self.daemon.kill()
        self.daemon.wait()
        self.assertEqual([cached for _, cached, _ in self.next_round(engine)], [0, 0])
        self.start()
        # The engine finds the new daemon by itself. A prompt that it serves meanwhile may have some segments cached.
        until = time.monotonic() + 60
        while (answers := self.next_round(engine))[1][1] < 83:
            self.assertLess(time.monotonic(), until)
        self.end(engine)
        self.assertEqual([answer for _, _, answer in answers], [answer for _, _, answer in first])

    def test_calls_that_the_example_does_not_use(self):
        for name, *more in (
            ("many",),
            ("present",),
            ("cold",),
            ("started",),
            ("groups",),
            ("in_place",),
            ("numbers",),
            ("other_pages",),
            ("salts",),
            ("handoff", "node1", "unavailable"),
        ):
            with self.subTest(name):
                done = subprocess.run([CALLS, name, *self.sockets(), *more], capture_output=True, text=True, timeout=60)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipUnless(EMULATED, "no emulated GPU")
    def test_pages_on_a_gpu(self):
        self.daemon.kill()
        self.daemon.wait()
        with open(self.config, "a") as config:
            config.write("gpu: {device: 0}\n")
        self.start(EMULATED)
        done = subprocess.run([CALLS, "gpu", *self.sockets()], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipIf(LIBRARY == "none", "no shared library")
    def test_bad_structs_are_refused_by_name(self):
        library = ctypes.CDLL(LIBRARY)
        library.ashlar_error_message.restype = ctypes.c_char_p
        out = ctypes.c_void_p()
        for options, message in (
            (None, b"options: null"),
            (b"\0" * 256, b"options.size: not set"),
            ((256).to_bytes(8, "little") + b"\1" * 248, b"options.size: the struct is from a newer header"),
        ):
            self.assertEqual(library.ashlar_open(options, ctypes.byref(out)), 3)
            self.assertTrue(library.ashlar_error_message().startswith(message), library.ashlar_error_message())
            self.assertIsNone(out.value)
        old = (8 + 24).to_bytes(8, "little") + b"\0" * 248  # size in a header that knew three fields
        self.assertEqual(library.ashlar_open(old, ctypes.byref(out)), 3)
        self.assertEqual(library.ashlar_error_message(), b"model: null")

    @unittest.skipIf(LIBRARY == "none", "no shared library")
    def test_a_prompt_is_cut_at_its_separators(self):
        library, number = ctypes.CDLL(LIBRARY), ctypes.c_uint64
        library.ashlar_error_message.restype = ctypes.c_char_p
        tokens, separator = (ctypes.c_int32 * 9)(1, 2, 8, 9, 3, 8, 9, 4, 5), (ctypes.c_int32 * 2)(8, 9)
        lengths, count = (number * 2)(), number()

        def cut(length, minimum, capacity):
            rest = number(minimum), lengths, number(capacity), ctypes.byref(count)
            return library.ashlar_segment_lengths(tokens, number(9), separator, number(length), *rest)

        self.assertEqual((cut(2, 0, 2), count.value, *lengths), (0, 2, 4, 3))
        self.assertEqual((cut(2, 5, 2), count.value, lengths[0]), (0, 1, 7))
        self.assertEqual((cut(1, 0, 1), count.value, lengths[0]), (0, 2, 7), "more segments than there is space for")
        self.assertEqual(cut(0, 0, 2), 3)
        self.assertEqual(library.ashlar_error_message(), b"separator: no tokens; expected at least one")

    @unittest.skipIf(LIBRARY == "none", "no shared library")
    def test_works_in_a_process_with_another_grpc(self):
        code = f"""
import ctypes, ctypes.util, os, pathlib
other = ctypes.CDLL(ctypes.util.find_library("grpc"), mode=ctypes.RTLD_GLOBAL)
other.grpc_init()
ashlar = ctypes.CDLL({LIBRARY!r})
other.grpc_version_string.restype = ctypes.c_char_p
assert other.grpc_version_string()
ashlar.ashlar_version.restype = ashlar.ashlar_error_message.restype = ashlar.ashlar_miss_name.restype = ctypes.c_char_p
assert ashlar.ashlar_version()

sizes, places, numbers = {{}}, {{}}, {{}}
for what, name, *values in map(str.split, pathlib.Path({str(ABI)!r}).read_text().splitlines()):
    if what == "struct": sizes[name] = int(values[0])
    if what == "field": places[name] = tuple(map(int, values))
    if what == "number": numbers[name] = int(values[0])

def struct(name, **values):
    data = ctypes.create_string_buffer(sizes[name])
    data.kept = values
    for field, value in dict(size=sizes[name], **values).items():
        at, width = places[name + "." + field]
        data[at : at + width] = (value if isinstance(value, int) else ctypes.addressof(value)).to_bytes(width, "little")
    return data

def read(data, name, field):
    at, width = places[name + "." + field]
    return int.from_bytes(data[at : at + width], "little")

def check(code):
    assert code == numbers["ASHLAR_OK"], ashlar.ashlar_error_message()

text = ctypes.create_string_buffer
layer = struct("ashlar_layer", kind=numbers["ASHLAR_GQA"], kv_heads=2, key_dim=16, value_dim=16)
model = struct("ashlar_model", model_id=text(b"beside"), weights_digest=text(b"1"), page_tokens=16, layers=layer, layer_count=1)
memory = struct("ashlar_memory", kind=numbers["ASHLAR_MEMORY_NONE"])
options = struct("ashlar_open_options", rpc_socket=text({self.sockets()[0].encode()!r}),
                 session_socket=text({self.sockets()[1].encode()!r}), model=model, memory=memory)
cache, request = ctypes.c_void_p(), ctypes.c_void_p()
check(ashlar.ashlar_open(options, ctypes.byref(cache)))
tokens, lengths = (ctypes.c_int32 * 65)(*range(65)), (ctypes.c_uint64 * 1)(64)
prompt = struct("ashlar_prompt", tokens=tokens, token_count=65, segment_lengths=lengths, segment_count=1)
check(ashlar.ashlar_begin(cache, prompt, 1, ctypes.byref(request)))
segment = struct("ashlar_segment")
check(ashlar.ashlar_request_segment(request, 0, segment))
reason = ashlar.ashlar_miss_name(read(segment, "ashlar_segment", "reason"))
assert reason == b"never_seen", reason  # as the daemon alone can say
child = os.fork()
if child == 0: os._exit(0 if ashlar.ashlar_version() else 1)
assert os.waitpid(child, 0)[1] == 0
ashlar.ashlar_request_end(request)
ashlar.ashlar_close(cache)
other.grpc_shutdown()
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
