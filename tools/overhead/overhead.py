# SPDX-License-Identifier: Apache-2.0
"""The cost of calls from C and from Python compared with the same calls from C++, against one daemon, in one run.

Three equivalent engines (engine.cc, engine.c, engine.py) alternate, in a different order each round. They are started
several times, because the placement of a process's pages makes its landings up to a tenth slower or faster. Figures are
the slowest of the quickest tenth of a language's calls, which other programs disturb least, and the median; ratios are
relative to C++.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

import ashlar.daemon

HERE = pathlib.Path(__file__).parent


class Engine:
    def __init__(self, command, daemon, pages, clock):
        self.process = subprocess.Popen(
            [*command, daemon.rpc_socket, daemon.session_socket, str(pages), clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args[0]} ended with {self.process.wait()}")
        return [int(word) for word in line.split()]

    def end(self):
        self.process.stdin.close()
        self.process.wait(30)


def measure(engines, verb, pages, rounds, calls, seeds):
    """Nanoseconds: {language: [[calls of a round]]}."""
    times = {name: [] for name in engines}
    shared = next(seeds)
    if verb != "publish":
        engines["c++"].ask("publish", shared, pages)
    for _ in range(rounds):
        order = list(engines)
        random.shuffle(order)
        for name in order:
            if verb == "publish":
                times[name].append([engines[name].ask("publish", next(seeds), pages)[0] for _ in range(calls)])
            else:
                engines[name].ask(verb, shared, pages, 1)  # warms this process's caches
                times[name].append(engines[name].ask(verb, shared, pages, calls))
    return times


def row(operation, pages, times):
    calls = {name.replace("c++", "cpp"): sorted(sum(rounds, [])) for name, rounds in times.items()}
    out = {"operation": operation, "mebibytes": pages, "calls": len(calls["cpp"])}
    for name, each in calls.items():
        out[f"{name}_us"] = round(each[len(each) // 10] / 1e3, 1)
        out[f"{name}_median_us"] = round(statistics.median(each) / 1e3, 1)
    for name in ("c", "python"):
        out[f"{name}_ratio"] = round(out[f"{name}_us"] / out["cpp_us"], 3)
        out[f"{name}_median_ratio"] = round(out[f"{name}_median_us"] / out["cpp_median_us"], 3)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/release/bin", help="folder of overhead_cc and overhead_c")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--starts", type=int, default=8, help="of the engines; each has all rounds")
    parser.add_argument("--calls", type=int, default=5, help="in each round, of each language")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--clock",
        choices=("wall", "thread"),
        default="wall",
        help="thread: what the calling thread has computed, which says more on a busy machine",
    )
    parser.add_argument("--json")
    given = parser.parse_args()
    if max(given.mebibytes) > 1024 or min(given.mebibytes) < 1 or given.rounds < 1 or given.calls < 1:
        parser.error("--mebibytes: 1 to 1024; --rounds and --calls: 1 or more")
    if given.starts < 1:
        parser.error("--starts: 1 or more")
    most = max(given.mebibytes)
    commands = {
        "c++": [f"{given.bin}/overhead_cc"],
        "c": [f"{given.bin}/overhead_c"],
        "python": [sys.executable, str(HERE / "engine.py")],
    }
    seeds = iter(range(int.from_bytes(os.urandom(3), "little"), 1 << 40))
    operations = [
        (name, verb, pages)
        for name, verb in (("look up", "look"), ("land", "land"), ("publish", "publish"))
        for pages in given.mebibytes
    ]
    times = {operation: {name: [] for name in commands} for operation in operations}
    with ashlar.daemon.start(dram=f"{max(256, 6 * most)}MiB") as daemon:
        for _ in range(given.starts):
            engines = {name: Engine(command, daemon, most, given.clock) for name, command in commands.items()}
            for operation in operations:
                measured = measure(engines, *operation[1:], given.rounds, given.calls, seeds)
                for name, rounds in measured.items():
                    times[operation][name] += rounds
            for engine in engines.values():
                engine.end()
    rows = [row(operation[0], operation[2], times[operation]) for operation in operations]
    for each in rows:
        print(
            f"{each['operation']:8} {each['mebibytes']:5} MiB   C++ {each['cpp_us']:9.1f} us   C {each['c_us']:9.1f} us"
            f" ({each['c_ratio']:.3f})   Python {each['python_us']:9.1f} us ({each['python_ratio']:.3f})"
            f"   medians {each['cpp_median_us']:.1f} ({each['c_median_ratio']:.3f}, {each['python_median_ratio']:.3f})"
        )
    if given.json:
        results = {"clock": given.clock, "starts": given.starts, "rounds": given.rounds, "rows": rows}
        pathlib.Path(given.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
