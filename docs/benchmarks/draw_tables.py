#!/usr/bin/env python3
"""Draws the tables of pages in docs/benchmarks as bars, one picture a page, or checks that pictures show the tables.

usage: draw_tables.py --write | --check

A picture is drawn from the page's own numbers, so that the two cannot differ.
"""

import math
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).parent
COLOURS = ["#1b6ca8", "#c0504d", "#4f9d5d", "#8064a2"]
WIDTH, HEIGHT, LEFT, TOP, GAP = 880, 240, 80, 40, 14


def table(page, first_header):
    """The rows, as lists of cells, of the page's table whose header begins with these cells."""
    rows, inside = [], False
    for line in (FOLDER / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells and cells[:len(first_header)] == first_header:
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


def neighbours():
    rows = table("neighbours.md", ["attack", "alone: p50 / p99 / max, ms"])
    bars = [(row[0].strip("`"), [number(row[1], 1), number(row[2], 1), number(row[3])]) for row in rows]
    return "The victim's p99 in ms, alone and beside each attack", ["alone", "under attack", "bar"], bars, True


def transfer():
    header = ["op", "link", "bytes", "GB/s", "p50 µs", "p99 µs", "cpu s/GB", "ratio"]
    rows = [row for row in table("transfer.md", header) if row[1] == "netns"]
    sizes = list(dict.fromkeys(row[2] for row in rows))
    ratio = {(row[0], row[2]): number(row[7]) for row in rows}
    bars = [(size, [ratio["fetch", size], ratio["push", size]]) for size in sizes]
    return "GB/s over those of raw TCP streams, between network namespaces", ["fetch", "push"], bars, False


def disk():
    rows = table("disk.md", ["value", "sequential write"])
    # The last bold number of a cell is that of 16 values under way.
    bars = [(row[0], [float(re.findall(r"\*\*([\d.]+)\*\*", cell)[-1]) for cell in row[1:]]) for row in rows]
    names = ["sequential write", "random write", "sequential read", "random read"]
    return "GB/s over those of the bare disk, 16 values under way", names, bars, False


def decoding():
    states, bars = "", []
    for row in table("decoding.md", ["states", "buffer c"]):
        states = row[0] or states
        kind = "copies of fp16" if "copies" in states else states
        bars.append((f"{kind}, c = {row[1].split(',')[0]}", [number(row[4]), number(row[5])]))
    return "Speed-up of buffered decoding over the recurrence", ["measured", "of the limits"], bars, False


def demo():
    ways = ["full", "prefix cache", "naive addition", "Ashlar"]
    row = table("demo.md", ["", *ways])[0]
    return ("Time to first token of 16 cached sections, ms", ["median of 5 requests"],
            [(way, [number(cell)]) for way, cell in zip(ways, row[1:])], False)


def land_and_store():
    rows = table("land-and-store.md", ["value", "batch", "GB/s"])
    sizes = list(dict.fromkeys(row[0] for row in rows))
    rate = {(row[0], row[1]): number(row[2]) for row in rows}
    bars = [(size, [rate[size, "1"], rate[size, "16"]]) for size in sizes]
    return "Puts, GB/s", ["one value a call", "16 values a call"], bars, False


def vllm():
    names = ["vLLM's own prefix cache", "with Ashlar", "with LMCache"]
    medians = {(row[0], row[2], row[1]): row[4] for row in table("vllm.md", ["model", "variant", "requests a second"])}
    cells = {}  # by model and rate
    for (model, rate, variant), median in medians.items():
        cells.setdefault(f"{model}, {rate} a second", {})[variant] = number(median)
    bars = [(label, [each.get(name) for name in names]) for label, each in cells.items()]
    return "Time to first token of two engines, median, ms", names, bars, True


PICTURES = {"neighbours": neighbours, "transfer": transfer, "disk": disk, "decoding": decoding, "demo": demo,
            "land-and-store": land_and_store, "vllm": vllm}


def draw(title, names, bars, logarithmic):
    """A value of None has no bar: it was not measured."""
    measured = [value for _, values in bars for value in values if value is not None]
    most, low = max(measured), 10 ** math.floor(math.log10(min(measured))) if logarithmic else 0
    if logarithmic:
        marks = [10.0 ** e for e in range(int(math.log10(low)), math.ceil(math.log10(most)) + 1)]
    else:
        step = next(s * 10 ** e for e in range(-2, 6) for s in (1, 2, 5) if most / (s * 10 ** e) <= 6)
        marks = [i * step for i in range(math.ceil(most / step) + 1)]

    def y(value):
        share = (math.log10(value / low) / math.log10(marks[-1] / low) if logarithmic else value / marks[-1])
        return TOP + HEIGHT * (1 - share)

    height = TOP + HEIGHT + 110
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
             f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
             f'<text x="{LEFT}" y="20" font-weight="bold">{title}</text>']
    for mark in marks:
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - GAP}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    group = (WIDTH - LEFT - GAP) / len(bars)
    each = (group - GAP) / len(names)
    for i, (label, values) in enumerate(bars):
        left = LEFT + i * group + GAP / 2
        for k, value in enumerate(values):
            if value is None:
                continue
            lines.append(f'<rect x="{left + k * each:.1f}" y="{y(value):.1f}" width="{each - 1:.1f}" '
                         f'height="{TOP + HEIGHT - y(value):.1f}" fill="{COLOURS[k]}"><title>{value:g}</title></rect>')
        x, under = left + (group - GAP) / 2, TOP + HEIGHT + 16
        turn = f' transform="rotate(-20 {x:.1f} {under})" text-anchor="end"' if len(bars) > 8 else ' text-anchor="middle"'
        lines.append(f'<text x="{x:.1f}" y="{under}"{turn}>{label}</text>')
    for k, name in enumerate(names):
        x = LEFT + k * 160
        lines.append(f'<rect x="{x}" y="{height - 20}" width="12" height="12" fill="{COLOURS[k]}"/>')
        lines.append(f'<text x="{x + 18}" y="{height - 10}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main():
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit(__doc__.strip())
    differing = []
    for name, figures in PICTURES.items():
        picture, path = draw(*figures()), FOLDER / f"{name}.svg"
        if sys.argv[1] == "--write":
            path.write_text(picture, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != picture:
            differing.append(path.name)
    for name in differing:
        print(f"docs/benchmarks/{name} does not show its page's table: run docs/benchmarks/draw_tables.py --write")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
