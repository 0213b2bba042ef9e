# SPDX-License-Identifier: Apache-2.0
"""Draws figures as groups of bars. draw_tables.py takes the figures from the pages."""

import dataclasses
import html
import math
import re
import textwrap

import drawing

COLOURS = ["#1b6ca8", "#c0504d", "#4f9d5d", "#8064a2"]
WIDTH, HEIGHT, LEFT, TOP, GAP = 880, 240, 80, 40, 14
LETTER, LINE = 6.8, 13  # mean width of a letter, height of a line


def wrapped(label, letters):
    """Splits the label into lines of this many letters. A number stays with its unit, and with its equivalent."""
    kept = re.sub(r"(?<=\d) (?=[KMG]i?B\b)| (?==)|(?<==) ", "\u00a0", label)
    return textwrap.wrap(kept, letters, break_long_words=False)


@dataclasses.dataclass
class Bars:
    """A picture's figures. A value is a number, a pair of the lowest and the highest, or None if nothing was measured."""

    title: str
    names: list  # names of a group's bars
    groups: list  # pairs (label, values)
    logarithmic: bool = False
    line: tuple | None = None  # a value across all groups, and its name

    def measured(self):
        values = [value for _, values in self.groups for value in values if value is not None]
        ends = [end for value in values for end in (value if isinstance(value, tuple) else (value,))]
        return ends + ([self.line[0]] if self.line else [])

    def draw(self):
        wide = (WIDTH - LEFT - GAP) / len(self.groups)
        labels = [wrapped(label, int(wide / LETTER)) for label, _ in self.groups]
        height = TOP + HEIGHT + 56 + LINE * max(map(len, labels))
        marks, y = self.axis()
        lines = [
            drawing.frame(WIDTH, height),
            f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(self.title)}</text>',
            *drawing.grid(LEFT, WIDTH - GAP, [(y(mark), f"{mark:g}") for mark in marks]),
        ]
        for i, (_, values) in enumerate(self.groups):
            left = LEFT + i * wide
            lines += self.bars(left + GAP / 2, wide - GAP, values, y)
            for k, words in enumerate(labels[i]):
                lines.append(
                    f'<text x="{left + wide / 2:.1f}" y="{TOP + HEIGHT + 16 + LINE * k}" '
                    f'text-anchor="middle">{html.escape(words)}</text>'
                )
        if self.line:
            lines.append(
                f'<line x1="{LEFT}" x2="{WIDTH - GAP}" y1="{y(self.line[0]):.1f}" y2="{y(self.line[0]):.1f}" '
                f'stroke="#333" stroke-dasharray="6 4"/>'
            )
        return "\n".join([*lines, *self.legend(height), "</svg>"]) + "\n"

    def axis(self):
        """Returns the marks, and the function from a value to its height in the picture."""
        least, most = min(self.measured()), max(self.measured())
        if self.logarithmic:
            marks = [10.0**e for e in range(math.floor(math.log10(least / 1.5)), math.ceil(math.log10(most)) + 1)]
        else:
            step = next(s * 10**e for e in range(-2, 6) for s in (1, 2, 5) if most / (s * 10**e) <= 6)
            marks = [i * step for i in range(min(0, math.floor(least / step)), math.ceil(most / step) + 1)]
        place = math.log10 if self.logarithmic else float
        low, high = place(marks[0]), place(marks[-1])
        return marks, lambda value: TOP + HEIGHT * (1 - (place(value) - low) / (high - low))

    def bars(self, left, width, values, y):
        """Draws one group's bars. For a pair, the part between both values is pale."""
        each = width / len(self.names)
        ground = TOP + HEIGHT if self.logarithmic else y(0)
        for k, value in enumerate(values):
            if value is None:
                continue
            low, high = value if isinstance(value, tuple) else (value, value)
            says = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            for one, other, opacity in [(ground, y(low), ""), (y(low), y(high), ' opacity="0.45"')]:
                if one != other:
                    yield (
                        f'<rect x="{left + k * each:.1f}" y="{min(one, other):.1f}" width="{each - 1:.1f}" '
                        f'height="{abs(one - other):.1f}" fill="{COLOURS[k]}"{opacity}><title>{says}</title></rect>'
                    )

    def legend(self, height):
        x, y = LEFT, height - 20
        for colour, name in zip(COLOURS, self.names):
            yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
            yield f'<text x="{x + 18}" y="{y + 10}">{html.escape(name)}</text>'
            x += max(160, round(LETTER * len(name)) + 40)
        if self.line:
            yield f'<line x1="{x}" x2="{x + 24}" y1="{y + 6}" y2="{y + 6}" stroke="#333" stroke-dasharray="6 4"/>'
            yield f'<text x="{x + 30}" y="{y + 10}">{html.escape(self.line[1])}</text>'
