# SPDX-License-Identifier: Apache-2.0
"""Caches that are opened again to declare another rate of prefill."""

import threading
import time
import types

from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.state import State


class Cache:
    def __init__(self):
        self.connected, self.closed = True, False

    def close(self):
        self.closed = True


def until(found, seconds=10):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def opening(outcomes, times):
    """`outcomes`: what the next attempts return or raise."""

    def open_cache():
        times.append(time.monotonic())
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    weights = types.SimpleNamespace(digest=lambda: "digest", close=lambda: None)
    return Opening(open_cache, weights, Options(reopen_ms=20), "test", State("test"))


def test_a_failed_reopen_is_tried_again_with_longer_pauses():
    first, second, times = Cache(), Cache(), []
    one = opening([first, *[RuntimeError("busy")] * 3, second], times)
    one.reopen()
    until(lambda: one.refresh(True) or one.cache is second)
    pauses = [after - before for before, after in zip(times[1:], times[2:])]
    assert len(pauses) == 3 and all(pause >= least for pause, least in zip(pauses, (0.02, 0.04, 0.08)))
    until(lambda: first.closed)
    one.close()
    assert second.closed


def test_the_current_cache_stays_in_use_until_a_reopen_succeeds_and_closing_ends_the_attempts():
    first, times = Cache(), []
    one = opening([first, *[RuntimeError("busy")] * 100], times)
    one.reopen()
    until(lambda: one.refresh(True) or len(times) == 3)
    assert one.cache is first
    begun = time.monotonic()
    one.close()
    assert first.closed and time.monotonic() - begun < 4
    tries = len(times)
    time.sleep(0.5)
    assert len(times) == tries


class Hashing:
    """Weights whose digest is awaited, and is never found."""

    def __init__(self):
        self.ended, self.closed = threading.Event(), False

    def digest(self):
        return None

    def wait(self):
        self.ended.wait()

    def failed(self):
        return not self.closed

    def close(self):
        self.closed = True
        self.ended.set()


def test_weights_that_cannot_be_hashed_turn_the_cache_off():
    weights, state = Hashing(), State("test")
    one = Opening(Cache, weights, Options(), "test", state)
    assert (state.name, state.reason) == ("opening", "weights") and one.cache is None
    weights.ended.set()
    until(lambda: state.name == "off")
    assert state.reason == "unhashed" and one.cache is None
    one.close()


def test_an_engine_that_ends_while_it_hashes_reports_no_failure():
    weights, state = Hashing(), State("test")
    one = Opening(Cache, weights, Options(), "test", state)
    weights.close()  # the other half of the connector may be first
    one._thread.join(10)
    one.close()
    assert not one._thread.is_alive() and state.reason == "weights"
