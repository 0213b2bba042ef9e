# SPDX-License-Identifier: Apache-2.0
"""Mixed requests through the proxy to several vLLM servers, each with its own daemon: reuse and time to the first token.

    python3 examples/python/vllm_proxy.py --json proxy.json

All prompts begin with one system prompt. Kinds: `conversation`, whose next turn has the earlier ones as its prefix; `rag`,
with documents (Zipf) in any order, each a segment that a separator ends, and a new question; `short`, a new text.
Each policy of the proxy serves the same arrivals on the same servers, with texts that no cache has. `reused` is the share of
the prompts' tokens that the engines report as cached; `probed`, that the proxy expected. The small hybrid model has random
weights and runs on the CPU. Needs the packages `ashlar[proxy]` and `vllm`, and no network.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import aiohttp

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import ashlar.daemon

POLICIES = ("round-robin", "prefix-hash", "cheapest")
SHARES = {"conversation": 2, "rag": 2, "short": 1}  # of requests
SYSTEM, FIRST, TURN, QUESTION, SHORT, ANSWER = 120, 480, 160, 32, 64, 8  # tokens
VOCABULARY, SEPARATOR = 512, 511
SAVED = {"reused": "cached", "probed": "probed"}
PROBES = "ashlar_proxy_probes_total{"


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def text(seed, tokens):
    source = random.Random(str(seed))
    return [source.randrange(SEPARATOR) for _ in range(tokens)]


class Workload:
    """Poisson arrivals. `name` gives texts that other workloads do not have."""

    def __init__(self, options, rate, turn, name):
        self._name, chance, at = (name, rate, turn), random.Random(f"{rate} {turn}"), 0.0
        self.arrivals = []  # (seconds, kind, of a conversation: its number, of others: the tokens)
        weights = [1 / (rank + 1) ** options.zipf for rank in range(options.documents)]
        documents = [[*self._text(("document", i), options.tokens - 1), SEPARATOR] for i in range(options.documents)]
        system = text("system", SYSTEM - 1)
        for number in range(options.requests):
            (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
            prompt = [*system, SEPARATOR] if kind == "rag" else [*system, 0]
            if kind == "conversation":
                prompt = chance.randrange(options.conversations)
            elif kind == "short":
                prompt += self._text(number, SHORT)
            else:
                chosen = {}
                while len(chosen) < options.in_prompt:
                    chosen |= dict.fromkeys(chance.choices(range(options.documents), weights))
                order = list(chosen)
                chance.shuffle(order)
                prompt += sum((documents[i] for i in order), []) + self._text(number, QUESTION)
            self.arrivals.append((at, kind, prompt))
            at += chance.expovariate(rate)
        self._histories = [[*system, 0, *self._text(("first", i), FIRST)] for i in range(options.conversations)]
        self._busy = [asyncio.Lock() for _ in self._histories]

    def _text(self, of, tokens):
        return text((*self._name, of), tokens)

    async def serve(self, send, began, at, kind, prompt):
        """Returns the result of one request. A conversation's turn waits for the answer to the one before."""
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        if kind != "conversation":
            found, _ = await send(prompt)
        else:
            async with self._busy[prompt]:
                history = self._histories[prompt]
                found, answer = await send(history)
                self._histories[prompt] = [*history, *answer, *self._text(("turn", prompt, len(history)), TURN)]
        return {"kind": kind, **found}


class Programs:
    """Child processes, ended together."""

    def __init__(self, folder):
        self.folder, self._all = pathlib.Path(folder), []

    def start(self, name, *command, **environment):
        log = self.folder / f"{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
            )
        self._all.append((process, log))
        return process, log

    def close(self):
        for process, _ in self._all:
            process.terminate()
        for process, _ in self._all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also its children
            process.wait()


def server(programs, name, model, daemon, port, options):
    transfer = {
        "kv_connector": "AshlarConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "rpc_socket": daemon.rpc_socket, "session_socket": daemon.session_socket, "weights_digest": "random",
            "model_id": "proxy-example", "segment_separator": [SEPARATOR],
        },
    }  # fmt: skip
    longest = max(options.in_prompt * options.tokens + QUESTION, FIRST + options.requests * (TURN + ANSWER))
    return programs.start(
        name, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--skip-tokenizer-init",
        "--load-format", "dummy", "--enforce-eager", "--port", str(port), "--host", "127.0.0.1",
        "--max-model-len", str(SYSTEM + longest + ANSWER), "--max-num-seqs", "8", "--gpu-memory-utilization", "0.1",
        "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip


def proxy(programs, policy, urls, daemons, port):
    backends = [
        f"--backend={url},rpc={daemon.rpc_socket},session={daemon.session_socket}" for url, daemon in zip(urls, daemons)
    ]
    return programs.start(
        policy, sys.executable, "-m", "ashlar.proxy", "--port", str(port), "--policy", policy,
        "--model-id", "proxy-example", "--segment-separator", json.dumps([SEPARATOR]), *backends,
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


async def complete(client, url, model, tokens):
    """Returns the figures of one request, and the answer's tokens."""
    body = {
        "model": model, "prompt": tokens, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    first, cached, answered, sent = None, 0, [], time.perf_counter()
    async with client.post(url + "/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices") or ():
                first = first or time.perf_counter() - sent
                answered += choice.get("token_ids") or ()
            usage = chunk.get("usage") or {}
            cached = max(cached, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        server, probed = answer.headers["X-Ashlar-Backend"], int(answer.headers.get("X-Ashlar-Saved-Tokens", 0))
    figures = {"seconds": first, "tokens": len(tokens), "cached": cached, "probed": probed, "server": server}
    return figures, answered


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(found):
    seconds, tokens = [each["seconds"] for each in found], sum(each["tokens"] for each in found)
    row = {f"ttft_p{share}_ms": round(1000 * percentile(seconds, share / 100), 1) for share in (50, 90, 99)}
    row |= {"ttft_mean_ms": round(1000 * sum(seconds) / len(seconds), 1), "requests": len(found)}
    return row | {name: round(sum(each[of] for each in found) / tokens, 3) for name, of in SAVED.items()}


def rows_of(results, urls):
    """results: {(policy, rate): figures of requests}."""
    for (policy, rate), found in results.items():
        row = {"policy": policy, "rate": rate, "engines": len(urls), **summary(found)}
        row["requests_by_engine"] = [sum(each["server"] == url for each in found) for url in urls]
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        row["kinds"] = {}
        for kind in SHARES:
            if of_kind := [each for each in found if each["kind"] == kind]:
                row["kinds"][kind] = summary(of_kind)
                print(f"  {kind}:", *(f"{name}={value}" for name, value in row["kinds"][kind].items()), flush=True)
        yield row


async def start(stack, client, model, options, folder):
    """Starts all programs. Returns the servers' URLs, and the proxies' by policy."""
    programs = Programs(folder)
    stack.callback(programs.close)
    daemons = [
        stack.enter_context(ashlar.daemon.start(dram=options.dram, folder=str(pathlib.Path(folder) / f"daemon{i}")))
        for i in range(options.engines)
    ]
    urls = [f"http://127.0.0.1:{free_port()}" for _ in daemons]
    for i, (url, daemon) in enumerate(zip(urls, daemons)):  # one by one: a start takes memory and both cores
        port = int(url.rpartition(":")[2])
        await until_up(client, url, *server(programs, f"vllm{i}", model, daemon, port, options))
    proxies = {}
    for policy in options.policies.split(","):
        port = free_port()
        proxies[policy] = f"http://127.0.0.1:{port}"
        await until_up(client, proxies[policy], *proxy(programs, policy, urls, daemons, port))
    for url in urls:  # the first requests of an engine take longer
        for count in (64, 600, 1200):
            body = {"model": model, "prompt": text(("warm", count), count), "max_tokens": 1}
            async with client.post(url + "/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
    return urls, proxies


async def run(options, folder):
    import vllm_ttft

    model, results, lines = vllm_ttft.model_folder("qwen3_5", options.size), {}, []
    limit = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    with contextlib.ExitStack() as stack:
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as client:
            urls, proxies = await start(stack, client, model, options, folder)
            policies, turns = list(proxies), range(options.turns)
            for rate, turn in ((float(rate), turn) for rate in options.rates.split(",") for turn in turns):
                for policy in policies[:: -1 if turn % 2 else 1]:
                    work = Workload(options, rate, turn, policy)

                    def send(tokens, url=proxies[policy]):
                        return complete(client, url, model, tokens)

                    began = time.perf_counter()
                    found = await asyncio.gather(*(work.serve(send, began, *each) for each in work.arrivals))
                    results.setdefault((policy, rate), []).extend(found)
            if "cheapest" in proxies:
                async with client.get(proxies["cheapest"] + "/metrics") as answer:
                    lines = (await answer.text()).splitlines()
    number = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("ashlar_")}
    count = number.get("ashlar_proxy_probe_seconds_count", 0)
    mean = round(1000 * number["ashlar_proxy_probe_seconds_sum"] / count, 2) if count else None
    probes = {name.split('"')[1]: int(each) for name, each in number.items() if name.startswith(PROBES)}
    rows = list(rows_of(results, urls))
    print(f"probe_mean_ms={mean}", *(f"{name}={count}" for name, count in probes.items()), flush=True)
    return {"runs": rows, "probes": probes, "probe_mean_ms": mean, "settings": vars(options)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES), help="with commas between")
    parser.add_argument("--size", default="small", choices=("small", "medium"), help="of the model's layers")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--in-prompt", type=int, default=2, help="documents of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the documents' popularity")
    parser.add_argument("--requests", type=int, default=120, help="of a turn")
    parser.add_argument("--rates", default="4,8,16", help="requests per second, with commas between")
    parser.add_argument("--turns", type=int, default=2, help="of each policy at each rate")
    parser.add_argument("--dram", default="1GiB", help="of each daemon")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all programs end
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(options, folder))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
