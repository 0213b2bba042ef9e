#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `ashlar-bench load --json FILE` as curves: draw_load.py FILE OUT.svg

By rate of requests, with one curve per way of serving: time to first token (median and 99th percentile), and prompt
tokens served. HYPIC's Fig. 11 has the same axes.
"""

import math

import drawing

WIDTH, HEIGHT, MARGIN, GAP = 380, 260, 60, 40
WAYS = {"full": ("full recompute", "#555555"), "prefix": ("prefix cache", "#1b6ca8"), "ashlar": ("Ashlar", "#c0504d")}
# Each panel: title, curves as (figure, dashes), whether its axis is logarithmic.
PANELS = [
    (
        "time to first token, ms: median, dashed the 99th percentile",
        [("ttft_p50_ms", ""), ("ttft_p99_ms", "4 3")],
        True,
    ),
    ("prompt tokens served a second", [("tokens_per_s", "")], False),
]


def marks(low, high, logarithmic):
    """Round numbers for the axis."""
    if logarithmic:
        return [m * 10**d for d in range(-3, 9) for m in (1, 2, 5) if low <= m * 10**d <= high]
    step = 10 ** math.floor(math.log10(high))
    step = next(step * f for f in (0.1, 0.2, 0.5, 1) if high / (step * f) <= 8)
    return [i * step for i in range(int(high / step) + 1)]


class Axis:
    def __init__(self, values, logarithmic):
        self.logarithmic = logarithmic
        self.low = min(values) * 0.9 if logarithmic else 0
        self.high = max(values) * 1.1
        self.marks = marks(self.low, self.high, logarithmic)

    def share(self, value):
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def draw_panel(left, points, what, curves, logarithmic):
    across = Axis([point["rate_per_s"] for point in points], True)
    up = Axis([point[figure] for point in points for figure, _ in curves], logarithmic)

    def x(value):
        return left + across.share(value) * WIDTH

    def y(value):
        return MARGIN + (1 - up.share(value)) * HEIGHT

    yield f'<text x="{left}" y="{MARGIN - 16}" font-weight="bold">{what}</text>'
    yield from drawing.grid(left, left + WIDTH, [(y(mark), f"{mark:g}") for mark in up.marks])
    for mark in across.marks:
        yield f'<text x="{x(mark):.1f}" y="{MARGIN + HEIGHT + 16}" text-anchor="middle">{mark:g}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{MARGIN + HEIGHT + 34}" text-anchor="middle">requests a second</text>'
    for way, (_, colour) in WAYS.items():
        of_way = [point for point in points if point["way"] == way]
        for figure, dashes in curves:
            path = " ".join(f"{x(point['rate_per_s']):.1f},{y(point[figure]):.1f}" for point in of_way)
            yield (
                f'<polyline fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}" '
                f'points="{path}"/>'
            )
            for point in of_way:
                yield (
                    f'<circle cx="{x(point["rate_per_s"]):.1f}" cy="{y(point[figure]):.1f}" r="2.5" fill="{colour}"/>'
                )


def draw(figures):
    points = figures["points"]
    width = len(PANELS) * (WIDTH + MARGIN + GAP)
    height = MARGIN + HEIGHT + 80
    yield drawing.frame(width, height)
    for column, (what, curves, logarithmic) in enumerate(PANELS):
        yield from draw_panel(MARGIN + column * (WIDTH + MARGIN + GAP), points, what, curves, logarithmic)
    for i, (name, colour) in enumerate(WAYS.values()):
        left = MARGIN + 160 * i
        yield (
            f'<line x1="{left}" x2="{left + 24}" y1="{height - 20}" y2="{height - 20}" stroke="{colour}" '
            f'stroke-width="2"/><text x="{left + 32}" y="{height - 16}">{name}</text>'
        )


if __name__ == "__main__":
    drawing.main(__doc__, draw)
