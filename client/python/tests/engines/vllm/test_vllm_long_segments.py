# SPDX-License-Identifier: Apache-2.0
"""Segments that do not fit into a step of the engine: they run in parts, between which other requests are served."""

import types

import numpy as np
import pytest
from segmented_engines import MODEL, OTHER_STEPS, PATIENT, Segmented, texts
from test_vllm_jumps import Engine
from test_vllm_segments import interiors
from tiny_engines import connector, count, prompt, settle

from ashlar.vllm.messages import CONTINUES, UNAVAILABLE
from ashlar.vllm.serving import Served

STEP, LONG = 400, 1100  # tokens


# ---- the scheduler's half, without an engine


def long_run(asked, *, tokens=350, step_tokens=150, **options):
    """Returns an engine with one segment of these tokens that this number of requests contained, and its segments."""
    engine = Engine([100], 120, step_tokens=step_tokens, **options)
    for _ in range(asked):
        engine.jumps.cold.add(np.arange(tokens), [tokens], "", [0])
    return engine, engine.jumps.cold


def parts_of(engine, steps, idle=False):
    """Returns the parts that run in steps with these numbers of requests' tokens, and what was reserved for them; 0:
    no part."""
    cold, parts = engine.jumps.cold, []
    for scheduled in steps:
        reserved = cold.reserve(engine.pool)
        alone = cold.next(idle, engine.pool, scheduled(reserved) if callable(scheduled) else scheduled)
        parts.append((reserved, (alone.begin, alone.end) if alone else 0))
        if alone and alone.end < len(alone.tokens):
            assert cold.tell() == alone.number and cold.next(idle, engine.pool, 0) is None, "workers have not answered"
            cold.ran({(alone.number, 0): CONTINUES}, engine.pool)
        elif alone:
            cold.ran({(alone.number, 0): 1}, engine.pool)
    return parts


def test_a_segment_longer_than_a_step_runs_in_parts_that_fill_idle_steps():
    engine, cold = long_run(1)
    assert parts_of(engine, [0, 0, 0], idle=True) == [(0, (0, 117)), (0, (117, 234)), (0, (234, 350))]
    assert not cold.pending and not cold.tell() and engine.stats.data["published_segments"] == 1
    assert all(block.references == 0 for block in engine.pool.taken)


def test_a_segment_longer_than_a_step_shares_steps_with_requests():
    """Requests fill the rest of each step. Every second step is theirs."""
    engine, cold = long_run(2)
    found = parts_of(engine, [lambda reserved: 150 - reserved] * 9)
    assert [part for _, part in found if part] == [(0, 70), (70, 140), (140, 210), (210, 280), (280, 350)]
    assert found[0][0] == 75 and [bool(reserved) for reserved, _ in found] == [True, False] * 4 + [True]
    engine, cold = long_run(2)
    found = parts_of(engine, [20, 20, 80, 20])
    assert [part for _, part in found] == [(0, 117), (117, 234), 0, (234, 350)], "a part has at least half of a step"


def test_a_run_that_one_request_needs_waits_while_requests_are_served():
    engine, cold = long_run(1)
    assert parts_of(engine, [0], idle=True) == [(0, (0, 117))]
    assert parts_of(engine, [20, 0]) == [(0, 0)] * 2 and cold.tell()
    assert cold.add(np.arange(350), [350], "", [0]), "a second request contains it"
    assert [part for _, part in parts_of(engine, [20, 20])] == [(117, 234), (234, 350)]
    assert engine.stats.data["published_segments"] == 1 and not cold.pending, "it is not run again"


def test_a_run_that_one_request_needs_is_abandoned_for_one_that_two_need():
    engine, cold = long_run(1)
    parts_of(engine, [0], idle=True)
    blocks = engine.pool.taken
    for _ in range(2):
        cold.add(np.arange(1000, 1100), [100], "", [0])
    alone = cold.next(False, engine.pool, 20)
    assert alone.tokens[0] == 1000 and all(block.references == 0 for block in blocks)
    cold.ran({(alone.number, 0): 1}, engine.pool)
    assert parts_of(engine, [0] * 3, idle=True) == [(0, (0, 117)), (0, (117, 234)), (0, (234, 350))], "from its start"


@pytest.mark.parametrize("answered", [False, True])
def test_a_run_yields_its_blocks_between_parts(answered):
    engine, cold = long_run(2)
    alone = cold.next(False, engine.pool)
    if answered:
        cold.ran({(alone.number, 0): CONTINUES}, engine.pool)
    assert cold.abandon(engine.pool) and not cold.tell() and not cold.abandon(engine.pool)
    assert all(block.references == 0 for block in engine.pool.taken)
    cold.ran({(alone.number, 0): CONTINUES}, engine.pool)
    assert cold.next(False, engine.pool) is None, "requests would take its blocks again"
    again = cold.next(True, engine.pool)
    assert again.begin == 0 and again.number != alone.number


def test_a_last_part_that_yields_its_blocks_is_published():
    engine, cold = long_run(2, tokens=100)
    alone = cold.next(False, engine.pool)
    assert cold.abandon(engine.pool) and cold.tell() == alone.number
    assert all(block.references == 0 for block in engine.pool.taken)
    cold.ran({(alone.number, 0): 1}, engine.pool)
    assert not cold.pending and engine.stats.data["published_segments"] == 1
    assert all(block.references == 0 for block in engine.pool.taken), "freed once"


def test_a_run_ends_with_the_weights_of_its_parts():
    engine, cold = long_run(2)
    alone = cold.next(False, engine.pool)
    engine.jumps.reset(engine.pool, "generation 2")
    assert cold.pending and cold.tell() == 0 and not cold.pending, "workers release its parts"
    assert all(block.references == 0 for block in engine.pool.taken)
    cold.ran({(alone.number, 0): CONTINUES}, engine.pool)
    assert cold.next(True, engine.pool) is None


def test_a_run_ends_if_a_part_fails_on_one_rank():
    engine, cold = long_run(2)
    cold._ranks = 2
    alone = cold.next(True, engine.pool)
    cold.ran({(alone.number, 0): CONTINUES}, engine.pool)
    assert cold.next(True, engine.pool) is None, "the other rank has not answered"
    cold.ran({(alone.number, 1): UNAVAILABLE}, engine.pool)
    assert cold.pending and cold.tell() == 0 and not cold.pending, "the first rank releases its part"
    assert all(block.references == 0 for block in engine.pool.taken)


def test_a_run_for_another_engine_ends_when_that_one_no_longer_waits():
    engine, cold = long_run(0)
    served, ended = Served(np.arange(350, dtype=np.int32), False, since=0.0), []
    given = [served]
    cold.serving = types.SimpleNamespace(
        take=lambda: given.pop() if given else None, awaits=lambda each: each not in ended, pending=False,
        end=lambda each, published: ended.append((each, published)), take_outcomes=list,
    )  # fmt: skip
    assert parts_of(engine, [0], idle=True) == [(0, (0, 117))]
    assert served.since > 0, "each part is progress"
    assert parts_of(engine, [0], idle=True) == [(0, (117, 234))]
    ended.append(served)
    assert cold.next(True, engine.pool) is None and cold.tell() == 0 and (served, False) in ended


# ---- engines


@pytest.fixture(scope="module")
def short(shared_daemon):
    """Engines whose steps have few tokens."""
    children = {}

    def get(model):
        if model not in children:
            options = connector(shared_daemon, segments=True, **PATIENT)
            children[model] = Segmented(model, options, max_num_batched_tokens=STEP)
        return children[model]

    yield get
    for child in children.values():
        child.close()


@pytest.mark.parametrize("model", [MODEL, "granite", "ministral"])
def test_parts_leave_what_one_run_leaves(model, segmented):
    """The cuts: inside the head, at a block's end, two tokens before the interior's end, and inside the tail. The first
    layer has the same inputs. Others follow kernels in bf16, which round differently in parts, as does the state after
    a first segment: against fp64, one such kernel errs by 4e-3, and each layer adds to it."""
    child, tokens = segmented(model), prompt(f"parts {model}", LONG)
    for first in (False, True):
        errors = child.probe("parts_against_one_run", tokens, [5, 384, LONG - 10, LONG - 3], first)
        print(model, first, errors)
        assert max(map(max, errors)) < 4e-2
        if model != "ministral" and not first:
            assert min(max(each) for each in errors if len(each) > 2) < 1e-5, "tuples of the same rows"


@pytest.mark.parametrize("model", [MODEL, "granite", "ministral"])
def test_a_segment_of_three_steps_is_stored_and_taken(model, short, segmented):
    """The same segments, computed in one step by another engine, have the same answer up to the rounding of bf16."""
    child, query = short(model), prompt("long query", 20)
    parts = [prompt(f"long {model} {i}", tokens) for i, tokens in enumerate((LONG, 120, LONG))]
    assert child.publish(parts) == 5
    for some in (parts[::-1], parts[1:]):
        child.call("erase")
        *_, cached = child.ask(some, query)
        assert cached >= interiors(*map(len, some[1:])), "the first text may be no first segment"
    child.call("erase")
    wanted, least = child.ask(parts, query), LONG // 128 * 128 + interiors(120, LONG)
    assert wanted[2] >= least, "the first text, or a prefix that ends at a block's end within it"
    other = segmented(model)
    assert other.publish(parts, salt="one step") == 5
    answer = other.ask(parts, query, salt="one step")
    apart = max(abs(a - b) for a, b in zip(answer[1], wanted[1]))
    print(f"{model}: log-probabilities differ by {apart:.1e}")
    assert answer[2] >= least and apart < 5e-2


def test_requests_are_served_between_the_parts_of_a_run(short, expected):
    child, part = short(MODEL), prompt("between", LONG)
    prompts = [(prompt(f"between {i}", 40) + part + prompt(f"between query {i}", 300), [40, LONG]) for i in range(4)]
    published = count(child, "published_segments")
    answers, steps = child.probe("ask_together_and_count", prompts)
    print(steps)
    for (_, logs, _), (_, wanted) in zip(answers, expected(MODEL, [tokens for tokens, _ in prompts], 4)):
        assert abs(logs[0] - wanted[0]) < OTHER_STEPS, "exact"
    assert max(map(sum, steps)) <= STEP
    shared = [(scheduled, alone) for scheduled, alone in steps if scheduled and alone]
    assert shared and all(alone <= STEP / 2 for scheduled, alone in shared if scheduled > STEP / 2)
    waits = [alone for scheduled, alone in steps if not scheduled]
    assert not any(waits), "no request waits for a part"
    child.probe("settle")
    assert count(child, "published_segments") >= published + 1
    child.call("erase")
    assert child.ask([prompt("between 9", 40), part], prompt("between", 20))[2] == interiors(LONG)


def interrupt_by_weights(child):
    child.call("execute", "server.connector()._scheduler.reset()")


def interrupt_by_reset(child):
    child.call("execute", "assert llm.reset_prefix_cache(reset_running_requests=True)")


def interrupt_by_failure(child):
    child.call("execute", "__import__('segment_probe').worker()._composer.keep_run(0)")


@pytest.mark.parametrize("interrupt", [interrupt_by_weights, interrupt_by_reset, interrupt_by_failure])
def test_a_run_that_is_interrupted_between_parts_stores_nothing(interrupt, shared_daemon):
    options, tokens = connector(shared_daemon, segments=True, **PATIENT), prompt(interrupt.__name__, 1 + LONG)
    with Segmented(MODEL, options, max_num_batched_tokens=STEP) as child:
        child.ask(texts("interrupt", 1), prompt("interrupt", 20))
        child.probe("settle")
        settle(child, child.call("free_blocks"))
        free, published = child.call("free_blocks"), count(child, "published_segments")
        assert 0 < child.probe("begin_parts", tokens) < LONG and child.call("free_blocks") < free
        interrupt(child)
        assert (child.call("free_blocks") == free) == (interrupt is not interrupt_by_failure)
        child.probe("settle")
        assert not child.probe("kept")
        again = count(child, "published_segments")
        assert again == published + (interrupt is interrupt_by_reset), "it runs again when the engine is idle"
        settle(child, free)


def by_rank(child, name, *args):
    return child.call("evaluate", f"llm.collective_rpc({name!r}, args={args!r})")


def test_every_rank_runs_its_part_of_a_long_segment(shared_daemon):
    options, query = connector(shared_daemon, segments=True, **PATIENT), prompt("long ranks query", 20)
    parts = [prompt(f"long ranks {i}", tokens) for i, tokens in enumerate((LONG, 120, LONG))]
    ranks = dict(tensor_parallel_size=2, worker_extension_cls="tiny_engines.Watched", max_num_batched_tokens=STEP)
    with Segmented(MODEL, options, **ranks) as child:
        assert child.publish(parts) == 5
        by_rank(child, "remember_jumps")
        assert child.ask(parts[1:], query)[2] >= interiors(LONG)
        found = by_rank(child, "composed_apart", sum(parts[1:], []) + query)
        print(found)
        for layers in found:
            # The first layer has the same inputs in any prompt. The bounds are those of test_vllm_segment_families.py.
            assert len(layers) == 3 and 0 < layers[0]["interior"] <= 2e-6
            assert all(layer["chain"] < 0.6 for layer in layers)
        assert found[0] != found[1], "shards differ"
        child.probe("settle")
        settle(child, child.call("free_blocks"))
        free, published = child.call("free_blocks"), count(child, "published_segments")
        assert 0 < child.probe("begin_parts", prompt("one rank fails", 1 + LONG)) < LONG
        by_rank(child, "fail_parts", 1)
        child.probe("settle")
        assert not any(by_rank(child, "keeps_parts")) and count(child, "published_segments") == published
        settle(child, free)


def test_a_request_that_ends_between_parts_leaves_the_run(short):
    child, tokens = short(MODEL), prompt("leaves", 1 + LONG)
    child.probe("settle")
    free, published = child.call("free_blocks"), count(child, "published_segments")
    child.probe("begin_parts", tokens)
    child.probe("begin_and_abort", tokens[:200])
    child.probe("settle")
    settle(child, free)
    assert count(child, "published_segments") == published + 1 and not child.probe("kept")


def test_a_request_gets_the_blocks_of_a_run(shared_daemon, expected):
    """The request and the run fit into the engine's cache one after the other only. The run waits for an idle engine."""
    options, tokens = connector(shared_daemon, segments=True, **PATIENT), prompt("blocks", 1 + 4 * 384)
    text = prompt("blocks of a request", 6 * 384)
    with Segmented(
        MODEL, options, max_num_batched_tokens=STEP, num_gpu_blocks_override=16, max_model_len=7 * 384
    ) as child:
        child.ask(texts("blocks", 1), prompt("blocks", 20), 1)
        child.probe("settle")
        free = child.call("free_blocks")
        child.probe("begin_parts", tokens, 1)
        assert child.call("free_blocks") < 6 + 3 <= free, "keys of six blocks, and states of three layers"
        tokens, logs, _ = child.probe("ask", text, None)
        assert abs(logs[0] - expected(MODEL, [text], 4)[0][1][0]) < OTHER_STEPS
        child.probe("settle")
        settle(child, free)


def test_an_engine_that_ends_between_parts_ends_cleanly(shared_daemon):
    options, tokens = connector(shared_daemon, segments=True, **PATIENT), prompt("stopped", 1 + LONG)
    with Segmented(MODEL, options, max_num_batched_tokens=STEP) as child:
        child.ask(texts("stopped", 1), prompt("stopped", 20), 1)
        child.probe("settle")
        child.probe("begin_parts", tokens)
        child.call("close", timeout=30)
    with Segmented(MODEL, options, max_num_batched_tokens=STEP) as child:
        child.ask(texts("stopped", 1), prompt("stopped again", 20), 1)
        assert child.ask([prompt("stopped lead", 40), tokens[1:]], prompt("stopped query", 20))[2] == 0
