#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/benchmarks/prefix-policies.md: every trace, capacity and granularity, by policy.

Prints the rows of the page's table, the cells where Ashlar's hit rate or TTFT is behind, and the distance to the
optimum. Ten minutes on two idle cores. usage: figures.py ASHLAR_REPLAY TRACES [--traces NAME,…] [--captures N,…]
[--policies NAME,…] [--json FILE]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

CAPACITIES = {
    "squality_docqa": (5, 10, 20, 40),
    "bbh_cot_fewshot": (1, 2, 4),
    "tau_airline_gpt4o": (2, 4, 8, 16),
    "aibrix_sharegpt_8min": (1, 4, 16),
    "lmcache_miniswe": (1, 4, 16),
    "squad_rag_bm25": (1, 4, 16),
    "rankllm_dl19": (1, 4, 16),
}
FIXED = [f"block:{32 << power}" for power in range(7)]
RIVALS = [*FIXED, "vllm", "vllm:1024", "sglang", "sglang-now", "marconi:oracle", "marconi-offload"]
LEVEL = 0.002


def replay(program, path, capture, capacities, policies):
    """Returns the runs of one trace at one granularity in tokens, as ashlar-replay writes them."""
    with tempfile.TemporaryDirectory() as folder:
        figures = pathlib.Path(folder) / "figures.json"
        command = [program, "run", "--trace", path, "--format", "stf", "--capture", str(capture), "--json", figures]
        command += ["--capacity", ",".join(f"{size}GB" for size in capacities), "--policy", ",".join(policies)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(figures.read_text(encoding="utf-8"))["runs"]


def row(cell):
    """Returns a table row of {policy: run}; figures level with the best one are bold."""
    shown = [max(FIXED, key=lambda policy: cell[policy]["token_hit_rate"]), "vllm", "sglang-now", "marconi:oracle"]
    best = max(cell[policy]["token_hit_rate"] for policy in [*shown, "ashlar"])
    ashlar = cell["ashlar"]
    columns = [ashlar["trace"], f"{ashlar['capacity_bytes'] / 1e9:.0f} GB"]
    for policy in [*shown, "ashlar"]:
        rate = cell[policy]["token_hit_rate"]
        figure = f"**{rate:.3f}**" if rate >= best - LEVEL else f"{rate:.3f}"
        note = {shown[0]: shown[0].removeprefix("block:"), "marconi:oracle": f"{cell[policy]['alpha']:.1f}"}.get(policy)
        columns.append(f"{figure} ({note})" if note else figure)
    most = max(run["flops_saved"] for policy, run in cell.items() if policy != "ashlar")
    columns += [f"{ashlar['optimum']:.3f}", f"{ashlar['flops_saved'] / most:.2f}" if most > 0 else "–"]
    return "|" + "|".join(columns) + "|"


def main():
    """Replays and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--traces", default=",".join(CAPACITIES))
    parser.add_argument("--captures", default="1,64,128,256,1024")
    parser.add_argument("--policies", default=",".join(RIVALS), help="beside ashlar")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all runs to this file")
    options = parser.parse_args()
    policies = [*options.policies.split(","), "ashlar"]
    distances, behind, tails, runs = [], [], [], []
    for trace in options.traces.split(","):
        for capture in map(int, options.captures.split(",")):
            cells = {}
            for run in replay(options.program.resolve(), options.folder / trace, capture, CAPACITIES[trace], policies):
                cells.setdefault(run["capacity_bytes"], {})[run["policy"]] = run
                runs.append(run)
            for capacity, cell in cells.items():
                rates = {policy: run["token_hit_rate"] for policy, run in cell.items()}
                optimum = cell["ashlar"]["optimum"]
                distances.append(optimum - rates["ashlar"])
                ahead = max(rates, key=rates.get)
                place = f"{trace}, {capacity / 1e9:.0f} GB, {capture} tokens: {rates['ashlar']:.4f}"
                print(f"{place} of {optimum:.4f}", flush=True)
                if rates[ahead] > rates["ashlar"] + LEVEL:
                    behind.append(f"{place}, {ahead} {rates[ahead]:.4f}")
                for tail in ("p95", "p99"):
                    times = {policy: run["ttft_ms"][tail] for policy, run in cell.items()}
                    if min(times.values()) < times["ashlar"]:
                        first = min(times, key=times.get)
                        tails.append(f"{place}, {tail} {times['ashlar']:.0f} ms, {first} {times[first]:.0f} ms")
                if capture == 64 and set(RIVALS) <= set(policies):
                    print(row(cell), flush=True)
    print(f"behind in {len(behind)} of {len(distances)} cells", *behind, sep="\n  ")
    print(f"TTFT behind the best rival in {len(tails)} of {2 * len(distances)} tails", *tails, sep="\n  ")
    print(f"median distance to the optimum: {statistics.median(distances):.4f}")
    if options.json:
        options.json.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
