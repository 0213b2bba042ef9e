#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ashlar-replay serve: a synthetic trace through real daemons with small tiers.

usage: serve_test.py ASHLAR_REPLAY
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
DOCUMENTS, TOGETHER, TURNS = 8, 4, 3
REQUESTS = DOCUMENTS * TURNS
RATES = (20, 200)
# 16 MiB of memory: enough for four conversations, not for eight. The disk holds all.
SIZES = ["--dram", "1GiB", "--ssd", "8GiB", "--scale", "64"]


def write_trace(path):
    """Writes PATH.segs.jsonl and PATH.reqs.jsonl: conversations about long and short documents, four at a time."""
    segments, requests = [], []

    def segment(first, count):
        segments.append({"id": len(segments), "kind": "text", "n": count, "tok": list(range(first, first + count))})
        return len(segments) - 1

    history = {number: [segment(10_000 * number, 2400 if number % 3 else 800)] for number in range(DOCUMENTS)}
    for first in range(0, DOCUMENTS, TOGETHER):
        for turn in range(TURNS):
            for number in range(first, first + TOGETHER):
                history[number].append(segment(10_000 * number + 5000 + 100 * turn, 20))
                answer = segment(10_000 * number + 8000 + 100 * turn, 30)
                request = {"sid": number, "turn": turn, "ts": len(requests), "outs": [answer]}
                requests.append({**request, "ins": list(history[number])})
                history[number].append(answer)
    for name, lines in (("segs", segments), ("reqs", requests)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        pathlib.Path(f"{path}.{name}.jsonl").write_text(text, encoding="utf-8")


class Serve(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        write_trace(cls.folder / "documents")

    def serve(self, *arguments):
        command = [PROGRAM, "serve", "--trace", self.folder / "documents", "--format", "stf", *arguments]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)

    def test_hits_shorten_the_time_to_first_token(self):
        figures = self.folder / "figures.json"
        rates = ",".join(map(str, RATES))
        arguments = ["--policy", "ashlar,lru,none", "--arrival-rate", rates, "--prefill-rate", "1000:40000,4000:40000"]
        arguments += ["--admission", "all"]
        done = self.serve(*arguments, *SIZES, "--running", "8", "--json", figures)
        self.assertEqual(done.returncode, 0, done.stderr)
        runs = json.loads(figures.read_text(encoding="utf-8"))["runs"]
        for run in runs:
            ttft = [run[f"ttft_p{share}_ms"] for share in (5, 50, 95, 99)]
            self.assertEqual(ttft, sorted(ttft))
            self.assertIn(f"{run['ttft_p50_ms']:.1f}", done.stdout)
        buckets = {run["prompt_tokens_bucket"] for run in runs}
        self.assertEqual(buckets, {"all", "0-1023", "1024-4095"})
        of = {(r["policy"], r["arrival_rate"], r["prompt_tokens_bucket"]): r for r in runs}
        for rate in RATES:
            none = of["none", rate, "all"]
            self.assertEqual((none["requests"], none["hit_rate"]), (REQUESTS, 0))
            self.assertIsNone(none["longest_metadata_turn_ms"])
            self.assertIsNone(none["longest_metadata_turn_cpu_ms"])
            for policy in ("ashlar", "lru"):
                with self.subTest(policy=policy, rate=rate):
                    run = of[policy, rate, "all"]
                    lengths = [of[policy, rate, bucket]["requests"] for bucket in buckets - {"all"}]
                    self.assertEqual((run["requests"], sum(lengths)), (REQUESTS, REQUESTS))
                    self.assertLess(run["hit_rate"], (TURNS - 1) / TURNS, "the first turn of a conversation misses")
                    self.assertGreater(run["longest_metadata_turn_ms"], 0)
                    self.assertGreater(run["longest_metadata_turn_cpu_ms"], 0)
                    self.assertLessEqual(run["longest_metadata_turn_cpu_ms"], run["longest_metadata_turn_ms"] + 0.01)
                    thread = run["metadata_thread"]
                    self.assertGreater(thread["voluntary_switches"], 0, "it waits for work")
                    self.assertGreater(thread["minor_faults"], 0)
                    self.assertGreaterEqual(min(thread.values()), 0)
                    self.assertGreaterEqual(run["metadata_turns"], REQUESTS)
                    self.assertLessEqual(run["metadata_turns_over_1ms"], run["metadata_turns"])
        for policy in ("ashlar", "lru"):
            run = of[policy, RATES[0], "all"]
            self.assertGreater(run["hit_rate"], 0.2, run)
            self.assertGreater(run["landed_bytes"], 0)
            self.assertGreater(run["evicted_bytes"] + run["promoted_bytes"], 0, "memory does not hold all")
            self.assertLess(run["ttft_p50_ms"], of["none", RATES[0], "all"]["ttft_p50_ms"])
        slow, fast = (of["none", rate, "all"]["ttft_p95_ms"] for rate in RATES)
        self.assertGreater(fast, slow, "prompts wait for each other")

    def test_wrong_arguments_are_named(self):
        right = {"--policy": "ashlar", "--arrival-rate": "1", "--dram": "512MiB", "--scale": "64"}
        for name, value in (
            ("--policy", "fifo"),
            ("--arrival-rate", "0"),
            ("--dram", "1MiB"),
            ("--ssd", "much"),
            ("--admission", "none"),
            ("--scale", "100000"),
            ("--prefill-rate", "1024"),
            ("--daemon", "/nowhere/ashlard"),
        ):
            with self.subTest(option=name):
                options = [part for option in {**right, name: value}.items() for part in option]
                done = self.serve(*options)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(value if name == "--daemon" else name, done.stderr)


if __name__ == "__main__":
    unittest.main()
