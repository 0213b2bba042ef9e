# SPDX-License-Identifier: Apache-2.0
"""RAG requests to vLLM at rising rates, with a small hybrid model of random weights, on the CPU.

    python3 examples/python/vllm_segments_load.py --json load.json

Each request is a system prompt, documents (Zipf) in any order and a new question. A quarter of the requests are short ones
without documents: `tpot_p99_ms` is theirs. Ways: `none`, no cache; `vllm`, its prefix cache; `prefixes`, Ashlar's prefixes;
`segments`, Ashlar's segments. Rates are multiples of what one engine without a cache can serve.
`cold` is what the connector adds to prompts that nothing has cached, with segments and without: the median of pairs, and its
95 % confidence interval. Needs the packages `ashlar` and `vllm`, and no network. docs/benchmarks/vllm.md has results.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import vllm_ttft as engines

import ashlar.daemon

WAYS = ("none", "vllm", "prefixes", "segments")
SYSTEM, QUESTION, ANSWER, SHORT, SHORT_ANSWER = 120, 32, 4, 48, 16  # tokens
SEQUENCES = 16


class Server(engines.Server):
    def load(self, arrivals):
        """arrivals: (seconds, tokens, segments or None, tokens of the answer). Returns, of each: the time to the first token,
        the mean time of a further one, and cached tokens; and the seconds of all."""
        engine, waiting, seen = self.llm.llm_engine, list(enumerate(arrivals)), {}
        began = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while waiting and waiting[0][1][0] <= now:
                number, (at, tokens, segments, count) = waiting.pop(0)
                sampling = engines.vllm.SamplingParams(
                    temperature=0, ignore_eos=True, detokenize=False, max_tokens=count,
                    extra_args=None if segments is None else {"kv_transfer_params": {"ashlar_segments": segments}},
                )  # fmt: skip
                seen[str(number)] = [at, None, None, 0, 0]
                engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
            if not engine.has_unfinished_requests():
                time.sleep(0.0005)
                continue
            for output in engine.step():
                if not output.outputs or not output.outputs[0].token_ids:
                    continue
                now, one = time.perf_counter() - began, seen[output.request_id]
                one[1] = one[1] or now
                one[2], one[3], one[4] = now, len(output.outputs[0].token_ids), output.num_cached_tokens or 0
        found = [seen[str(i)] for i in range(len(arrivals))]
        rows = [(first - at, (last - first) / max(1, count - 1), cached) for at, first, last, count, cached in found]
        return rows, time.perf_counter() - began


class Workload:
    def __init__(self, options):
        self.options = options
        self.system = engines.prompt("system", SYSTEM)
        self.documents = [engines.prompt(("document", i), options.tokens) for i in range(options.documents)]
        self.weights = [1 / (rank + 1) for rank in range(options.documents)]

    def request(self, name, chance):
        chosen = []
        while len(chosen) < self.options.in_prompt:
            (one,) = chance.choices(range(len(self.documents)), self.weights)
            if one not in chosen:
                chosen.append(one)
        return self.assemble(name, chosen)

    def assemble(self, name, chosen):
        parts = [self.system, *(self.documents[i] for i in chosen)]
        question = engines.prompt(("question", name), QUESTION)
        return sum(parts, []) + question, [len(part) for part in parts], ANSWER

    def short(self, name):
        return engines.prompt(("short", name), SHORT), None, SHORT_ANSWER

    def arrivals(self, rate, name):
        """Poisson, of `rate` requests with documents in a second, and a third as many short ones."""
        chance, found = random.Random(f"{rate} {name}"), []
        for kind, each in (("documents", rate), ("short", rate / 3)):
            at = chance.expovariate(each)
            for number in itertools.count():
                if at >= self.options.seconds:
                    break
                one = (name, rate, kind, number)
                found.append((at, *(self.request(one, chance) if kind == "documents" else self.short(one))))
                at += chance.expovariate(each)
        return sorted(found, key=lambda arrival: arrival[0])

    def warm_up(self):
        """Every document twice, among others."""
        order = list(range(len(self.documents))) * 2
        random.Random(7).shuffle(order)
        count = self.options.in_prompt
        groups = [list(dict.fromkeys(order[i : i + count])) for i in range(0, len(order), count)]
        return [(0.0, *self.assemble(("warm", number), group)) for number, group in enumerate(groups)]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def row(way, rate, turns):
    """turns: (arrivals, result of `load`)."""
    pairs = [pair for arrivals, (found, _) in turns for pair in zip(arrivals, found)]
    with_documents = [(arrival, one) for arrival, one in pairs if arrival[2] is not None]
    first = [one[0] for _, one in with_documents]
    short = [one[1] for arrival, one in pairs if arrival[2] is None]
    tokens = sum(len(arrival[1]) + arrival[3] for arrival, _ in pairs)
    prompt_tokens = sum(len(arrival[1]) for arrival, _ in with_documents)
    return {
        "way": way,
        "rate": round(rate, 2),
        "requests": len(pairs),
        "ttft_p50_ms": round(1000 * percentile(first, 0.5), 1),
        "ttft_p99_ms": round(1000 * percentile(first, 0.99), 1),
        "tpot_p99_ms": round(1000 * percentile(short, 0.99), 1),
        "tokens_per_s": round(tokens / sum(seconds for _, (_, seconds) in turns)),
        "reused": round(sum(one[2] for _, one in with_documents) / max(1, prompt_tokens), 3),
    }


def show(found):
    print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    return found


def engine_of(way, model, daemon, length):
    limits = dict(length=length, blocks=512, max_num_seqs=SEQUENCES, enable_prefix_caching=way != "none")
    transfer = None
    if way in ("prefixes", "segments"):
        transfer = engines.ashlar_transfer(daemon, segments=way == "segments")
    return engines.Engine(model, **limits, transfer=transfer)


def measure_load(model, options, folder):
    """The ways take turns at each rate: a machine whose speed changes slows all of them."""
    work, runs, engines_by_way = Workload(options), [], {}
    length = SYSTEM + options.in_prompt * options.tokens + QUESTION + 64
    with contextlib.ExitStack() as stack:
        for way in options.ways.split(","):
            daemon = stack.enter_context(ashlar.daemon.start(dram="2GiB", folder=folder))
            engine = engines_by_way[way] = engine_of(way, model, daemon, length)
            stack.callback(engine.close)
            engine.call("load", work.warm_up())
            engine.call("settle")
        # The first way sets the rates for all ways.
        alone = [(0.0, *work.request(("alone", i), random.Random(i))) for i in range(6)]
        _, seconds = next(iter(engines_by_way.values())).call("load", alone)
        for factor in filter(None, options.rates.split(",")):
            rate, turns = float(factor) * len(alone) / seconds, {way: [] for way in engines_by_way}
            for turn in range(options.turns):
                arrivals = work.arrivals(rate, ("load", turn))
                for way, engine in engines_by_way.items():
                    turns[way].append((arrivals, engine.call("load", arrivals)))
                    engine.call("settle")
            runs += [show(row(way, rate, turns[way])) for way in engines_by_way]
    return runs


def measure_cold(model, options, folder):
    rows, lengths = [], list(map(int, options.cold.split(",")))
    with ashlar.daemon.start(dram="2GiB", folder=folder) as daemon:
        limits = dict(length=max(lengths) + 64, blocks=256)
        ways = {"none": engines.Engine(model, **limits)}
        for way in ("prefixes", "segments"):
            transfer = engines.ashlar_transfer(daemon, segments=way == "segments")
            ways[way] = engines.Engine(model, **limits, transfer=transfer)
        for tokens in lengths:
            percents = {"prefixes": [], "segments": []}
            for turn in range(-engines.WARM, options.repeats):
                text, times = engines.prompt(("cold", tokens, turn), tokens + QUESTION), {}
                first = turn % len(ways)  # no way is measured twice in a row: its caches would be warm
                for way in [*ways, *ways][first : first + len(ways)]:
                    ways[way].call("erase")
                    # Each engine has a text of its own: none finds what another has stored.
                    own = [(token + 7 * list(ways).index(way)) % engines.VOCABULARY for token in text]
                    segments = [512] * (tokens // 512) if way == "segments" else None
                    times[way] = ways[way].call("first_token", own, segments)
                    ways[way].call("settle")
                for way, found in percents.items():
                    if turn >= 0:
                        found.append(100 * (times[way] / times["none"] - 1))
            for way, found in percents.items():
                bounds = (round(value, 2) for value in engines.median_and_bounds(found))
                names = ("added_percent", "low_percent", "high_percent")
                row = {"tokens": tokens, "way": way, "repeats": options.repeats, **dict(zip(names, bounds))}
                rows.append(show(row))
        for engine in ways.values():
            engine.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--size", default="medium", choices=sorted(engines.SIZES), help="of the model's layers")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas between")
    parser.add_argument("--rates", default="0.5,1,2,4", help="multiples of what an engine without a cache can serve")
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at each rate")
    parser.add_argument("--turns", type=int, default=1, help="of each way at each rate")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--in-prompt", type=int, default=4, help="documents of a request")
    parser.add_argument("--cold", default="1024,4096,8192", help="tokens of cold prompts, with commas between")
    parser.add_argument("--repeats", type=int, default=20, help="pairs of cold prompts of each length")
    options = parser.parse_args()
    engines.Server = Server
    engines.import_once()
    results = {"vllm": engines.vllm.__version__, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    model = engines.model_folder("qwen3_5", options.size)
    with tempfile.TemporaryDirectory(prefix="ashlar-load-") as folder:
        results["cold"] = measure_cold(model, options, folder) if options.cold else []
        results["runs"] = measure_load(model, options, folder) if options.ways else []
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
