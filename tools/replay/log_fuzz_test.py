#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damaged logs of engines: trace-from-log refuses each by its line, or writes a trace in which every request is whole.

usage: log_fuzz_test.py SOURCE_ROOT    (environment: ASHLAR_LOG_SECONDS, how long; ASHLAR_LOG_SEED)
"""

import contextlib
import copy
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(sys.argv.pop(1))
SECONDS = float(os.environ.get("ASHLAR_LOG_SECONDS", "3"))
SEED = int(os.environ.get("ASHLAR_LOG_SEED", random.SystemRandom().randrange(1 << 32)))
ANYTHING = [
    None,
    True,
    0,
    -1,
    1.5,
    1e300,
    float("nan"),
    float("inf"),
    10**400,
    2**31,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    ["a"],
    {},
    {"a": 1},
]


def load_tool():
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("trace_from_log", str(ROOT / "tools/trace-from-log"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("trace_from_log", loader))
    loader.exec_module(module)
    return module


TOOL = load_tool()
SGLANG = [
    {"timestamp": "2026-11-24T10:00:05.5", "event": "request.received", "rid": "r", "obj": {"input_ids": [1, 2]}},
    {
        "timestamp": 1795514735.5,
        "event": "request.finished",
        "rid": "r",
        "obj": {"text": "Why?", "input_ids": [1, 2, 7]},
        "out": {"text": "So.", "output_ids": [3], "meta_info": {"prompt_tokens": 3}},
    },
]
OPENAI = [
    {
        "created": 5,
        "body": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Why?"}], "tool_calls": [{"id": 1}]},
            ],
            "tools": [{"name": "f"}],
        },
        "response": {"body": {"choices": [{"message": {"content": "So."}}], "usage": {"prompt_tokens": 12}}},
    },
    {"ts": "2026-11-24T10:00:05Z", "prompt": [1, 2, 3]},
    {"time": 9, "request": {"prompt": "text"}},
]
VLLM = (
    "(APIServer pid=7) DEBUG 11-24 10:01:05 [l.py:52] Request a-0 details: prompt: 'line\\none', prompt_token_ids: [1, 2, 7], prompt_embeds shape\n"
    "DEBUG 11-24 10:01:06 [l.py:52] Request a-1 details: prompt: 'two', prompt_token_ids: None, prompt_embeds shape: None.\n"
    "DEBUG 11-24 10:01:07 [l.py:52] Generated response a-0 (streaming delta) details: output_token_ids: [1, 2]\n"
)


def places(value, found):
    """Every place in a JSON value: (container, key)."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def damage_values(draw, lines):
    lines = json.loads(json.dumps(lines))
    for _ in range(draw.randrange(1, 4)):
        holder, key = draw.choice(places(lines, []))
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(draw.choice(ANYTHING))
        if not places(lines, []):
            break
    return "".join(json.dumps(line) + "\n" for line in lines)


def damage_bytes(draw, text):
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.randrange(1, 6)):
        at, length = draw.randrange(len(data) + 1), draw.randrange(12)
        piece = bytes(draw.choice(b"[]{}\",:0179eE-+.'\n\\ \x00\xff\xf0aD") for _ in range(draw.randrange(4)))
        data[at : at + (length if draw.random() < 0.5 else 0)] = piece * draw.choice((1, 1, 1, 2000))
    return bytes(data)


def damaged(draw, format_):
    if format_ == "vllm":
        return damage_bytes(draw, VLLM)
    lines = SGLANG if format_ == "sglang" else OPENAI
    if draw.random() < 0.6:
        return damage_values(draw, lines).encode("utf-8", "surrogatepass")
    return damage_bytes(draw, "".join(json.dumps(line) + "\n" for line in lines))


class Damaged(unittest.TestCase):
    def test_a_changed_log_is_refused_by_line_or_converted_completely(self):
        draw, deadline = random.Random(SEED), time.monotonic() + SECONDS
        counts = {0: 0, 1: 0}
        with tempfile.TemporaryDirectory() as folder:
            log, out = pathlib.Path(folder, "log"), pathlib.Path(folder, "trace")
            while time.monotonic() < deadline:
                format_ = draw.choice(("vllm", "sglang", "openai"))
                log.write_bytes(damaged(draw, format_))
                with self.subTest(seed=SEED, format=format_, log=log.read_bytes()[:4000]):
                    counts[self.convert(format_, log, out)] += 1
        print(f"seed {SEED}: {sum(counts.values())} logs, {counts[0]} of them became traces")
        self.assertGreater(min(counts.values()), 0)

    def convert(self, format_, log, out):
        said = io.StringIO()
        sys.argv = ["trace-from-log", "--format", format_, "--split-at", "7", "--out", str(out), str(log)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = TOOL.main()
        if code == 1:
            self.assertRegex(said.getvalue(), re.escape(str(log)) + r":( the log has no request|\d+: )")
            return code
        self.assertEqual(code, 0)
        segments = [json.loads(line) for line in pathlib.Path(f"{out}.segs.jsonl").read_text().splitlines()]
        self.assertEqual([segment["id"] for segment in segments], list(range(len(segments))))
        self.assertTrue(
            all(type(token) is int and 0 <= token < 2**31 for segment in segments for token in segment["tok"])
        )
        for line in pathlib.Path(f"{out}.reqs.jsonl").read_text().splitlines():
            request = json.loads(line, parse_constant=lambda name: self.fail(f"{name} is no JSON"))
            self.assertGreaterEqual(request["ts"], 0)
            self.assertGreater(request["n_in"], 0, "the replayer divides by tokens")
            self.assertTrue(all(number < len(segments) for number in request["ins"] + request["outs"]))
        return code


if __name__ == "__main__":
    unittest.main()
