# SPDX-License-Identifier: Apache-2.0
"""Prompts set from segments through the connector: what goes wrong, waits or is given up while they are set."""

import time

from segmented_engines import MODEL, texts
from tiny_engines import count, prompt, same


def test_what_goes_wrong_in_a_composer_is_computed(segmented, expected):
    child, query = segmented(MODEL), prompt("breaks", 20)
    parts = texts("breaks", 4)
    child.ask(parts, query)
    wanted = expected(MODEL, [sum(parts, []) + query], 4)
    pages, _ = child.probe("state_of")
    for what in ("_into_blocks", "_take_step", "_compose", "_fill", "_take"):
        child.call("erase")
        child.probe("fail_the_next", what)
        failures = count(child, "load_failures")
        answer = child.ask(parts, query)
        same([answer], wanted)
        assert count(child, "load_failures") == failures + 1
        assert child.probe("state_of")[1] == 0
    child.call("erase")
    assert child.ask(parts, query)[2] == 400
    assert child.probe("state_of") == (pages, 0), "pages in doubt came back"
    child.call("erase")
    child.probe("stall_the_next", 1.5)
    same([child.ask(parts, query)], wanted)
    deadline = time.monotonic() + 30
    while child.ask(parts, query)[1] == wanted[0][1] and time.monotonic() < deadline:
        child.call("erase")
    child.call("erase")
    assert child.ask(parts, query)[2] == 400, "behind the one that was given up"
    assert child.probe("state_of") == (pages, 0)
    long = prompt("long", 2100)  # more than one step of the engine
    same([child.ask([long], query)], expected(MODEL, [long + query], 4))


def settles(child, state):
    """Sets a prompt of its own until nothing is held any more."""
    deadline = time.monotonic() + 30
    while child.probe("state_of") != state and time.monotonic() < deadline:
        child.call("erase")
        child.ask(texts("settles", 2), prompt("settles", 20))
    assert child.probe("state_of") == state


def test_a_prompt_that_waits_for_others_is_not_late(segmented):
    child, query = segmented(MODEL), prompt("turns", 20)
    prompts = [(sum(texts(f"turns {i}", 2), []) + query, [100] * 2) for i in range(3)]
    failures = count(child, "load_failures")
    child.probe("stall_the_next", 3, compose_ms=5000, prompts=3)  # the last one's turn comes behind 6 s
    assert [cached for *_, cached in child.probe("ask_together", prompts)] == [200] * 3
    assert count(child, "load_failures") == failures


def test_prompts_behind_one_that_hangs_are_computed(segmented, expected):
    child, query = segmented(MODEL), prompt("hangs", 20)
    child.call("erase")
    state, failures = child.probe("state_of"), count(child, "load_failures")
    prompts = [(sum(texts(f"hangs {i}", 2), []) + query, [100] * 2) for i in range(3)]
    child.probe("stall_the_next", 5)
    answers = child.probe("ask_together", prompts)
    assert [cached for *_, cached in answers] == [0] * 3 and count(child, "load_failures") == failures + 3
    same(answers, expected(MODEL, [tokens for tokens, _ in prompts], 4), 2e-2)
    settles(child, state)


def test_a_request_that_is_given_up_leaves_nothing(segmented):
    child, query = segmented(MODEL), prompt("left", 20)
    parts = texts("left", 4)
    child.ask(parts, query)
    child.call("erase")
    free, state = child.call("free_blocks"), child.probe("state_of")
    counts = [count(child, name) for name in ("published_segments", "load_failures")]
    child.probe("begin_to_set", "1000000", sum(parts[::-1], []) + query, [100] * 4)
    assert child.probe("abort", "1000000") in ([], ["abort"])
    child.call("erase")
    assert child.call("free_blocks") == free
    child.probe("go_on")
    assert [count(child, name) for name in ("published_segments", "load_failures")] == counts, (
        "nothing is computed for it"
    )
    settles(child, state)
    child.call("erase")
    assert child.call("free_blocks") == free
