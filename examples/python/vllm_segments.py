# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of vLLM for prompts with cached segments, on the CPU, with a small hybrid model of
random weights.

    python3 examples/python/vllm_segments.py --json segments.json

Each prompt has the same texts in a different order. Needs the packages `ashlar` and `vllm`, and no network.
docs/benchmarks/vllm.md has results.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import vllm_ttft as engines

import ashlar.daemon


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--size", default="medium", choices=sorted(engines.SIZES), help="of the model's layers")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--tokens", default="512", help="lengths of the segments, with commas between")
    parser.add_argument("--query", type=int, default=32, help="tokens after the segments")
    parser.add_argument("--runs", type=int, default=5, help="prompts of each kind; medians are shown")
    options = parser.parse_args()
    results = {
        "vllm": engines.vllm.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rows": [],
    }
    model = engines.model_folder("qwen3_5", options.size)
    with tempfile.TemporaryDirectory(prefix="ashlar-segments-") as folder:
        with ashlar.daemon.start(dram="2GiB", folder=folder) as daemon:
            for tokens in map(int, options.tokens.split(",")):
                results["rows"].append(row(model, daemon, tokens, options))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


def row(model, daemon, tokens, options):
    count, limits = options.segments, dict(length=options.segments * tokens + options.query + 16, blocks=256)
    transfer = engines.ashlar_transfer(daemon, segments=True, call_ms=10000, lookup_ms=10000)
    bare, cached = engines.Engine(model, **limits), engines.Engine(model, **limits, transfer=transfer)
    texts = [engines.prompt((tokens, i), tokens) for i in range(count)]
    declared, times = [tokens] * count, {"with": [], "without": [], "first": []}
    for turn in range(options.runs + 1):
        order = [texts[0], *random.Random(turn).sample(texts[1:], count - 1)]
        whole = sum(order, []) + engines.prompt((tokens, "query", turn), options.query)
        for engine in (bare, cached):
            engine.call("erase")
        took = cached.call("first_token", whole, declared)
        without = bare.call("first_token", whole)
        cached.call("settle")  # new texts are computed alone and published
        if turn == 0:
            times["first"].append(took)
            continue
        times["with"].append(took)
        times["without"].append(without)
    bare.close()
    cached.close()
    found = {"segments": count, "tokens": count * tokens + options.query, "segment_tokens": tokens}
    found |= {f"ttft_{kind}_ms": round(1000 * statistics.median(each), 1) for kind, each in times.items()}
    print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
