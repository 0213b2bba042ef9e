# SPDX-License-Identifier: Apache-2.0
"""Code shared by the drawing scripts: reads a file of figures, and writes a picture of curves.

bars.py begins its pictures with the same frame and grid.
"""

import json
import sys


def frame(width, height):
    """A picture's first line: its size, and a white background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )


def grid(left, right, marks):
    """The grid lines of a picture, with labels on the left: [(y, label)]."""
    for y, label in marks:
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def main(usage, draw):
    """SCRIPT FILE OUT.svg: writes the lines of a picture that `draw` makes from FILE's figures, starting with its
    frame."""
    if len(sys.argv) != 3:
        sys.exit(usage)
    with open(sys.argv[1], encoding="utf-8") as file:
        figures = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write("\n".join([*draw(figures), "</svg>"]) + "\n")
