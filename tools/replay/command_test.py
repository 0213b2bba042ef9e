#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ashlar-replay as it is run: figures in the table and the file, a picture, and errors that name what is wrong.

usage: command_test.py ASHLAR_REPLAY
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


def write_trace(folder):
    """Ten documents with three questions each, asked in turn; returns the trace's name."""
    segments, requests = [], []

    def segment(first, count):
        segments.append({"id": len(segments), "kind": "text", "n": count, "tok": list(range(first, first + count))})
        return len(segments) - 1

    documents = [segment(document * 1000, 300) for document in range(10)]
    for turn in range(3):
        for number, document in enumerate(documents):
            question = segment(100000 + 1000 * turn + 20 * number, 12)
            requests.append({"sid": number, "turn": turn, "ts": len(requests), "ins": [document, question], "outs": []})
    for name, lines in (("segs", segments), ("reqs", requests)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"documents.{name}.jsonl").write_text(text, encoding="utf-8")
    return folder / "documents"


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.trace = write_trace(self.folder)

    def run_with(self, *arguments):
        return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False)

    def test_run_gives_the_same_figures_to_people_and_machines(self):
        figures, picture = self.folder / "figures.json", self.folder / "picture.svg"
        done = self.run_with(
            "run",
            "--trace",
            self.trace,
            "--format",
            "stf",
            "--capacity",
            "1GB,4GB",
            "--policy",
            "none,block:64,sglang,marconi,ashlar",
            "--capture",
            "1",
            "--json",
            figures,
            "--plot",
            picture,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        runs = json.loads(figures.read_text(encoding="utf-8"))["runs"]
        self.assertEqual([run["policy"] for run in runs], ["none", "block:64", "sglang", "marconi", "ashlar"] * 2)
        by_policy = {run["policy"]: run for run in runs[5:]}
        self.assertEqual(by_policy["none"]["token_hit_rate"], 0)
        # Every document once, then twice where states are before the question, then once where only branches have one.
        self.assertAlmostEqual(by_policy["block:64"]["token_hit_rate"], 2 / 3 * 256 / 312, places=6)
        self.assertAlmostEqual(by_policy["sglang"]["token_hit_rate"], 1 / 3 * 300 / 312, places=6)
        for run in runs:
            self.assertLessEqual(run["peak_bytes"], run["capacity_bytes"])
            self.assertIn(f"{run['token_hit_rate']:.4f}", done.stdout)
            misses = run["misses"]["never_seen"] + run["misses"]["lost"]
            self.assertAlmostEqual(misses / (30 * 312), 1 - run["token_hit_rate"], places=6)
        self.assertIn("<svg", picture.read_text(encoding="utf-8"))
        self.assertNotIn("%", done.stderr, "progress is for terminals")

    def test_every_policy_is_clipped_to_what_the_engine_captures(self):
        figures = self.folder / "figures.json"
        policies = "block:64,vllm,sglang,sglang-now,marconi:oracle,marconi-offload,ashlar"
        command = ["run", "--trace", self.trace, "--format", "stf", "--capacity", "4GB", "--policy", policies]
        done = self.run_with(*command, "--capture", 128, "--json", figures)
        self.assertEqual(done.returncode, 0, done.stderr)
        runs = json.loads(figures.read_text(encoding="utf-8"))["runs"]
        self.assertEqual([run["policy"] for run in runs], policies.split(","))
        for run in runs:
            self.assertEqual(run["capture"], 128)
            self.assertAlmostEqual(run["optimum"], 2 / 3 * 256 / 312, places=6)
            self.assertLessEqual(run["token_hit_rate"], run["optimum"] + 1e-9)
            self.assertAlmostEqual(run["token_hit_rate"] * 30 * 312 % 128, 0, places=6)
        done = self.run_with(*command, "--capture", 0)
        self.assertEqual((done.returncode, "--capture" in done.stderr), (2, True), done.stderr)

    def test_states_are_captured_at_an_engines_granularity_by_default(self):
        figures = self.folder / "figures.json"
        common = ["--trace", self.trace, "--format", "stf", "--capacity", "4GB", "--json", figures]
        rates = []
        for more in ([], ["--capture", 64], ["--capture", 1]):
            done = self.run_with("run", *common, "--policy", "sglang-now,ashlar", *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            runs = json.loads(figures.read_text(encoding="utf-8"))["runs"]
            rates.append([(run["capture"], run["token_hit_rate"]) for run in runs])
        self.assertEqual(rates[0], rates[1])
        self.assertNotEqual(rates[0], rates[2])
        done = self.run_with("segments", *common)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(figures.read_text(encoding="utf-8"))["capture"], 64)

    def test_only_ashlar_pays_for_whole_pages(self):
        figures = self.folder / "figures.json"
        command = ["run", "--trace", self.trace, "--format", "stf", "--capacity", "4GB", "--policy", "vllm,ashlar"]
        command += ["--capture", 1]
        peaks = {}
        for page in (1, 256):
            done = self.run_with(*command, "--page", page, "--json", figures)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = json.loads(figures.read_text(encoding="utf-8"))
            self.assertEqual(found["page"], page)
            peaks[page] = [run["peak_bytes"] for run in found["runs"]]
        self.assertEqual(peaks[1][0], peaks[256][0])
        self.assertLess(peaks[1][1], peaks[256][1])

    def test_a_failed_plot_or_table_keeps_the_figures(self):
        run = ["run", "--trace", self.trace, "--format", "stf", "--capacity", "1GB", "--policy", "none"]
        figures, picture = self.folder / "figures.json", self.folder / "none" / "picture.svg"
        done = self.run_with(*run, "--json", figures, "--plot", picture)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"{picture}: cannot write", done.stderr)
        self.assertNotIn("<svg", done.stdout)
        self.assertEqual(len(json.loads(figures.read_text(encoding="utf-8"))["runs"]), 1)
        (self.folder / "gnuplot").write_text("#!/bin/sh\nexit 3\n")
        (self.folder / "gnuplot").chmod(0o755)
        path = f"{self.folder}:/usr/bin:/bin"
        done = subprocess.run(
            [PROGRAM, *map(str, run), "--plot", self.folder / "p.svg"],
            env={"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertIn("--plot: gnuplot failed", done.stderr)
        self.assertEqual((done.returncode, (self.folder / "p.svg").exists()), (1, False))
        for full in (("--json", "/dev/full"), ("--plot", "/dev/full")):
            done = self.run_with(*run, *full)
            self.assertEqual((done.returncode, "/dev/full: cannot write" in done.stderr), (1, True), done.stderr)
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [PROGRAM, *map(str, run)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        self.assertEqual((done.returncode, "stdout: cannot write" in done.stderr), (1, True), done.stderr)

    def test_other_commands_give_their_figures(self):
        figures = self.folder / "figures.json"
        done = self.run_with("pareto", "--trace", self.trace, "--format", "stf", "--json", figures)
        self.assertEqual(done.returncode, 0, done.stderr)
        placements = json.loads(figures.read_text(encoding="utf-8"))["placements"]
        self.assertEqual({p["checkpoints"] for p in placements}, set(range(1, 33)))
        done = self.run_with(
            "segments", "--trace", self.trace, "--format", "stf", "--capacity", "1GB", "--json", figures
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        segments = json.loads(figures.read_text(encoding="utf-8"))["segments"]
        best = max(s["token_hit_rate"] for s in segments)
        self.assertAlmostEqual(best, 2 / 3 * 300 / 312, places=6)
        for row in segments:
            self.assertLessEqual(row["ttft_ms"]["p50"], row["ttft_ms"]["p95"])
        self.assertEqual(sum(row["reuse"] == "prefixes" for row in segments), 2, "without a limit, and at 1 GB")

    def segments(self, *arguments):
        figures = self.folder / "figures.json"
        done = self.run_with("segments", "--trace", self.trace, "--format", "stf", "--json", figures, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(figures.read_text(encoding="utf-8"))["segments"]

    def test_prefixes_alone_are_clipped_to_what_the_engine_captures(self):
        alone = {capture: self.segments("--capture", capture)[0] for capture in (1, 64)}
        self.assertEqual({row["reuse"] for row in alone.values()}, {"prefixes"})
        self.assertEqual({row["segments"] for row in alone.values()}, {0})
        # A state where the next question diverges is captured by the second one; before it, at a multiple of 64.
        self.assertGreaterEqual(alone[1]["token_hit_rate"], 1 / 3 * 300 / 312 - 1e-6)
        self.assertGreaterEqual(alone[64]["token_hit_rate"], 1 / 3 * 256 / 312)
        self.assertLessEqual(alone[64]["token_hit_rate"], 2 / 3 * 256 / 312 + 1e-6)

    def test_fp32_states_take_twice_the_bytes(self):
        sizes = {kind: self.segments("--state-type", kind)[1] for kind in ("bf16", "fp32")}
        self.assertEqual(sizes["fp32"]["tuple_bytes"], 2 * sizes["bf16"]["tuple_bytes"])
        self.assertGreater(sizes["fp32"]["ttft_ms"]["p50"], sizes["bf16"]["ttft_ms"]["p50"])

    def test_break_even_is_where_moving_takes_as_long_as_computing(self):
        model = self.folder / "model.json"
        sizes = {"page_tokens": 16, "page_bytes": 16, "checkpoint_bytes": 1_000_000, "transition_bytes": 1_000_000}
        rates = {"flops_per_token": 1e9, "flops_per_square": 0, "flops_per_second": 1e12, "link_bytes_per_second": 1}
        model.write_text(json.dumps({**sizes, **rates}), encoding="utf-8")
        figures = self.folder / "figures.json"
        done = self.run_with("break-even", "--model", model, "--link", "10MB,1KB", "--json", figures)
        self.assertEqual(done.returncode, 0, done.stderr)
        shortest = {
            (row["state_type"], row["transitions"], row["link_bytes_per_second"]): row["tokens"]
            for row in json.loads(figures.read_text(encoding="utf-8"))["shortest"]
        }
        # 2 MB at 10 MB/s take 200 ms, a token 1 ms.
        self.assertEqual(shortest["bf16", "dense", 10_000_000], 208)
        self.assertEqual(shortest["fp32", "dense", 10_000_000], 416)
        self.assertLess(shortest["bf16", "adaptive", 10_000_000], 208)
        self.assertIsNone(shortest["bf16", "dense", 1000], "a token's own byte takes as long as computing it")

    def test_what_is_wrong_is_named(self):
        run = ["run", "--trace", self.trace, "--format", "stf", "--capacity", "1GB", "--policy", "ashlar"]

        def without(option):
            at = run.index(option)
            return run[:at] + run[at + 2 :]

        for arguments, name, code in (
            ([], "command", 2),
            (["walk"], "walk", 2),
            (without("--trace"), "--trace", 2),
            (without("--capacity"), "--capacity", 2),
            (run + ["--capacity", "much"], "much", 2),
            (run + ["--threads", "0"], "threads", 2),
            (run + ["--colour", "red"], "--colour", 2),
            (["break-even", "--link", "fast"], "--link", 2),
            (["segments", *run[1:5], "--state-type", "fp8"], "--state-type", 2),
            (run + ["--policy", "lru"], "lru", 1),
            (run + ["--model", "/none"], "/none", 1),
            (run + ["--format", "csv"], "csv", 1),
            (run + ["--trace", "/none"], "/none.segs.jsonl", 1),
            (run + ["--json", "/none/figures"], "/none/figures", 1),
        ):
            with self.subTest(name=name):
                done = self.run_with(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(name, done.stderr)


if __name__ == "__main__":
    unittest.main()
