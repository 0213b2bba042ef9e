# SPDX-License-Identifier: Apache-2.0
"""Measures, by recent steps, how long the engine takes for a token of a prompt and for a step of few tokens."""

from __future__ import annotations

from ashlar.vllm.order import Order, Timer

_TOKENS = 64  # steps of fewer tokens do not show the pace of prefill, but the cost of a step
_MEMORY = 0.8


class Pace:
    def __init__(self) -> None:
        self.seconds_per_token = 0.0  # 0: not known yet
        self.seconds_per_step = 0.0  # seconds for a step of few tokens; 0: not known yet
        self._timer: Timer | None = None
        self._timed: tuple[Timer, int] | None = None

    def begin(self, order: Order) -> None:
        """Call it when a step begins. It records the previous step's time if it is known by now."""
        if self._timed is not None and (seconds := self._timed[0].seconds()) is not None:
            tokens = self._timed[1]
            if tokens >= _TOKENS:
                self.seconds_per_token = _mean(self.seconds_per_token, seconds / tokens)
            else:
                self.seconds_per_step = _mean(self.seconds_per_step, seconds)
        self._timer, self._timed = order.timer(), None

    def end(self, tokens: int) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and tokens > 0:
            timer.stop()
            self._timed = timer, tokens

    @property
    def break_even_tokens(self) -> float:
        """Returns the number of a prompt's tokens that are computed in the time of one additional step."""
        if self.seconds_per_token == 0 or self.seconds_per_step == 0:
            return _TOKENS
        return self.seconds_per_step / self.seconds_per_token

    def saved(self, tokens: int, spent: float) -> float:
        """Returns the seconds of prefill that `tokens` did not take, minus the seconds spent."""
        return max(0.0, tokens * self.seconds_per_token - spent)


def _mean(before: float, now: float) -> float:
    return _MEMORY * (before or now) + (1 - _MEMORY) * now
