#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From an engine's log to what a cache saves: logs of three engines give the same trace, the replayer finds in it what
a plain count finds, and the costs equal those of a plain calculation.

usage: log_test.py SOURCE_ROOT ASHLAR_REPLAY
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT, REPLAY = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1)).resolve()
END = 7  # the token that ends a turn
PAGE = 16

# Four questions to each of five documents, in turn: token ids, all of them below 1000.
DOCUMENTS = [[100 + 37 * document + i % 83 for i in range(320)] + [END] for document in range(5)]
QUESTIONS = [[900 + 4 * turn + i % 3 for i in range(12)] for turn in range(4)]
PROMPTS = [document + question for question in QUESTIONS for document in DOCUMENTS]


def vllm_log():
    lines = []
    for i, prompt in enumerate(PROMPTS):
        at = f"(APIServer pid=7) DEBUG 11-24 10:{i:02}:05 [request_logger.py:52]"
        lines.append(
            f"{at} Request cmpl-{i} details: prompt: 'line\\none', prompt_token_ids: {prompt}, prompt_embeds shape: None."
        )
        lines.append(
            f"(APIServer pid=7) INFO 11-24 10:{i:02}:05 [request_logger.py:60] Received request cmpl-{i}: params: {{}}"
        )
        lines.append(f"{at} Generated response cmpl-{i} (streaming delta) details: output_token_ids: [1, 2]")
        lines.append(f"{at} Generated response cmpl-{i} (streaming delta) details: output_token_ids: [3]")
    return "\n".join(lines) + "\n"


def sglang_log():
    lines = []
    for i, prompt in enumerate(PROMPTS):
        obj = {"rid": f"r{i}", "text": None, "input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}
        lines.append(
            {"timestamp": f"2026-11-24T10:{i:02}:05.5", "event": "request.received", "rid": f"r{i}", "obj": obj}
        )
        lines.append(
            {
                "timestamp": f"2026-11-24T10:{i:02}:35.5",
                "event": "request.finished",
                "rid": f"r{i}",
                "obj": obj,
                "out": {"text": "abc", "output_ids": [1, 2, 3], "meta_info": {"prompt_tokens": len(prompt)}},
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def sglang_output():
    """The whole output of a server: a logger that writes the time before each line, and requests that are not a single
    text."""
    lines = [f"[2026-11-24 10:00:05] {line}\n" for line in sglang_log().splitlines()]
    other = [
        {"rid": ["a", "b"], "obj": {"rid": ["a", "b"], "text": ["x", "y"], "input_ids": None}, "out": {"text": "z"}},
        {"rid": "c", "obj": {"rid": "c", "input_ids": [[1, 2], [3]]}, "out": {"text": "z"}},
        {"rid": "d", "obj": {"rid": "d", "text": "x", "input_ids": [1]}, "out": {"embedding": [0.5]}},
        {"rid": "e", "obj": {"rid": "e", "text": None, "input_embeds": [[0.5]]}, "out": {"text": "z"}},
    ]
    lines[20:20] = [
        "[2026-11-24 10:03:00] " + json.dumps({"timestamp": "2026-11-24T10:03:00", "event": event, **each}) + "\n"
        for each in other
        for event in ("request.received", "request.finished")
    ]
    lines.append(
        '[2026-11-24 11:00:00] {"timestamp": "2026-11-24T11:00:00", "event": "request.received", "rid": "f", "obj": {}}\n'
    )
    noise = [
        "[2026-11-24 10:00:01] server_args=ServerArgs(model_path='m', extra={'a': 1})\n",
        'INFO:     127.0.0.1 - "POST /generate" 200 OK\n',
        "\n",
        "[2026-11-24 10:00:06] Prefill batch. #new-seq: 1, #new-token: 321\n",
    ]
    return "".join([*noise, *lines[:3], *noise, *lines[3:]])


def openai_log(prompts=PROMPTS):
    return "".join(
        json.dumps(
            {
                "timestamp": 1000.0 + 60 * i,
                "request": {"prompt": prompt},
                "response": {"choices": [{"text": ""}], "usage": {"prompt_tokens": len(prompt)}},
            }
        )
        + "\n"
        for i, prompt in enumerate(prompts)
    )


def expected_hits():
    """Tokens of whole pages that an unlimited cache would hit: each prompt's longest prefix that came before."""
    found = 0
    for i, prompt in enumerate(PROMPTS):
        best = 0
        for earlier in PROMPTS[:i]:
            same = next((n for n, (a, b) in enumerate(zip(prompt, earlier)) if a != b), min(len(prompt), len(earlier)))
            best = max(best, same)
        found += best
    return found


class Logs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_tool(self, *words, code=0):
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def convert(self, name, text, *more, code=0):
        log, out = self.folder / f"{name}.log", self.folder / name
        log.write_text(text, encoding="utf-8")
        said = self.run_tool(
            ROOT / "tools/trace-from-log", "--format", name.split("-")[0], "--out", out, *more, log, code=code
        )
        if code != 0:
            return said, None, None

        def read(part):
            return [json.loads(line) for line in pathlib.Path(f"{out}.{part}.jsonl").read_text().splitlines()]

        return said, read("segs"), read("reqs")

    def replay(self, trace, *more):
        figures = self.folder / "figures.json"
        self.run_tool(REPLAY, *more, "--trace", self.folder / trace, "--format", "stf", "--json", figures)
        return json.loads(figures.read_text()), figures

    def test_three_engines_logs_are_one_trace(self):
        traces = {}
        for name, text in (("vllm", vllm_log()), ("sglang", sglang_log()), ("openai", openai_log())):
            said, segments, requests = self.convert(name, text, "--split-at", END)
            prompts = [sum((segments[number]["tok"] for number in request["ins"]), []) for request in requests]
            self.assertEqual(prompts, PROMPTS, name)
            self.assertEqual([request["ts"] for request in requests], [60.0 * i for i in range(len(PROMPTS))], name)
            self.assertTrue(
                all(len(request["ins"]) == 2 for request in requests), "the token that ends a turn ends a segment"
            )
            traces[name] = [[segments[number]["tok"] for number in request["outs"]] for request in requests]
            self.assertIn("20 requests in 19.0 minutes, 6660 tokens of prompts", said)
        self.assertEqual(traces["vllm"], traces["sglang"])
        self.assertEqual(traces["vllm"][0], [[1, 2, 3]])

    def test_text_before_level_and_time_is_skipped(self):
        plain = self.convert("vllm", vllm_log(), "--split-at", END)[1:]
        for prefix in (
            "2026-11-24T10:00:05.123456789Z ",
            "Nov 24 10:00:05 gpu-1 vllm[712]: ",
            "vllm-1  | ",
            "[pod/vllm-7d9/vllm] ",
            "\x1b[0;36m",
        ):
            with self.subTest(prefix):
                text = "".join(f"{prefix}{line}\n" for line in vllm_log().splitlines())
                self.assertEqual(self.convert("vllm-prefix", text, "--split-at", END)[1:], plain)
        quoting = vllm_log().replace(
            "'line\\none'",
            "\"it's DEBUG 11-24 10:00:05 [l.py:1] Request b details: prompt: 'x', prompt_token_ids: [1]\"",
        )
        quoting += 'DEBUG 11-24 11:00:05 [l.py:1] Request c JSON body: {"prompt": "Request b details: prompt: \'x\', prompt_token_ids: [1]"}\n'
        self.assertNotEqual(quoting, vllm_log())
        self.assertEqual(self.convert("vllm-quoting", quoting, "--split-at", END)[1:], plain)

    def test_json_and_container_logs_are_the_same_trace(self):
        plain = self.convert("vllm", vllm_log(), "--split-at", END)[1:]
        lines = vllm_log().splitlines()
        at = [f"2026-11-24 10:{i // 4:02}:05,123" for i in range(len(lines))]
        messages = [line.split("] ", 1)[1] for line in lines]
        docker = [{"log": f"{line}\n", "stream": "stderr", "time": "2026-11-24T10:00:05.1Z"} for line in lines]
        cut = [
            {**entry, "log": text} for entry in docker for text in (entry["log"][:40], entry["log"][40:])
        ]  # as for lines over 16 KiB
        for name, texts in (
            (
                "json",
                [
                    json.dumps({"asctime": time, "levelname": "DEBUG", "message": text})
                    for time, text in zip(at, messages)
                ],
            ),
            ("docker", map(json.dumps, docker)),
            ("docker-cut", map(json.dumps, cut)),
            ("kubernetes", [f"2026-11-24T10:00:05.123456789Z stderr F {line}" for line in lines]),
            (
                "kubernetes-cut",
                [
                    f"2026-11-24T10:00:05.1Z stderr {part}"
                    for line in lines
                    for part in (f"P {line[:40]}", f"F {line[40:]}")
                ],
            ),
        ):
            with self.subTest(name):
                self.assertEqual(self.convert(f"vllm-{name}", "\n".join(texts) + "\n", "--split-at", END)[1:], plain)
        wrapped = "".join(
            json.dumps({"log": f"{line}\n", "stream": "stdout"}) + "\n" for line in sglang_log().splitlines()
        )
        self.assertEqual(
            self.convert("sglang-docker", wrapped, "--split-at", END)[1:],
            self.convert("sglang", sglang_log(), "--split-at", END)[1:],
        )

    def test_a_cut_log_is_refused(self):
        def log(text, ids, before=""):
            return f"{before}DEBUG 11-24 10:00:00 [l.py:1] Request a details: prompt: {text!r}, prompt_token_ids: {ids}, prompt_embeds shape: None.\n"

        limit = "INFO 11-24 09:00:00 [l.py:1] non-default args: {'model': 'm', 'max_log_len': 5}\n"
        said = self.convert("vllm-cut-both", log("Once ", [1, 2, 3, 4, 5]), code=1)[0]
        self.assertIn("vllm-cut-both.log:1: prompt: text and token ids are truncated at 5 (--max-log-len)", said)
        self.assertIn(
            "2: prompt_token_ids: truncated at 5",
            self.convert("vllm-limit", log(None, [1, 2, 3, 4, 5], limit), code=1)[0],
        )
        self.assertIn("2: prompt: truncated at 5", self.convert("vllm-text", log("Once ", None, limit), code=1)[0])
        answer = "DEBUG 11-24 10:00:01 [l.py:1] Generated response a details: output_token_ids: [1, 2, 3, 4, 5]\n"
        self.assertIn(
            "3: output_token_ids: truncated at 5",
            self.convert("vllm-answer", log("Once ", [1, 2], limit) + answer, code=1)[0],
        )
        self.convert("vllm-short", log("Once ", [1, 2], limit))
        self.convert("vllm-equal", log("ab", [1, 2]) + log("longer text", [3, 4, 5]).replace("Request a", "Request b"))
        self.assertFalse(list(self.folder.glob("*.part")))

    def test_a_log_over_the_new_year_keeps_its_order(self):
        one = "DEBUG 12-31 23:59:00 [l.py:1] Request a details: prompt: 'x y', prompt_token_ids: [1], prompt_embeds shape: None.\n"
        two = one.replace("12-31 23:59", "01-01 00:01").replace("Request a", "Request b").replace("[1]", "[2]")
        said, segments, requests = self.convert("vllm-year", one + two)
        self.assertEqual([segments[request["ins"][0]]["tok"] for request in requests], [[1], [2]])

    def test_a_request_that_cannot_be_converted_is_refused(self):
        one = "DEBUG 11-24 10:00:00 [l.py:1] Request a details: prompt: 'x', prompt_token_ids: [1, 2], prompt_embeds shape: None."
        for name, text, wrong in (
            ("vllm-glued", f"{one}{one}\n", "1: details: prompt: belongs to a second request"),
            (
                "vllm-unknown",
                f"{one}\n{one.replace('DEBUG 11-24', '11-24')}\n",
                "1: details: prompt: belongs to a second request",
            ),
            (
                "vllm-behind",
                f"INFO 11-24 10:00:00 [l.py:1] up\n{one.replace('DEBUG', 'FINE')}\n",
                "has no level and time before it",
            ),
            ("vllm-part", f"{one[:80]}\n", "1: prompt: truncated"),
        ):
            with self.subTest(name):
                self.assertIn(wrong, self.convert(name, text, code=1)[0])

    def test_a_servers_output_has_lines_of_other_kinds(self):
        plain = self.convert("sglang", sglang_log(), "--split-at", END)[1:]
        said, *trace = self.convert("sglang-output", sglang_output(), "--split-at", END)
        self.assertEqual(trace, list(plain))
        self.assertIn(
            "sglang-output.log: left out: 6 lines of other kinds, 1 requests for embeddings, 1 requests that did not finish, "
            "1 requests with neither text nor input_ids (--log-requests-level 3 logs them), 2 requests with several prompts",
            said,
        )
        self.assertNotIn("left out", self.convert("sglang", sglang_log())[0])
        said = self.convert("sglang-none", "[2026-11-24 10:00:01] started\n", code=1)[0]
        self.assertRegex(said, "(?s)left out: 1 lines of other kinds.*no request of format sglang")

    def test_messages_are_segments_and_texts_become_tokens(self):
        chat = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        ]
        lines = [
            {
                "created": 5,
                "body": {"messages": chat},
                "response": {"body": {"choices": [{"message": {"content": "So."}}], "usage": {"prompt_tokens": 12}}},
            },
            {"created": 9, "messages": [chat[0], {"role": "user", "content": "Whence?"}]},
        ]
        said, segments, requests = self.convert("openai-chat", "".join(json.dumps(line) + "\n" for line in lines))
        self.assertEqual([len(request["ins"]) for request in requests], [2, 2])
        self.assertEqual(requests[0]["ins"][0], requests[1]["ins"][0], "equal messages are one segment")
        self.assertEqual(len(requests[0]["outs"]), 1)
        self.assertIn("the engine counted", said)

    def test_gateways_and_other_interfaces_are_read(self):
        """LiteLLM's lines, Anthropic's messages, Responses, bodies as text: what each call's prompt and answer are."""

        def tokens(lines, **more):
            name = f"openai-{len(list(self.folder.iterdir()))}"
            said, segments, requests = self.convert(name, "".join(json.dumps(line) + "\n" for line in lines), **more)
            return said, requests and [(len(r["ins"]), r["n_in"], r["n_out"], r["ts"]) for r in requests]

        system, ask, say = (
            "Every request begins with this text. " * 20,
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello, you"},
        )
        chat = {"messages": [{"role": "system", "content": system}, ask]}
        answer = {"choices": [{"message": say}]}
        _, [expected] = tokens([{"timestamp": 5, "request": chat, "response": answer}])
        parts = [{"type": "text", "text": say["content"]}]
        anthropic = {"system": system, "messages": [ask]}
        message = {"role": "assistant", "content": parts, "usage": {"input_tokens": 20, "cache_read_input_tokens": 380}}
        responses = {"instructions": system, "input": "Hi"}
        output = {"object": "response", "output": [{"type": "message", "role": "assistant", "content": parts}]}
        for name, line in (
            ("system", {"request": anthropic, "response": message}),
            ("blocks", {"request": {**anthropic, "system": [{"type": "text", "text": system}]}, "response": message}),
            ("responses", {"request": responses, "response": output}),
            ("items", {"request": {**responses, "input": [ask]}, "response": output}),
            ("texts", {"request": json.dumps(chat), "response": json.dumps(answer)}),
            ("litellm", {"call_type": "acompletion", "status": "success", **chat, "response": answer}),
        ):
            with self.subTest(name):
                self.assertEqual(tokens([{"timestamp": 5, **line}])[1], [expected])
        self.assertIn("engine counted", tokens([{"timestamp": 5, "request": anthropic, "response": message}])[0])

        ok = {"startTime": 1764324000.25, "call_type": "acompletion", "status": "success", **chat, "response": answer}
        embedding = {**ok, "call_type": "aembedding", "messages": None, "input": ["x"]}
        others = [
            embedding,
            {**ok, "status": "failure", "response": {}},
            {**ok, "response": {"error": {"code": 500}}},
            {"startTime": 1764324001, "request": {"input": ["a", "b"], "model": "e5"}},
            {**ok, "call_type": "arerank"},
            {"startTime": 1764324001, "body": {"input": "x"}, "url": "/v1/embeddings"},
            {"startTime": 1764324001, "request": {"prompt": ["a", "b"]}},
            {"startTime": 1764324001, "request": {"input": "more", "previous_response_id": "r1"}},
        ]
        said, found = tokens([ok, *others, {**ok, "startTime": 1764324060.5}])
        self.assertEqual([each[3] for each in found], [0, 60.25])
        self.assertIn(
            "left out: 1 calls of other kinds, 2 calls that failed, 3 requests for embeddings, "
            "1 requests with earlier turns stored on the server, 1 requests with several prompts",
            said,
        )
        for unit in (1e3, 1e6, 1e9):
            self.assertEqual(
                tokens([{**ok, "startTime": 1764324000 * unit}, {**ok, "startTime": 1764324060 * unit}])[1][1][3], 60
            )
        self.assertIn(
            "2: time: missing, though other lines have one", tokens([ok, {**chat, "response": answer}], code=1)[0]
        )
        self.assertIn("using one second between", tokens([chat, chat])[0])
        self.assertIn("2 requests in 5.0 s,", tokens([ok, {**ok, "startTime": 1764324005.25}])[0])

    def test_a_wrong_tokenizer_is_named(self):
        wrong = self.folder / "tokenizer.json"
        wrong.write_text("{}")
        said = self.convert("openai", openai_log(), "--tokenizer", wrong, code=1)[0]
        self.assertRegex(said, r"^trace-from-log: --tokenizer: (.*tokenizer\.json: not a|requires the package)")

    def test_memory_does_not_grow_with_the_log(self):
        """Requests that share a prompt, so that segments, whose digests are kept, do not count."""
        log = self.folder / "vllm-large.log"
        with open(log, "w", encoding="utf-8") as file:
            for i in range(1500):
                file.write(
                    f"DEBUG 11-24 10:{i // 60:02}:{i % 60:02} [l.py:1] Request r{i} details: prompt: None, prompt_token_ids: "
                    f"{list(range(100000, 102000))}, prompt_embeds shape: None.\n"
                )
        peak = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        used = (
            int(
                self.run_tool(
                    sys.executable,
                    "-c",
                    peak,
                    sys.executable,
                    ROOT / "tools/trace-from-log",
                    "--format",
                    "vllm",
                    "--out",
                    self.folder / "large",
                    log,
                )
            )
            * 1024
        )
        self.assertLess(used, 64 << 20)

    def test_an_answer_is_the_prefix_of_the_next_turn(self):
        """With text, with tool calls and with parts, as clients send an answer back."""
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        answers = [
            {"role": "assistant", "content": "The tenant pays. " * 30},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"content": [{"type": "text", "text": "The owner does. " * 30}]},
            {"role": "assistant", "content": "So. " * 40},
        ]
        messages, lines, before, hits = [{"role": "system", "content": "Answer from the contract. " * 20}], [], [], 0
        for turn, answer in enumerate(answers):
            messages.append({"role": "user", "content": f"Question {turn}: who pays?"})
            lines.append(
                {
                    "timestamp": 60 * turn,
                    "request": {"messages": list(messages)},
                    "response": {"choices": [{"message": answer}]},
                }
            )
            messages.append({"role": "assistant", **answer})
        _, segments, requests = self.convert("openai-turns", "".join(json.dumps(line) + "\n" for line in lines))
        for request in requests:
            prompt = sum((segments[number]["tok"] for number in request["ins"]), [])
            self.assertEqual(prompt[: len(before)], before)
            hits += len(before)
            before = prompt + sum((segments[number]["tok"] for number in request["outs"]), [])
        exact = ["--capacity", "100GB", "--policy", "ashlar", "--capture", 1]
        run = self.replay("openai-turns", "run", *exact)[0]["runs"][0]
        rate = hits / sum(request["n_in"] for request in requests)
        self.assertGreater(rate, 0.7)
        self.assertAlmostEqual(run["token_hit_rate"], rate, delta=0.02, msg="all but parts of pages")

    def test_the_replayer_matches_a_plain_count(self):
        self.convert("openai", openai_log(), "--split-at", END)
        figures, _ = self.replay("openai", "run", "--capacity", "100GB", "--policy", "none,ashlar")
        run = figures["runs"][1]
        all_tokens = sum(map(len, PROMPTS))
        self.assertAlmostEqual(run["misses"]["never_seen"], all_tokens - expected_hits(), delta=len(PROMPTS))
        self.assertGreater(run["token_hit_rate"], 0.4)
        self.assertLessEqual(run["token_hit_rate"], expected_hits() / all_tokens)
        segments, _ = self.replay("openai", "segments")
        best = max(row["token_hit_rate"] for row in segments["segments"])
        self.assertGreaterEqual(best, run["token_hit_rate"] - 1e-9)

    def test_costs_multiply_the_replayers_numbers_by_prices(self):
        self.convert("openai", openai_log(), "--split-at", END)
        replayed = ["--capacity", "1GB,50GB", "--policy", "sglang,ashlar", "--capture", 1]
        figures, file = self.replay("openai", "run", *replayed)
        out = self.folder / "sizes.json"
        self.run_tool(
            ROOT / "tools/sizing",
            "cost",
            file,
            "--requests-per-day",
            "86400",
            "--prefill-rate",
            "1000",
            "--gpu-hour",
            "2",
            "--dram-gb-month",
            "3",
            "--ssd-gb-month",
            "0.1",
            "--dram-share",
            "0.5",
            "--against",
            "sglang",
            "--json",
            out,
        )
        sizes = json.loads(out.read_text())["sizes"]
        runs = {(run["policy"], run["capacity_bytes"]): run for run in figures["runs"]}
        self.assertEqual([row["replayed_gb"] for row in sizes], [1.0, 50.0])
        # 20 requests, one per minute: 86,400 requests per day are this many such users, who keep the hit rate with this
        # many times the capacity.
        times = 86400 / (20 / (19 * 60) * 86400)
        for row in sizes:
            self.assertAlmostEqual(row["load_times"], times)
            self.assertAlmostEqual(row["capacity_gb"], row["replayed_gb"] * times)
            ours, others = (runs[policy, row["replayed_gb"] * 1e9] for policy in ("ashlar", "sglang"))
            hours = 86400 * 333 / 1000 / 3600 * 30  # every prompt has 333 tokens
            more = (ours["flops_saved"] - others["flops_saved"]) / ours["flops_all"]
            self.assertAlmostEqual(row["gpu_hours_month"], hours, places=6)
            self.assertAlmostEqual(row["saved_month"], 2 * hours * more, places=6)
            self.assertAlmostEqual(row["memory_month"], row["capacity_gb"] * (0.5 * 3 + 0.5 * 0.1), places=9)
            self.assertAlmostEqual(row["left_month"], row["saved_month"] - row["memory_month"], places=9)
        self.assertEqual(sum(row["best"] for row in sizes), 1)

    def test_ten_times_the_load_is_what_ten_times_the_users_find(self):
        """Replaying ten independent users at once saves what one user's figures predict for ten times the load."""
        one = [document + question for document in DOCUMENTS for question in QUESTIONS]
        ten = [[1000 * user + token for token in prompt] for prompt in one for user in range(10)]
        saved = {}
        for name, prompts, capacity in (("one", one, "0.1GB"), ("ten", ten, "1GB"), ("ten-in-one", ten, "0.1GB")):
            log = "".join(
                json.dumps({"timestamp": 60 * i * len(one) / len(prompts), "request": {"prompt": prompt}}) + "\n"
                for i, prompt in enumerate(prompts)
            )
            self.convert(f"openai-{name}", log, "--split-at", END)
            _, file = self.replay(f"openai-{name}", "run", "--capacity", capacity, "--policy", "ashlar", "--capture", 1)
            out = self.folder / f"{name}-sizes.json"
            self.run_tool(
                ROOT / "tools/sizing",
                "cost",
                file,
                "--requests-per-day",
                10 * 20 / 19 * 1440,
                *self.PRICES[2:],
                "--json",
                out,
            )
            (row,) = json.loads(out.read_text())["sizes"]
            saved[name, round(row["capacity_gb"], 1)] = row["compute_saved"]
        self.assertEqual(list(saved), [("one", 1.0), ("ten", 1.0), ("ten-in-one", 0.1)])
        from_one, from_ten, too_small = saved.values()
        self.assertAlmostEqual(from_one, from_ten, delta=0.05)
        self.assertGreater(from_one, too_small + 0.2)

    def test_a_layout_becomes_a_model(self):
        layout, model = self.folder / "layout.json", self.folder / "model.json"
        layout.write_text(
            json.dumps(
                {
                    "token_bytes": 1000,
                    "state_bytes": 50000,
                    "attention_layers": 4,
                    "segment_tokens": 100,
                    "segment_bytes": 250000,
                }
            )
        )
        self.run_tool(
            ROOT / "tools/sizing",
            "model",
            layout,
            "--active-parameters",
            "3e9",
            "--query-width",
            "4096",
            "--out",
            model,
        )
        made = json.loads(model.read_text())
        self.assertEqual(
            (made["page_bytes"], made["checkpoint_bytes"], made["transition_bytes"]), (16000, 50000, 100000)
        )
        self.convert("openai", openai_log())
        figures, _ = self.replay("openai", "run", "--capacity", "1GB", "--policy", "ashlar", "--model", model)
        self.assertGreater(figures["runs"][0]["token_hit_rate"], 0.4)

    def test_what_is_wrong_is_named(self):
        cut = vllm_log().replace("[100, 101", "[100, 101...", 1)
        for name, text, wrong in (
            ("vllm", "INFO 11-24 10:00:00 started\n", "no request of format vllm"),
            (
                "vllm-cut",
                "DEBUG 11-24 10:00:00 [l.py:1] Request a details: prompt: 'x, prompt_token_ids: None, prompt_embeds",
                "1: prompt: truncated",
            ),
            ("sglang", "{", "1: expected a JSON object"),
            (
                "sglang-level",
                '{"event": "request.finished", "timestamp": "2026-01-01", "rid": "a", "obj": {}}\n',
                "--log-requests-level 3",
            ),
            (
                "sglang-cut",
                '{"event": "request.finished", "timestamp": "2026-01-01", "rid": "a", "obj": {"input_ids": [1, "..."]}}\n',
                "obj.input_ids",
            ),
            ("openai", '{"a": 1}\n', "1: messages: missing"),
            ("openai-role", '{"messages": [{"content": "x"}]}\n', "messages[0].role: missing"),
            ("openai-empty", '{"prompt": "x"}\n{"messages": []}\n', "2: messages: empty"),
            ("openai-none", '{"prompt": ""}\n', "1: prompt: empty"),
            (
                "sglang-empty",
                '{"event": "request.finished", "timestamp": 5, "rid": "a", "obj": {"input_ids": []}}\n',
                "1: obj.input_ids: empty",
            ),
            (
                "vllm-empty",
                "DEBUG 11-24 10:00:00 [l.py:1] Request a details: prompt: '', prompt_token_ids: [], prompt_embeds shape: None.\n",
                "1: prompt_token_ids: empty",
            ),
            ("openai-time", '{"ts": "noon", "prompt": "x"}\n', "ts: 'noon' is not a valid time"),
        ):
            with self.subTest(name):
                self.assertIn(wrong, self.convert(name, text, code=1)[0])
        self.assertNotEqual(cut, vllm_log())
        figures = self.folder / "figures.json"
        figures.write_text(json.dumps({"runs": []}))
        prices = ["--requests-per-day", "1", "--prefill-rate", "1", "--gpu-hour", "1", "--dram-gb-month", "1"]
        self.assertIn(
            'the figures have no policy "ashlar"',
            self.run_tool(ROOT / "tools/sizing", "cost", figures, *prices, code=1),
        )
        self.assertIn(
            "--ssd-gb-month",
            self.run_tool(ROOT / "tools/sizing", "cost", figures, *prices, "--dram-share", "0.5", code=1),
        )
        self.assertIn(
            "is out of range; expected more than 0",
            self.run_tool(ROOT / "tools/sizing", "cost", figures, *prices[:-1], "0", code=2),
        )

    PRICES = ("--requests-per-day", "1", "--prefill-rate", "1", "--gpu-hour", "1", "--dram-gb-month", "1")

    def test_wrong_figures_are_named(self):
        run = {
            "policy": "ashlar",
            "trace": "t",
            "capacity_bytes": 1,
            "flops_saved": 1,
            "flops_all": 2,
            "token_hit_rate": 0.5,
            "tokens": 4,
            "trace_seconds": 1,
            "requests": 1,
        }
        row = {"eviction": "price", "transitions": "dense", "head": 8, "only_what_pays": True, **run}
        figures, out = self.folder / "figures.json", self.folder / "sizes.json"

        def cost(value, *more, code=1):
            figures.write_text(value if isinstance(value, str) else json.dumps(value))
            said = self.run_tool(ROOT / "tools/sizing", "cost", figures, *self.PRICES, "--json", out, *more, code=code)
            self.assertEqual(out.exists(), code == 0, said)
            self.assertNotIn("Traceback", said)
            return said

        for value, wrong in (
            ("{", "invalid JSON"),
            ("[]", "expected a JSON object"),
            ("[" * 100000, "invalid JSON"),
            ("\xff", "invalid JSON"),
            ({"runs": 3}, "runs: expected a list"),
            ({"runs": [run, 3]}, "runs[1]: expected an object"),
            ({"runs": [{**run, "trace_seconds": 0}]}, "--trace-requests-per-day: required"),
            ({"runs": [{**run, "trace": 1}]}, "runs[0].trace: missing; expected a string"),
            ({"runs": [{**run, "flops_saved": 3}]}, "runs[0].flops_saved: must not exceed flops_all"),
            ({"runs": [{**run, "token_hit_rate": 1.5}]}, "runs[0].token_hit_rate: must not exceed 1"),
            ({"segments": [{**row, "capacity_bytes": "x"}]}, "segments[0].capacity_bytes: missing; expected a number"),
        ):
            with self.subTest(value=str(value)[:60]):
                self.assertIn(wrong, cost(value))
        for name in (
            "capacity_bytes",
            "flops_saved",
            "flops_all",
            "token_hit_rate",
            "requests",
            "tokens",
            "trace_seconds",
        ):
            for wrong in (None, True, "1", -1, float("nan"), float("inf"), 10**400, [1]):
                self.assertIn(f"runs[0].{name}: missing; expected a number", cost({"runs": [{**run, name: wrong}]}))
        sglang = {**run, "policy": "sglang"}
        self.assertIn(
            "runs[1].flops_saved: missing", cost({"runs": [run, {**sglang, "flops_saved": "1"}]}, "--against", "sglang")
        )
        self.assertIn(
            'the figures have no policy "sglang" for t at 1 bytes',
            cost({"runs": [run, {**sglang, "capacity_bytes": 2}]}, "--against", "sglang"),
        )
        cost({"runs": [run, sglang]}, "--against", "sglang", code=0)

    def test_wrong_layouts_and_numbers_are_named(self):
        layout, model = self.folder / "layout.json", self.folder / "model.json"
        good = {
            "token_bytes": 1000,
            "state_bytes": 50000,
            "attention_layers": 4,
            "segment_tokens": 100,
            "segment_bytes": 250000,
        }

        def refused(value, *more, code=1):
            layout.write_text(json.dumps(value))
            said = self.run_tool(
                ROOT / "tools/sizing", "model", layout, "--active-parameters", "3e9", "--out", model, *more, code=code
            )
            self.assertFalse(model.exists(), said)
            self.assertNotIn("Traceback", said)
            return said

        for pages in ("0", "-5", "1.5", "nan", "9" * 30):
            self.assertIn("argument --page-tokens: ", refused(good, "--page-tokens", pages, code=2))
        for rate in ("0", "-1", "nan", "inf", "1e31", "1e-320", "x"):
            self.assertIn("argument --flops-per-second: ", refused(good, "--flops-per-second", rate, code=2))
        self.assertIn("expected a JSON object", refused([good]))
        for name in good:
            for wrong in (None, "1", -1, float("nan"), 10**400):
                self.assertIn(f"{name}: missing; expected a number", refused({**good, name: wrong}))


if __name__ == "__main__":
    unittest.main()
