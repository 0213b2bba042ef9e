#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `ashlar-bench sharing --json FILE` as curves: draw_sharing.py FILE OUT.svg

Bytes in use over the requests in flight and over the chunks of each: shared in place against a copy for every request,
pages and tuples, one curve for every catalogue. The axes of bytes are logarithmic.
"""

import math

import drawing

WIDTH, HEIGHT, MARGIN, GAP = 380, 260, 60, 30
COLOURS = {20: "#1b6ca8", 100: "#c0504d", 1000: "#4f9d5d"}
COPIES = "#555555"
LOW, HIGH = 8, 11  # decades of bytes

# Title, axis label, and the fixed parameter.
COLUMNS = [("8 chunks a request", "requests", "chunks", 8), ("25 requests in flight", "chunks", "requests", 25)]
# Title, shared in place, copied for every request.
ROWS = [("pages and tuples", "bytes_in_use", "copied_bytes"), ("pages alone", "page_bytes_in_use", "copied_page_bytes")]


def y(value):
    return MARGIN + (1 - (math.log10(value) - LOW) / (HIGH - LOW)) * HEIGHT


def panel(cases, left, title, axis, figures):
    """Draws one panel's lines; `cases` have been chosen."""
    values = sorted({case[axis] for case in cases})
    x = {value: left + i / (len(values) - 1) * WIDTH for i, value in enumerate(values)}
    yield f'<text x="{left}" y="{MARGIN - 14}" font-weight="bold">{title}</text>'
    marks = [10**decade for decade in range(LOW, HIGH + 1)]
    yield from drawing.grid(left, left + WIDTH, [(y(mark), f"{mark / 1e9:g} GB") for mark in marks])
    for value in values:
        yield f'<text x="{x[value]:.1f}" y="{MARGIN + HEIGHT + 16}" text-anchor="middle">{value}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{MARGIN + HEIGHT + 32}" text-anchor="middle">{axis}</text>'
    shared, copied = figures
    # Copies take the same from every catalogue.
    lines = [(copied, next(iter(COLOURS)), COPIES, ' stroke-dasharray="6 4"')]
    lines += [(shared, catalogue, colour, "") for catalogue, colour in COLOURS.items()]
    for figure, catalogue, colour, dash in lines:
        points = sorted((case[axis], case[figure]) for case in cases if case["catalogue"] == catalogue)
        path = " ".join(f"{x[value]:.1f},{y(max(taken, 10**LOW)):.1f}" for value, taken in points)
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{path}"/>'


def draw(figures):
    cases = figures["cases"]
    width = len(COLUMNS) * (WIDTH + MARGIN + GAP) + GAP
    panels = HEIGHT + MARGIN + 2 * GAP
    yield drawing.frame(width, len(ROWS) * panels + 100)
    for row, (what, *taken) in enumerate(ROWS):
        yield f'<g transform="translate(0,{row * panels})">'
        for column, (title, axis, held, value) in enumerate(COLUMNS):
            chosen = [case for case in cases if case[held] == value]
            yield from panel(chosen, MARGIN + column * (WIDTH + MARGIN + GAP), f"{what}, {title}", axis, taken)
        yield "</g>"
    names = [(colour, "", f"shared in place, chunks drawn from {catalogue}") for catalogue, colour in COLOURS.items()]
    names.append((COPIES, ' stroke-dasharray="6 4"', "a copy for every request"))
    for i, (colour, dash, name) in enumerate(names):
        top = len(ROWS) * panels + 20 * i + 10
        yield f'<line x1="{MARGIN}" x2="{MARGIN + 24}" y1="{top}" y2="{top}" stroke="{colour}" stroke-width="2"{dash}/>'
        yield f'<text x="{MARGIN + 32}" y="{top + 4}">{name}</text>'


if __name__ == "__main__":
    drawing.main(__doc__, draw)
