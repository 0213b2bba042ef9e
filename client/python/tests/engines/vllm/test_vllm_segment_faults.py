# SPDX-License-Identifier: Apache-2.0
"""Segments through the connector: what fails, is late or is abandoned while a prompt waits for it."""

import contextlib
import functools
import queue
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt, same, settle

import ashlar
from ashlar.request import Step, StepKind
from ashlar.vllm import composing
from ashlar.vllm.composing import Composer, NotLanded, Pages, _entries, _Landing
from ashlar.vllm.messages import NO_SPACE, Fetched
from ashlar.vllm.options import Options
from ashlar.vllm.runs import Run

TAKEN = 100 + 3 * 84  # for four texts of 100 tokens: the first one, and three interiors


def test_segments_are_computed_if_the_composer_fails(segmented, expected):
    child, query = segmented(MODEL), prompt("breaks", 20)
    parts = texts("breaks", 4)
    child.publish(parts)
    pages, _ = child.probe("state_of")
    for number, what in enumerate(("_copy", "_take_tuple", "_land", "_pays")):
        # An exact prefix of it would be loaded instead of segments.
        whole = [sum(parts, []) + prompt(f"breaks {what}", 20)]
        child.probe("fail_the_next", what)
        failures = count(child, "load_failures")
        answer = child.probe("ask", whole[0], [100] * 4, salt=None)
        same([answer], expected(MODEL, whole, 4))
        assert answer[2] == 0 and count(child, "load_failures") == failures + 1
        assert child.probe("state_of", 20)[1] == 0
        child.call("erase")
        parts = texts(f"breaks {number}", 4)
        child.publish(parts)
    assert child.ask(parts, query)[2] == TAKEN
    assert child.probe("state_of", 20) == (pages, 0), "unresolved pages came back"


def test_a_segment_that_fails_to_run_alone_affects_no_request(segmented, expected):
    child = segmented(MODEL)
    for what in ("_publish", "_tensors", "_write"):
        parts, free = texts(f"fails alone {what}", 3), child.call("free_blocks")
        child.probe("settle")
        published = count(child, "published_segments")
        child.probe("fail_the_next", what)
        query = prompt(f"fails alone {what}", 20)
        same([child.ask(parts, query)], expected(MODEL, [sum(parts, []) + query], 4))
        child.probe("settle")
        child.call("erase")
        assert child.call("free_blocks") == free
        assert count(child, "published_segments") - published == 2
    long = prompt("long", 2100)  # runs in two parts
    query = prompt("long query", 20)
    same([child.ask([long], query)], expected(MODEL, [long + query], 4))
    child.probe("settle")
    child.call("erase")
    assert child.call("free_blocks") == free


def test_a_segment_longer_than_the_models_length_is_not_run(shared_daemon):
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(MODEL, options, max_model_len=512) as child:
        child.ask(texts("layout", 1), prompt("layout", 20))
        child.probe("settle")
        published = count(child, "published_segments")
        child.probe("run_alone", prompt("longer than prompts", 513))
        assert count(child, "published_segments") == published
        child.probe("run_alone", prompt("as long as prompts", 512))
        assert count(child, "published_segments") == published + 1


def test_a_segment_with_unknown_tokens_is_not_run(segmented):
    child, known = segmented(MODEL), prompt("known tokens", 100)
    child.ask(texts("vocabulary", 1), prompt("vocabulary", 20))
    child.probe("settle")
    assert child.probe("runs_of", known) == 1
    for unknown in (-1, 1 << 20):
        assert child.probe("runs_of", [*known[:-1], unknown]) == 0


def test_a_prompt_that_waits_for_others_is_not_late(segmented):
    child, query = segmented(MODEL), prompt("turns", 20)
    prompts = []
    for number in range(3):
        parts = texts(f"turns {number}", 2)
        child.publish(parts)
        prompts.append((sum(parts, []) + query, [100] * 2))
    late = count(child, "lookups", "timed_out")
    child.probe("set_patience", 200)
    try:
        child.probe("stall_the_next", 0.5, prompts=3)
        assert [cached for *_, cached in child.probe("ask_together", prompts)] == [184] * 3
    finally:
        child.probe("set_patience", 10000)
    assert count(child, "lookups", "timed_out") == late


def test_prompts_whose_lookup_is_late_are_computed(segmented, expected):
    child, query = segmented(MODEL), prompt("hangs", 20)
    prompts = []
    for number in range(3):
        parts = texts(f"hangs {number}", 2)
        child.publish(parts)
        prompts.append((sum(parts, []) + query, [100] * 2))
    state, late = child.probe("state_of"), count(child, "lookups", "timed_out")
    child.probe("set_patience", 200)
    child.probe("hang_lookups", True)
    try:
        answers = child.probe("ask_together", prompts)
    finally:
        child.probe("hang_lookups", False)
        child.probe("set_patience", 10000)
    assert count(child, "lookups", "timed_out") == late + 1
    assert [cached for *_, cached in answers] == [0] * 3
    same(answers, expected(MODEL, [tokens for tokens, _ in prompts], 4), 2e-2)
    child.probe("settle_landings")
    assert child.probe("state_of", 20) == state


def test_prompts_that_find_no_space_are_computed(segmented, expected):
    child, query = segmented(MODEL), prompt("space", 20)
    parts = texts("space", 4)
    child.publish(parts)
    child.probe("set_patience", 200, land_ms=200)
    try:
        taken = child.probe("take_pages")
        answer = child.ask(parts, query)
        same([answer], expected(MODEL, [sum(parts, []) + query], 4))
        assert answer[2] == 0
    finally:
        child.probe("set_patience", 10000)
        child.probe("give_pages", taken)


def test_a_segment_that_finds_no_space_to_be_published_delays_no_prompt(segmented):
    """Landed prompts have the pages until they have jumped. The segment is published once they have."""
    child, query = segmented(MODEL), prompt("delays", 20)
    parts = texts("delays", 2)
    child.publish(parts)
    child.probe("settle")
    published, taken = count(child, "published_segments"), child.probe("take_pages", 20)
    child.probe("set_patience", 10000, land_ms=120000)
    child.probe("wait_for_pages", 120.0)
    try:
        child.probe("begin_alone", prompt("delayed", 400))
        assert child.ask(parts, query)[2] == 100 + 84
        assert child.probe("publish_waits"), "answered while the segment waits"
        child.probe("give_pages", taken)
        child.probe("settle")
        assert count(child, "published_segments") == published + 1
        assert not child.probe("publish_waits")
    finally:
        child.probe("wait_for_pages", composing._PAGES_WAIT)
        child.probe("set_patience", 10000)


def test_a_segment_that_fails_in_its_forward_is_a_miss(segmented, expected):
    child = segmented(MODEL)
    for what in ("the_next_preparation", "the_next_forward", "after_the_next_forward"):
        text, segment = prompt(f"during {what}", 300), prompt(f"fails in {what}", 600)
        child.probe("settle")
        child.call("erase")
        free, published = child.call("free_blocks"), count(child, "published_segments")
        child.call("evaluate", f"__import__('segment_probe').fail_{what}()")
        same([child.probe("ask_during_run", text, segment)], expected(MODEL, [text], 8), 2e-2)
        child.probe("settle")
        settle(child, free)
        assert count(child, "published_segments") == published


def test_a_prompt_longer_than_the_pages_takes_the_segments_that_fit(shared_daemon, segmented, expected):
    parts, query = texts("few pages", 4), prompt("few pages", 20)
    segmented(MODEL).publish(parts)
    options = connector(shared_daemon, segments=True, segment_tokens=256, **PATIENT)
    with Segmented(MODEL, options) as child:
        (answer, heard) = child.probe("ask_and_hear", sum(parts, []) + query, [100] * 4)
        assert answer[2] == 100 + 84
        assert [line for line in heard if "raise segment_tokens (256)" in line], heard
        assert child.probe("runs_of", prompt("as long as the pages", 255)) == 1
        assert child.probe("runs_of", prompt("longer than the pages", 256)) == 0


def test_the_first_of_many_segments_that_fit_are_found_quickly():
    """Meanwhile the engine's thread waits for the interpreter's lock."""
    steps = [Step(StepKind.INTERIOR, 200 * i + 8, 200 * i + 192, False, i) for i in range(1000)]
    composer = SimpleNamespace(_pages=SimpleNamespace(count=4096, tuples=500), _told_shortage=True)
    begun = time.thread_time()
    fitting = Composer._fitting(composer, steps)
    assert time.thread_time() - begun < 0.2
    assert fitting == steps[:341] and Composer._fitting(composer, fitting) == fitting
    assert len(_entries(fitting)) <= 4096 < len(_entries(steps[:342]))
    composer._pages.tuples = 300
    assert Composer._fitting(composer, steps) == steps[:300]


def test_an_aborted_request_leaves_nothing(segmented):
    child, query = segmented(MODEL), prompt("left", 20)
    parts = texts("left", 4)
    child.publish(parts)
    free, state = child.call("free_blocks"), child.probe("state_of")
    child.probe("begin_to_land", "1000000", sum(parts, []) + query, [100] * 4)
    assert child.probe("abort", "1000000") in ([], ["abort"])
    child.call("erase")
    assert child.call("free_blocks") == free
    child.probe("go_on")
    child.call("erase")
    assert (child.call("free_blocks"), child.probe("state_of", 20)) == (free, state)


@pytest.mark.parametrize("verdict, free", [("PENDING", 1), ("OK", 3)])
def test_pages_of_a_publish_that_the_cache_keeps_are_not_given_back(verdict, free):
    """The cache returns them later. If they were free as well, two segments would land in one page."""

    class Request:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_plan(self):
            return ashlar.Verdict.OTHER_PAGES

        def poll_quiesced(self):
            return getattr(ashlar.Verdict, verdict)

    pages = Pages(SimpleNamespace(layers=[ashlar.Attention(1, 16, 16, ashlar.DType.F32)]), 48, torch.device("cpu"))
    cache = SimpleNamespace(start_begin=lambda *given, **options: Request())
    order = SimpleNamespace(copies=contextlib.nullcontext)
    composer = SimpleNamespace(_opening=SimpleNamespace(cache=cache), _options=Options(), _order=order, _pages=pages)
    alone = SimpleNamespace(tokens=np.arange(20), first=False, salt="")
    run = SimpleNamespace(alone=alone, mark=None, is_current=[lambda: True])
    try:
        assert Composer._publish(composer, run) == 0
        assert (pages.count, pages.free) == (3, free)
    finally:
        pages.close()


def test_a_landing_takes_pages_and_tuples_together_or_neither():
    """A landing that held one of them while it waited for the other would block those that are done."""
    pages = Pages(SimpleNamespace(layers=[ashlar.Attention(1, 16, 16, ashlar.DType.F32)]), 80, torch.device("cpu"), 3)
    mark = SimpleNamespace(query=lambda: ended)
    try:
        first, ended = pages.take(16, 0.0, lambda: True, 2).tolist(), False
        for tokens, tuples in ((16, 2), (96, 1), (16, 4)):
            with pytest.raises(NotLanded, match="64 of 80 tokens and 1 of 3 tuples are free"):
                pages.take(tokens, 0.0, lambda: True, tuples)
        assert pages.free == 4 and len(pages.take(16, 0.0, lambda: True, 1)) == 1
        pages.give(first, mark, 2)
        with pytest.raises(NotLanded):
            pages.take(16, 0.0, lambda: True, 1)
        ended = True
        assert len(pages.take(64, 0.0, lambda: True, 2)) == 4
    finally:
        pages.close()


def test_free_pages_are_consecutive_again():
    """Jumps copy runs of consecutive pages, which would become ever shorter."""
    pages = Pages(SimpleNamespace(layers=[ashlar.Attention(1, 16, 16, ashlar.DType.F32)]), 80, torch.device("cpu"))
    try:
        taken = [pages.take(16, 0.0, lambda: True).tolist() for _ in range(5)]
        for number in (1, 3, 0, 4, 2):
            pages.give(taken[number])
        assert pages.take(80, 0.0, lambda: True).tolist() == list(range(5))
    finally:
        pages.close()


def test_a_run_that_waits_for_pages_leaves_the_device():
    """The engine's budget of device memory does not contain its tensors."""
    pages = Pages(SimpleNamespace(layers=[ashlar.Attention(1, 16, 16, ashlar.DType.F32)]), 48, torch.device("cpu"))
    order, cache = SimpleNamespace(copies=contextlib.nullcontext), SimpleNamespace()
    composer = SimpleNamespace(_opening=SimpleNamespace(cache=cache), _order=order, _pages=pages)
    host, device = (SimpleNamespace(cpu=lambda: host) for _ in range(2))
    run = complete_run(1)
    run.alone.first, run.alone.salt = True, ""
    run.keys = {"attention": [(host, host), (device, device)]}
    run.tuples, run.inputs, run.ends = {"linear": (device, device)}, {"linear": device}, {"linear": device}
    try:
        pages.take(48, 0.0, lambda: True)
        with pytest.raises(NotLanded):
            Composer._publish(composer, run)
        assert run.keys == {"attention": [(host, host), (host, host)]}
        assert (run.tuples, run.inputs, run.ends) == ({"linear": (host, host)}, {"linear": host}, {"linear": host})
    finally:
        pages.close()


@contextlib.contextmanager
def serving(tokens, *, land_ms=120000, kept=0, calls=1):
    """Yields a composer without an engine, whose thread runs, with pages for this number of tokens. It publishes what
    takes all of them. `kept`: number of pages that the cache returns with the last of these calls."""
    pages = Pages(SimpleNamespace(layers=[ashlar.Attention(1, 16, 16, ashlar.DType.F32)]), tokens, torch.device("cpu"))
    given = pages.take(16 * kept, 0.0, lambda: True).tolist() if kept else []
    pages.kept, unused = len(given), []
    answers = iter([[]] * (calls - 1) + [given])
    cache = SimpleNamespace(take_quiesced_pages=lambda most: next(answers))
    opening = SimpleNamespace(cache=cache, refresh=unused.append)
    composer = SimpleNamespace(
        _asked=queue.Queue(), _fetched=queue.SimpleQueue(), _ran=queue.SimpleQueue(), _unpublished=None,
        _opening=opening, _pages=pages, _options=Options(land_ms=land_ms), _drop=lambda landing: None, unused=unused,
        _publish=lambda run: len(pages.take(tokens, 0.0, lambda: True)) // 3, _land=lambda landing: Fetched(ended=True),
    )  # fmt: skip
    for name in ("_take_quiesced", "_answer", "_publish_waiting", "_end_run"):
        setattr(composer, name, functools.partial(getattr(Composer, name), composer))
    thread = threading.Thread(target=Composer._serve, args=(composer,))
    thread.start()
    try:
        yield composer
    finally:
        composer._asked.put(None)
        thread.join(10)
        pages.close()
    assert not thread.is_alive()


def complete_run(number):
    run = Run({}, SimpleNamespace())
    run.alone = SimpleNamespace(number=number, tokens=[0], end=1)
    return run


def test_kept_pages_come_back_before_a_segment_is_published():
    """No prompt may find segments for a long time, and so land some, while missing ones are run alone."""
    with serving(48, kept=3) as composer:
        assert composer._pages.free == 0
        composer._asked.put(complete_run(1))
        assert composer._ran.get(timeout=10) == (1, 1)
        assert (composer._pages.free, composer._pages.kept, composer.unused) == (0, 0, [True])


def test_kept_pages_come_back_while_a_segment_waits_to_be_published(monkeypatch):
    """Each attempt is a call to the daemon, which may hang."""
    monkeypatch.setattr(composing, "_PAGES_WAIT", 120.0)
    begun = time.monotonic()
    with serving(48, kept=3, calls=3) as composer:
        composer._asked.put(complete_run(1))
        assert composer._ran.get(timeout=100) == (1, 1)
        assert time.monotonic() - begun >= 2 * composing._QUIESCED_POLL


def test_a_publish_that_waits_for_pages_delays_no_landing(monkeypatch):
    """Landed prompts have all pages until they have jumped."""
    monkeypatch.setattr(composing, "_PAGES_WAIT", 120.0)
    with serving(48) as composer:
        taken = composer._pages.take(48, 0.0, lambda: True).tolist()
        composer._asked.put(complete_run(1))
        for number in range(3):
            composer._asked.put(_Landing(SimpleNamespace(number=number), lambda: True))
            assert composer._fetched.get(timeout=130)[0] == number
        assert composer._ran.empty(), "landed while the segment waits"
        composer._pages.give(taken)
        assert composer._ran.get(timeout=10) == (1, 1), "published once a prompt has jumped"


@pytest.mark.parametrize("limit, land_ms", [(120.0, 100), (0.1, 120000)])
def test_a_publish_without_pages_is_dropped_after_its_limit(limit, land_ms, monkeypatch):
    """No other segment runs while one waits."""
    heard = []
    monkeypatch.setattr(composing, "_PAGES_WAIT", limit)
    monkeypatch.setattr(composing.logger, "warning", lambda form, *given: heard.append(form % given))
    with serving(48, land_ms=land_ms) as composer:
        taken = composer._pages.take(48, 0.0, lambda: True).tolist()
        for number in (1, 2):
            begun = time.monotonic()
            composer._asked.put(complete_run(number))
            assert composer._ran.get(timeout=100) == (number, NO_SPACE)
            assert time.monotonic() - begun >= 0.1
        composer._pages.give(taken)
        composer._asked.put(complete_run(3))
        assert composer._ran.get(timeout=100) == (3, 1)
    first, _ = heard
    assert re.search(r"too few pages were free for \d{3,} ms: .*, and the daemon may still write to 0 tokens", first)
