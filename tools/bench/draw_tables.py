#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the tables of the pages in docs/benchmarks as bar charts, one picture per page, or checks that pictures show them.

usage: draw_tables.py --write | --check

A picture is drawn from its page's own numbers, so the two always agree. The check also fails for a page without a
picture and for one without a command that repeats its figures.
"""

import pathlib
import re
import sys

from bars import Bars

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs/benchmarks"
# Pages without a picture, with the reasons.
WITHOUT = {"README": "a list of the pages"}


def table(page, first_header):
    """Returns the rows, as lists of cells, of the page's table whose header begins with these cells. A picture names
    the cells up to the drawn ones, so that a new column is not taken for one of them."""
    rows, inside = [], False
    for line in (FOLDER / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells and cells[: len(first_header)] == first_header:
            inside = True
        elif inside and cells is None:
            return rows
        elif inside and not set("".join(cells)) <= set("-: "):
            rows.append(cells)
    if not inside:
        raise ValueError(f"{page}: no table that begins with {first_header}")
    return rows


def number(text, place=0):
    """The `place`-th number in a cell; thousands may have commas."""
    return float(re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))[place])


def spread(text):
    """Returns a cell's number, or its lowest and highest number if it has several, ignoring brackets; None if it has
    none."""
    found = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\([^)]*\)", "", text).replace(",", ""))]
    return None if not found else found[0] if len(found) == 1 else (min(found), max(found))


def neighbours():
    times = [f"{when}: p50 / p99 / max, ms" for when in ("alone", "victim")]
    rows = table("neighbours.md", ["attack", *times, "bar for p99"])
    bars = [(row[0].strip("`"), [number(row[1], 1), number(row[2], 1), number(row[3])]) for row in rows]
    return Bars(
        "The victim's p99 in ms, alone and beside each attack", ["alone", "under attack", "bar"], bars, logarithmic=True
    )


def transfer():
    rows = table("transfer.md", ["bytes", "GB/s", "p50 µs", "p99 µs", "cpu s/GB", "ratio"])
    bars = [(row[0], [number(row[5])]) for row in rows]
    return Bars("GB/s over those of raw TCP streams, between network namespaces", ["fetch"], bars)


def disk():
    names = ["sequential write", "random write", "sequential read", "random read"]
    rows = table("disk.md", ["value", *names])
    # The last bold number of a cell is that of 16 values in flight.
    bars = [(row[0], [float(re.findall(r"\*\*([\d.]+)\*\*", cell)[-1]) for cell in row[1:]]) for row in rows]
    return Bars("GB/s over those of the bare disk, 16 values in flight", names, bars)


def decoding():
    states, bars, ms = "", [], ["ms a step (its limit / it)", "recurrent ms (its limit / it)"]
    for row in table("decoding.md", ["states", "buffer c", *ms, "speed-up", "speed-up of the limits"]):
        states = row[0] or states
        kind = "copies of fp16" if "copies" in states else states
        bars.append((f"{kind}, c = {row[1].split(',')[0]}", [number(row[4]), number(row[5])]))
    return Bars("Speed-up of buffered decoding over the recurrence", ["measured", "of the limits"], bars)


def demo():
    ways = ["full", "prefix cache", "naive addition", "Ashlar"]
    row = table("demo.md", ["", *ways])[0]
    return Bars(
        "Time to first token of 16 cached sections, ms",
        ["median of 5 requests"],
        [(way, [number(cell)]) for way, cell in zip(ways, row[1:])],
    )


def land_and_store():
    rows = table("land-and-store.md", ["value", "batch", "GB/s"])
    sizes = list(dict.fromkeys(row[0] for row in rows))
    rate = {(row[0], row[1]): number(row[2]) for row in rows}
    bars = [(size, [rate[size, "1"], rate[size, "16"]]) for size in sizes]
    return Bars("Puts, GB/s", ["one value a call", "16 values a call"], bars)


def vllm():
    names = ["vLLM's own prefix cache", "with Ashlar", "with LMCache"]
    rows = table("vllm.md", ["model", "variant", "requests a second", "requests", "median"])
    medians = {(row[0], row[2], row[1]): row[4] for row in rows}
    cells = {}  # by model and rate
    for (model, rate, variant), median in medians.items():
        cells.setdefault(f"{model}, {rate} a second", {})[variant] = number(median)
    bars = [(label, [each.get(name) for name in names]) for label, each in cells.items()]
    return Bars("Time to first token of two engines, median, ms", names, bars, logarithmic=True)


def vllm_lengths():
    kinds = ["without", "cold", "dram", "ssd"]
    rows = table("vllm.md", ["model", "tokens", "blocks", "prompts", *kinds])
    bars = [(f"{row[0]}, {row[1]} tokens", [number(cell) for cell in row[4:8]]) for row in rows]
    return Bars("Time to first token of one engine, median, ms", kinds, bars, logarithmic=True)


def attention():
    kinds = ["fp32", "fp16", "bf16", "e4m3"]
    rows = table("attention.md", ["queries and heads", "keys", *kinds])
    bars = [(row[0], [spread(cell) for cell in row[2:]]) for row in rows]
    return Bars(
        "Time of the limit over that of attention to 32,768 keys; pale: from lowest to highest",
        kinds,
        bars,
        line=(1, "limit"),
    )


def conversations():
    rows = table("conversations.md", ["resumed from", "turns", "full, ms", "Ashlar, ms"])
    bars = [(row[0], [number(row[2]), number(row[3])]) for row in rows]
    return Bars("A turn's time to first token by what it is resumed from, ms", ["full recompute", "Ashlar"], bars)


def directory():
    sizes = ["20,000 entries", "100,000", "1,000,000"]
    row = {cells[0]: [number(cell) for cell in cells[1:]] for cells in table("directory.md", ["", *sizes])}
    times = ["mirror all from scratch, s", "etcd's CPU time: announcing, s", "etcd's CPU time: one more reads, s"]
    bars = [
        (
            size,
            [
                1e6 / row["announcements per second, mirrored by all"][i],
                *(row[time][i] * 1e6 / number(size) for time in times),
            ],
        )
        for i, size in enumerate(sizes)
    ]
    names = ["announced to all", "mirrored anew", "etcd's CPU: announcing", "etcd's CPU: reading"]
    return Bars("Time an entry, by entries in all, µs", names, bars)


def entries():
    columns = ["by recency, ns", "in lookups (53 ns)", "by price, in lookups (77 to 104 ns)"]
    rows = table("entries.md", ["operation", *columns])
    bars = [(row[0], [number(row[2]), number(row[3])]) for row in rows if row[2]]
    return Bars(
        "A full cache of 1,000,000 objects: time of an operation in lookups of a hash table of that size",
        ["by recency", "by price"],
        bars,
    )


def kernels():
    bars = [(row[0], [spread(row[2])]) for row in table("kernels.md", ["operation", "shape", "ratio"])]
    return Bars(
        "Time of the limit over that of the kernel; pale: from lowest to highest", ["ratio"], bars, line=(1, "limit")
    )


def overhead():
    rows = table("overhead.md", ["operation", "MiB", "C++", "C", "Python", "C ÷ C++", "Python ÷ C++"])
    bars = [(f"{row[0]}, {row[1]} MiB", [round(100 * number(cell) - 100, 1) for cell in row[5:7]]) for row in rows]
    return Bars(
        "Time of a call beyond that from C++, per cent",
        ["C", "Python"],
        bars,
        line=(5, "at most, aimed at for land and publish"),
    )


def prefix_tree():
    rows = table("prefix-tree.md", ["tokens per edge", "walk, µs", "memcmp, µs", "ratio (bar 3)"])
    bars = [(f"{row[0]} tokens per edge", [number(row[1]), number(row[2]), 3 * number(row[2])]) for row in rows]
    return Bars(
        "A known prompt of 131,072 tokens, µs",
        ["walk through the tree", "memcmp of its tokens", "bar, 3 times memcmp"],
        bars,
    )


def quality():
    rows = table("quality.md", ["way", "answers", "all", "recall", "copy"])
    bars = [(row[0], [number(row[3]), number(row[4])]) for row in rows]
    return Bars("Right answers of the trained hybrid, all sizes together, per cent", ["recall", "copy"], bars)


def remote():
    names = ["1 segment (5.7 MiB)", "11 segments (69.6 MiB)"]
    rows = table("remote.md", ["from", *(f"{name}, ms" for name in names)])
    bars = [(row[0], [number(row[1]), number(row[2])]) for row in rows]
    return Bars(
        "From the lookup until all is landed, by where it comes from, median, ms", names, bars, logarithmic=True
    )


def robustness():
    rows = table("robustness.md", ["fault", "how", "served, ms", "nothing held, ms"])
    bars = [(row[0], [spread(row[2]), spread(row[3])]) for row in rows if spread(row[2]) is not None]
    return Bars(
        "Time until served, and until nothing is held, by fault between nodes, ms; pale: the worse case",
        ["served", "nothing held"],
        bars,
        logarithmic=True,
    )


def router():
    bars = []
    for first, lengths in (("workers", "one length"), ("workers, mixed lengths", "mixed")):
        for row in table("router.md", [first, "TTFT ms", "bound ms", "transfer ms"]):
            bars.append((f"{lengths}, {row[0]} worker{'s' * (row[0] != '1')}", [number(row[1]), number(row[2])]))
    return Bars("Time to first token of a cold prompt of 11 segments, ms", ["measured", "bound"], bars)


def segments_replay():
    share, ways = {}, {"dense": 3, "adaptive": 4}
    for row in table("segments-replay.md", ["trace", "capacity", "goes by", *ways]):
        share[row[0], row[1], row[2]] = row
    bars = []
    for trace, capacity in dict.fromkeys(key[:2] for key in share if key[1] != "no limit"):
        cases = [share[trace, capacity, "recency"], share[trace, capacity, "price"], share[trace, "no limit", "–"]]
        for way, place in ways.items():
            bars.append((f"{trace.split('_')[0]}, {capacity}, {way}", [number(case[place]) for case in cases]))
    return Bars(
        "Share of the prompts' tokens that is not computed, seams of (0, 0)",
        ["by recency", "by price", "no limit of capacity"],
        bars,
    )


PICTURES = {
    "attention": attention,
    "conversations": conversations,
    "decoding": decoding,
    "demo": demo,
    "directory": directory,
    "disk": disk,
    "entries": entries,
    "kernels": kernels,
    "land-and-store": land_and_store,
    "neighbours": neighbours,
    "overhead": overhead,
    "prefix-tree": prefix_tree,
    "quality": quality,
    "remote": remote,
    "robustness": robustness,
    "router": router,
    "segments-replay": segments_replay,
    "transfer": transfer,
    "vllm": vllm,
    "vllm-lengths": vllm_lengths,
}


def lacking(name, text):
    """Yields what a page lacks: a picture that it shows, or a command."""
    pictures = [link for alt, link in re.findall(r"^!\[([^\]]*)\]\(([^)]+)\)", text, re.M) if alt.strip()]
    if name in WITHOUT:
        if pictures:
            yield "has a picture, and a reason for none in draw_tables.py"
        return
    if not any((FOLDER / link).is_file() for link in pictures):
        yield "shows no picture: add one, or the reason to WITHOUT in draw_tables.py"
    elif name in PICTURES and f"{name}.svg" not in pictures:
        yield f"does not show {name}.svg"
    if not re.search(r"^```(?:sh|console)$", text, re.M):
        yield "has no command that repeats its figures"


def breaches():
    for name, figures in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        if not path.exists() or path.read_text(encoding="utf-8") != figures().draw():
            yield f"{path.name} does not show its page's table: run tools/bench/draw_tables.py --write"
    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    for name, text in pages.items():
        yield from (f"{name}.md {what}" for what in lacking(name, text))
    yield from (f"{name}.md is not there, and draw_tables.py has a reason for it" for name in WITHOUT.keys() - pages)


def main():
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit(__doc__.strip())
    if sys.argv[1] == "--write":
        for name, figures in PICTURES.items():
            (FOLDER / f"{name}.svg").write_text(figures().draw(), encoding="utf-8")
        return 0
    found = list(breaches())
    for breach in found:
        print(f"docs/benchmarks/{breach}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
