# SPDX-License-Identifier: Apache-2.0
"""How long the engine computes a token of a prompt, by its recent steps."""

from __future__ import annotations

from ashlar.vllm.order import Order, Timer

_TOKENS = 64  # steps of fewer tokens say nothing of the pace of prefill
_MEMORY = 0.8


class Pace:
    def __init__(self) -> None:
        self.seconds_a_token = 0.0  # 0: not known yet
        self._timer: Timer | None = None
        self._timed: tuple[Timer, int] | None = None

    def begin(self, order: Order) -> None:
        """A step begins. The last one's time is known now, or that step does not count."""
        if self._timed is not None and (seconds := self._timed[0].seconds()) is not None:
            now = seconds / self._timed[1]
            self.seconds_a_token = _MEMORY * (self.seconds_a_token or now) + (1 - _MEMORY) * now
        self._timer, self._timed = order.timer(), None

    def end(self, tokens: int) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and tokens >= _TOKENS:
            timer.stop()
            self._timed = timer, tokens

    def saved(self, tokens: int, spent: float) -> float:
        """Seconds of prefill that `tokens` did not take, less those spent."""
        return max(0.0, tokens * self.seconds_a_token - spent)
