# SPDX-License-Identifier: Apache-2.0
"""RAG requests through the proxy to several vLLM servers, each with its own daemon: reuse and time to the first token.

    python3 examples/python/vllm_proxy.py --json proxy.json

Each request is a system prompt, documents (Zipf) in order of their popularity, and a new question; prompts share prefixes.
With `--segments` the documents come in any order, and each request declares them as segments.
Ways: `round-robin`; `cheapest`, by probes. Both serve the same arrivals on the same servers, with documents that no cache
has, in turns. The small hybrid model has random weights and runs on the CPU. Needs the packages `ashlar[proxy]` and `vllm`,
and no network.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time

import aiohttp

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import ashlar.daemon

WAYS = ("round-robin", "cheapest")
SYSTEM, QUESTION, VOCABULARY = 120, 32, 512  # tokens
PROBES = "ashlar_proxy_probes_total{"


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def text(seed, tokens):
    source = random.Random(str(seed))
    return [source.randrange(VOCABULARY) for _ in range(tokens)]


def arrivals(options, turn):
    """Returns (seconds, tokens, lengths of segments) of Poisson arrivals. Each turn has its own documents."""
    chance, found, at = random.Random(f"arrivals {turn}"), [], 0.0
    weights = [1 / (rank + 1) ** options.zipf for rank in range(options.documents)]
    documents = [text((turn, "document", i), options.tokens) for i in range(options.documents)]
    system = text("system", SYSTEM)
    for number in range(options.requests):
        chosen = set()
        while len(chosen) < options.in_prompt:
            chosen.update(chance.choices(range(options.documents), weights))
        numbers = sorted(chosen)[: options.in_prompt]
        if options.segments:
            chance.shuffle(numbers)
        parts = [system, *(documents[i] for i in numbers)]
        lengths = list(map(len, parts)) if options.segments else []
        found.append((at, [*sum(parts, []), *text((turn, "question", number), QUESTION)], lengths))
        at += chance.expovariate(options.rate)
    return found


class Programs:
    """Child processes, ended together."""

    def __init__(self, folder):
        self.folder, self._all = pathlib.Path(folder), []

    def start(self, name, *command, **environment):
        log = self.folder / f"{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        self._all.append((process, log))
        return process, log

    def close(self):
        for process, _ in self._all:
            process.terminate()
        for process, _ in self._all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def server(programs, name, model, daemon, port, options):
    transfer = {
        "kv_connector": "AshlarConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "rpc_socket": daemon.rpc_socket, "session_socket": daemon.session_socket, "weights_digest": "random",
            "model_id": "proxy-example", "segments": options.segments,
        },
    }  # fmt: skip
    length = SYSTEM + options.in_prompt * options.tokens + QUESTION + 16
    return programs.start(
        name, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--skip-tokenizer-init",
        "--load-format", "dummy", "--enforce-eager", "--port", str(port), "--host", "127.0.0.1",
        "--max-model-len", str(length), "--max-num-seqs", "8", "--gpu-memory-utilization", "0.1",
        "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip


def proxy(programs, way, urls, daemons, port):
    backends = [
        f"--backend={url},rpc={daemon.rpc_socket},session={daemon.session_socket}" for url, daemon in zip(urls, daemons)
    ]
    return programs.start(
        way, sys.executable, "-m", "ashlar.proxy", "--port", str(port), "--policy", way, "--model-id", "proxy-example",
        *backends,
    )  # fmt: skip


async def until_up(client, url, process, log, seconds=900):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{log} ended:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with client.get(url + "/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.3)
    raise RuntimeError(f"{log} did not start:\n{log.read_text()[-3000:]}")


async def one(client, url, model, tokens, lengths, began, at):
    """Returns the seconds to the first token, the prompt's cached tokens, and the server."""
    await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
    body = {
        "model": model, "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    if lengths:
        body["kv_transfer_params"] = {"ashlar_segments": lengths}
    first, cached, sent = None, 0, time.perf_counter()
    async with client.post(url + "/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and first is None:
                first = time.perf_counter() - sent
            usage = chunk.get("usage") or {}
            cached = max(cached, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return first, cached, answer.headers["X-Ashlar-Backend"]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run(options, folder):
    import vllm_ttft

    model = vllm_ttft.model_folder("qwen3_5", options.size)
    programs, runs = Programs(folder), {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        stack.callback(programs.close)
        daemons = [
            stack.enter_context(ashlar.daemon.start(dram=options.dram, folder=str(pathlib.Path(folder) / f"daemon{i}")))
            for i in range(options.engines)
        ]
        urls = [f"http://127.0.0.1:{free_port()}" for _ in daemons]
        limit = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as client:
            for i, (url, daemon) in enumerate(zip(urls, daemons)):  # one by one: a start takes memory and both cores
                port = int(url.rpartition(":")[2])
                await until_up(client, url, *server(programs, f"vllm{i}", model, daemon, port, options))
            proxies = {}
            for way in WAYS:
                port = free_port()
                proxies[way] = f"http://127.0.0.1:{port}"
                await until_up(client, proxies[way], *proxy(programs, way, urls, daemons, port))
            warm = text("warm", 600)
            for url in urls:  # the first request of an engine takes longer
                async with client.post(
                    url + "/v1/completions", json={"model": model, "prompt": warm, "max_tokens": 1}
                ) as answer:
                    assert answer.status == 200, await answer.text()
            for turn in range(2 * options.turns):
                way = WAYS[(turn + turn // 2) % 2]  # a, b, b, a, …
                work = arrivals(options, turn)
                began = time.perf_counter()
                found = await asyncio.gather(
                    *(one(client, proxies[way], model, tokens, lengths, began, at) for at, tokens, lengths in work)
                )
                runs[way].extend((*each, len(tokens)) for each, (_, tokens, _) in zip(found, work))
            async with client.get(proxies["cheapest"] + "/metrics") as answer:
                lines = [line for line in (await answer.text()).splitlines() if line.startswith("ashlar_proxy_probe")]
    rows = []
    for way, found in runs.items():
        first = [each[0] for each in found]
        shares = [sum(each[2] == url for each in found) for url in urls]
        rows.append({
            "way": way,
            "requests": len(found),
            "ttft_p50_ms": round(1000 * percentile(first, 0.5), 1),
            "ttft_p90_ms": round(1000 * percentile(first, 0.9), 1),
            "ttft_mean_ms": round(1000 * sum(first) / len(first), 1),
            "reused": round(sum(each[1] for each in found) / sum(each[3] for each in found), 3),
            "requests_by_engine": shares,
        })  # fmt: skip
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    number = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if " " in line}
    count = number.get("ashlar_proxy_probe_seconds_count", 0)
    mean = round(1000 * number.get("ashlar_proxy_probe_seconds_sum", 0) / count, 2) if count else None
    probes = {name.split('"')[1]: int(each) for name, each in number.items() if name.startswith(PROBES)}
    return {"runs": rows, "probes": probes, "probe_mean_ms": mean, "settings": vars(options)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--size", default="medium", choices=("small", "medium"), help="of the model's layers")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--in-prompt", type=int, default=2, help="documents of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the documents' popularity")
    parser.add_argument("--requests", type=int, default=60, help="of a turn")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--turns", type=int, default=2, help="of each way")
    parser.add_argument("--segments", action="store_true", help="documents are segments, in any order")
    parser.add_argument("--dram", default="1GiB", help="of each daemon")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(options, folder))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
