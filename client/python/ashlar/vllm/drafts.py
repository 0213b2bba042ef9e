# SPDX-License-Identifier: Apache-2.0
"""Where a step of speculative decoding leaves the states of a hybrid model.

A step computes known tokens and drafts. Its first state is that after the known tokens, in the block of the step's last
token. The block `n` positions after it has the state after `n` drafts. Convolutions have one list of inputs, in the
first block: after `n` drafts, the last inputs begin `n` positions later. If the engine accepts drafts up to the end of
the step's last block, it moves the state of that depth into the first block, over the others.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a state: the index of the step's first block, and the number of drafts that precede the state."""

    column: int
    accepted: int = 0


@dataclasses.dataclass
class Step:
    """A request's last step."""

    start: int | None  # tokens computed before it; None: unknown until the previous step's drafts are accepted or not
    tokens: int  # drafts included
    drafts: int

    def place(self, depth: int, end: int, block: int) -> Place | None:
        """Returns the place of the state after `depth` tokens, `end` of which the engine has computed and accepted.
        None: the step has no such state, or may have none."""
        if self.start is None:
            return None
        last = self.start + self.tokens
        first = last - self.drafts
        column = -(-last // block) - 1
        if not first <= depth <= end <= last:
            return None
        # If a stop token precedes accepted drafts, vLLM 0.33 does not include these drafts in `end`, but they may have
        # moved the states.
        if last == (column + 1) * block:
            return Place(column) if depth == end == last else None
        return Place(column, depth - first)
