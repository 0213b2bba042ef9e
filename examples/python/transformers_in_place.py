# SPDX-License-Identifier: Apache-2.0
"""Memory and decode latency of concurrent prompts over the same segments, which they copy, or share in place, in
Transformers.

The model has random weights, so answers mean nothing. Each way runs in its own process: all prompts are assembled from
cached segments and kept, then decode the same tokens. The processes take turns, so that both see the same machine. Needs torch and transformers
(`pip install ./client/python[transformers]`). It starts a private daemon.

usage: transformers_in_place.py [--model qwen3_next|qwen3] [--dtype float32|bfloat16] [--requests N] [--segments N]
                                [--tokens N] [--decode N] [--layers N] [--hidden N] [--json FILE]

The JSON has the arguments, and for each way (`copies`, `in_place`):
  key_value_bytes     keys and values of all prompts after decoding, from their tensors; a shared page counts once
  shared_bytes        the part of it that prompts share
  rss_bytes           growth of the process's resident memory from before the first prompt
  assemble_ms         median time to assemble a prompt from cached segments
  token_ms            median time per decoded token of one prompt
and of the comparison:
  key_value_ratio, rss_ratio   copies divided by in_place
  largest_difference  between the log-probabilities of a token, over all prompts and decoded positions
  equal_tokens        share of decoded positions with the same most likely token
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import queue
import re
import statistics
import time

import torch
import transformers

import ashlar
import ashlar.daemon
from ashlar.transformers.shared_cache import key_value_bytes

VOCABULARY = 1024
CONTEXT = multiprocessing.get_context("spawn")


def build(arguments: argparse.Namespace) -> transformers.PreTrainedModel:
    torch.manual_seed(20)
    layers, hidden = arguments.layers, arguments.hidden
    common = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if arguments.model == "qwen3":
        config = transformers.Qwen3Config(**common)
    else:
        config = transformers.Qwen3NextConfig(
            **common,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
            mlp_only_layers=list(range(layers)),
            linear_num_key_heads=hidden // 128,
            linear_num_value_heads=hidden // 64,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        )
    dtype = getattr(torch, arguments.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(2.5)  # outputs that differ from token to token
    return model.to(dtype)


def prompts(arguments: argparse.Namespace) -> list[ashlar.Prompt]:
    """The first segment is a prefix and keeps its position; the others are in another order in each prompt."""
    chance = torch.Generator().manual_seed(21)
    texts = torch.randint(0, VOCABULARY, (arguments.segments, arguments.tokens), generator=chance)
    made = []
    for _ in range(arguments.requests):
        order = torch.randperm(arguments.segments - 1, generator=chance) + 1
        question = torch.randint(0, VOCABULARY, (16,), generator=chance)
        made.append(ashlar.Prompt([texts[0], *(texts[i] for i in order)], question))
    return made


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", file.read()).group(1))


@torch.no_grad()
def publish(arguments: argparse.Namespace, sockets: tuple[str, str], results: multiprocessing.Queue) -> None:
    model = build(arguments)
    tokens = arguments.segments * arguments.tokens + 32
    with ashlar.cache_for(model, sockets, tokens=tokens) as cache, ashlar.attach(model, cache) as reuse:
        model(prompts(arguments)[0])
        results.put(reuse.last.published)


@torch.no_grad()
def measure(
    arguments: argparse.Namespace, sockets: tuple[str, str], shared: bool, mine, others, results: multiprocessing.Queue
) -> None:
    model, length = build(arguments), arguments.segments * arguments.tokens
    chance = torch.Generator().manual_seed(22)
    decoded = torch.randint(0, VOCABULARY, (arguments.requests, arguments.decode), generator=chance)
    model(decoded[:1], logits_to_keep=1)  # warms up
    with (
        ashlar.cache_for(model, sockets, tokens=length + 32, shared_tokens=length if shared else 0) as cache,
        ashlar.attach(model, cache) as reuse,
    ):
        before = resident_bytes()
        caches, assembled, took, logits = [], [], [], []
        for prompt in prompts(arguments):
            mine.acquire()
            begun = time.perf_counter()
            caches.append(model(prompt).past_key_values)
            assembled.append(1000 * (time.perf_counter() - begun))
            others.release()
            assert reuse.last.shared_tokens == (reuse.last.cached_tokens if shared else 0), reuse.last
        for at in range(arguments.decode):
            mine.acquire()
            for tokens, past in zip(decoded, caches, strict=True):
                begun = time.perf_counter()
                output = model(tokens[at].view(1, 1), past_key_values=past, logits_to_keep=1)
                took.append(1000 * (time.perf_counter() - begun))
                logits.append(output.logits[0, -1].float().log_softmax(-1))
            others.release()
        after = resident_bytes()
        own, in_place = key_value_bytes(caches)
        results.put(
            {
                "key_value_bytes": own + in_place,
                "shared_bytes": in_place,
                "rss_bytes": after - before,
                "assemble_ms": round(statistics.median(assembled), 2),
                "token_ms": round(statistics.median(took), 3),
                "logits": torch.stack(logits).numpy(),
            }
        )


def start(function, *given):
    """Starts a process of its own, in which memory that others have released does not count."""
    results = CONTEXT.Queue()
    process = CONTEXT.Process(target=function, args=(*given, results), daemon=True)
    process.start()
    return process, results


def result_of(process, results):
    while True:
        try:
            result = results.get(timeout=1)
            break
        except queue.Empty:
            if process.exitcode not in (None, 0):
                raise SystemExit(f"a process ended with status {process.exitcode}") from None
    process.join()
    return result


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    with ashlar.daemon.start(dram="1GiB") as daemon:
        sockets = str(daemon.rpc_socket), str(daemon.session_socket)
        published = result_of(*start(publish, arguments, sockets))
        turns = CONTEXT.Semaphore(1), CONTEXT.Semaphore(0)
        started = [
            start(measure, arguments, sockets, shared, turns[shared], turns[not shared]) for shared in (False, True)
        ]
        copies, in_place = (result_of(*each) for each in started)
    one, other = (torch.from_numpy(way.pop("logits")) for way in (copies, in_place))
    return {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "published": published,
        "copies": copies,
        "in_place": in_place,
        "key_value_ratio": round(copies["key_value_bytes"] / in_place["key_value_bytes"], 2),
        "rss_ratio": round(copies["rss_bytes"] / max(1, in_place["rss_bytes"]), 2),
        "largest_difference": float((one - other).abs().max()),
        "equal_tokens": float((one.argmax(-1) == other.argmax(-1)).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3_next", "qwen3"), default="qwen3_next")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a segment")
    parser.add_argument("--decode", type=int, default=32, help="tokens that each prompt decodes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = compare(arguments)
    print(f"{'':20} {'copies':>12} {'in place':>12}")
    for name in result["copies"]:
        print(f"{name:20} {result['copies'][name]:>12} {result['in_place'][name]:>12}")
    for name in ("key_value_ratio", "rss_ratio", "largest_difference", "equal_tokens"):
        print(f"{name:20} {result[name]:.3g}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
