#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `ashlar-bench transitions --json FILE` as curves: draw_transitions.py FILE OUT.svg

By the segment's length: bytes stored and time of composition compared with dense storage, and the error of the composed
state. One column per family, one curve per decay.
"""

import math

import drawing

WIDTH, HEIGHT, MARGIN, GAP = 300, 220, 50, 30
COLOURS = ["#1b6ca8", "#c0504d", "#4f9d5d", "#8064a2", "#d98b2b", "#555555"]


def label(case):
    decay = "FLA's initial decay" if case["decay"] == "initial" else f"decay {case['decay']:g} a token"
    return decay + (", correlated keys" if case["keys"] == "correlated" else "")


def curves(cases, family, figure):
    """{label: [(tokens, figure)]} of one family, in the file's order."""
    out = {}
    for case in cases:
        if case["family"] == family:
            out.setdefault(label(case), []).append((case["tokens"], case[figure]))
    return out


def share(value):
    """Position of a ratio to dense on an axis from 0 to 1.2."""
    return min(value, 1.2) / 1.2


def decades(value):
    """Position of an error on a logarithmic axis from 1e-9 to 1e-3."""
    return (max(math.log10(value), -9) + 9) / 6 if value > 0 else 0


# Figure, title, axis, and the axis's marks.
ROWS = [
    ("bytes_ratio", "bytes of transitions, dense = 1", share, (0, 0.25, 0.5, 0.75, 1)),
    ("seconds_ratio", "time of composition, dense = 1", share, (0, 0.25, 0.5, 0.75, 1)),
    ("state_rel_l2", "relative L2 of the state", decades, (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)),
]


class Panel:
    def __init__(self, left, title, lengths, axis, marks):
        self.left, self.title, self.lengths, self.axis, self.marks = left, title, lengths, axis, marks

    def x(self, tokens):
        low, high = math.log2(self.lengths[0]), math.log2(self.lengths[-1])
        return self.left + (math.log2(tokens) - low) / (high - low) * WIDTH

    def y(self, value):
        return MARGIN + (1 - self.axis(value)) * HEIGHT

    def draw(self, lines, names):
        yield f'<text x="{self.left}" y="{MARGIN - 14}" font-weight="bold">{self.title}</text>'
        yield from drawing.grid(self.left, self.left + WIDTH, [(self.y(mark), f"{mark:g}") for mark in self.marks])
        for tokens in self.lengths:
            yield f'<text x="{self.x(tokens):.1f}" y="{MARGIN + HEIGHT + 16}" text-anchor="middle">{tokens}</text>'
        for name, points in lines.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            path = " ".join(f"{self.x(tokens):.1f},{self.y(value):.1f}" for tokens, value in points)
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
            for tokens, value in points:
                yield f'<circle cx="{self.x(tokens):.1f}" cy="{self.y(value):.1f}" r="2.5" fill="{colour}"/>'


def draw(figures):
    cases = figures["cases"]
    families = list(dict.fromkeys(case["family"] for case in cases))
    lengths = sorted({case["tokens"] for case in cases})
    names = list(dict.fromkeys(label(case) for case in cases))
    legend = MARGIN + HEIGHT + 36
    height = len(ROWS) * (HEIGHT + MARGIN + GAP) + 24 * len(names)
    width = len(families) * (WIDTH + MARGIN + GAP) + GAP
    yield drawing.frame(width, height)
    for row, (figure, what, axis, marks) in enumerate(ROWS):
        yield f'<g transform="translate(0,{row * (HEIGHT + MARGIN + GAP)})">'
        for column, family in enumerate(families):
            panel = Panel(MARGIN + column * (WIDTH + MARGIN + GAP), f"{family}: {what}", lengths, axis, marks)
            yield from panel.draw(curves(cases, family, figure), names)
        yield "</g>"
    top = legend + (len(ROWS) - 1) * (HEIGHT + MARGIN + GAP)
    for i, name in enumerate(names):
        y, colour = top + 20 * i, COLOURS[i % len(COLOURS)]
        yield f'<line x1="{MARGIN}" x2="{MARGIN + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{MARGIN + 32}" y="{y + 4}">{name}</text>'


if __name__ == "__main__":
    drawing.main(__doc__, draw)
