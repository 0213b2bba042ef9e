# SPDX-License-Identifier: Apache-2.0
"""Time of cold prompts that two vLLM servers compute together, with a hybrid model of random weights, on the CPU.

    python3 examples/python/vllm_cold_parallel.py --json parallel.json

No prompt has been seen before. Ways: `none`, a server without a cache; `parallel`, a server with `cold_parallel`, which a
second server with `serve_prefill` helps. Each server has one thread. The times are those of an HTTP request for one
token. Needs the packages `ashlar` and `vllm`, and no network. docs/benchmarks/vllm.md has results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import vllm_ttft as engines
from vllm_proxy import Programs

import ashlar.daemon

QUESTION = 32  # tokens
BLOCKS = 256
WAIT_SECONDS = 600


class Server:
    """An OpenAI-compatible server in a process of its own."""

    def __init__(self, programs: Programs, name: str, model: str, length: int, transfer: dict | None) -> None:
        self._port = engines.free_port()
        settings = dict(
            model=model, load_format="dummy", dtype="bfloat16", max_model_len=length, max_num_seqs=4,
            max_num_batched_tokens=2048, num_gpu_blocks_override=BLOCKS, gpu_memory_utilization=0.2,
            served_model_name="model", host="127.0.0.1", port=self._port,
        )  # fmt: skip
        line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--skip-tokenizer-init"]
        line += [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        if transfer is not None:
            line += ["--kv-transfer-config", json.dumps(transfer)]
        threads = dict(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        self._process, self._log = programs.start(name, *line, **threads)

    def wait(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not start: {self._log.read_text()[-3000:]}")

    def first_token(self, tokens: list[int], segments: list[int] | None) -> float:
        """Returns the seconds of a request for one token."""
        body: dict = dict(model="model", prompt=tokens, temperature=0, max_tokens=1, ignore_eos=True)
        if segments is not None:
            body["kv_transfer_params"] = {"ashlar_segments": segments}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            answer.read()
        return time.perf_counter() - began


def measure(options: argparse.Namespace, servers: dict[str, Server]) -> list[dict]:
    rows = []
    for count in map(int, options.counts.split(",")):
        lengths = [options.tokens] * count
        seconds: dict[str, list[float]] = {way: [] for way in servers}
        for turn in range(-1, options.repeats):  # the first one warms up
            for way, server in servers.items():
                text = engines.prompt(("parallel", way, count, turn), sum(lengths) + QUESTION)
                seconds[way].append(server.first_token(text, None if way == "none" else lengths))
                time.sleep(options.pause)  # the servers publish what they have computed
        for way, found in seconds.items():
            ratios = [without / own for without, own in zip(seconds["none"][1:], found[1:])]
            speedup, low, high = engines.median_and_bounds(ratios)
            median = sorted(found[1:])[options.repeats // 2]
            names = ("way", "segments", "tokens", "repeats", "ttft_p50_ms", "speedup", "low", "high")
            figures = (round(each, 2) for each in (1000 * median, speedup, low, high))
            rows.append(dict(zip(names, (way, count, sum(lengths) + QUESTION, options.repeats, *figures))))
            print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--size", default="medium", choices=sorted(engines.SIZES), help="of the model's layers")
    parser.add_argument("--tokens", type=int, default=1024, help="of a segment")
    parser.add_argument("--counts", default="4,11", help="segments of a prompt, with commas between")
    parser.add_argument("--repeats", type=int, default=10, help="prompts of each way and length")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds after each prompt")
    options = parser.parse_args()
    model = engines.model_folder("qwen3_5", options.size)
    length = max(map(int, options.counts.split(","))) * options.tokens + QUESTION + 64
    ways = {"none": None, "parallel": {"cold_parallel": True}, "helper": {"serve_prefill": True}}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ashlar-parallel-")))
        daemon = stack.enter_context(ashlar.daemon.start(dram="4GiB", folder=str(folder / "daemon")))
        programs = stack.enter_context(contextlib.closing(Programs(folder)))
        servers = {}
        for way, own in ways.items():
            transfer = None if own is None else engines.ashlar_transfer(daemon, segments=True, **own)
            servers[way] = Server(programs, way, model, length, transfer)
        for server in servers.values():
            server.wait()
        servers.pop("helper")
        rows = measure(options, servers)
    if options.json:
        found = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "runs": rows}
        pathlib.Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
