# SPDX-License-Identifier: Apache-2.0
"""Segments of Mamba-2, sliding windows, states in bf16, and tensor-parallel ranks; prompts of new segments."""

import random

import pytest
from segmented_engines import MODEL, PATIENT, Segmented, texts
from test_vllm_segments import interiors
from tiny_engines import Child, connector, count, prompt, same

from ashlar.vllm.lookups import lookup_wait
from ashlar.vllm.options import Options

MAMBA2 = ["granite", "falcon_h1", "nemotron_h"]
WINDOWS = ["ministral", "ministral_whole", "gpt_oss"]


@pytest.mark.parametrize("model", [*MAMBA2, *WINDOWS])
def test_segments_are_found_in_any_order(model, segmented, expected):
    child, query, parts = segmented(model), prompt("families query", 20), texts(f"families {model}", 4, 150)
    assert child.publish(parts) == 6
    jumps = count(child, "jumps")
    first = child.ask(parts, query)
    # The first segment, or a prefix that ends at a block's end within it and saves a step.
    assert first[2] >= 128 + interiors(150, 150, 150) and count(child, "jumps") - jumps >= 3
    child.call("erase")
    assert child.ask(parts, query) == first, "landed as it was published"
    child.call("erase")
    others = [parts[i] for i in (3, 0, 1)]
    tokens, logs, cached = child.ask(others, query)
    assert cached >= interiors(150, 150)
    (wanted,) = expected(model, [sum(others, []) + query], 4)
    apart = max(abs(a - b) for a, b in zip(logs[:1], wanted[1]))
    print(f"{model}: the first log-probability is {apart:.1e} from full prefill")
    assert apart < 0.2, "close to full prefill"
    child.call("erase")
    same([child.probe("ask", sum(others, []) + query, None)], expected(model, [sum(others, []) + query], 4), 2e-2)


@pytest.mark.parametrize("model", MAMBA2)
def test_concurrent_prompts_answer_as_one_at_a_time(model, segmented):
    """The prompts begin with different segments, so that none uses another one's blocks."""
    child, parts = segmented(model), texts(f"together {model}", 4, 120)
    child.publish(parts)
    whole = [sum(parts[i:] + parts[:i], []) + prompt(f"together query {i}", 20) for i in range(4)]
    prompts = [(tokens, [120] * 4) for tokens in whole]
    for one in prompts:
        child.probe("ask_together", [one])
        child.probe("settle")  # its first segment is published, too
    child.call("erase")
    alone = []
    for one in prompts:
        alone += child.probe("ask_together", [one])
        child.call("erase")
    together = child.probe("ask_together", prompts)
    assert [cached for *_, cached in together + alone] == [120 + interiors(120, 120, 120)] * 8
    same(together, [each[:2] for each in alone], 1e-3)


@pytest.mark.parametrize("model", WINDOWS)
def test_windows_read_the_keys_that_a_jump_writes(model, segmented):
    """A segment of one window and more: its last tokens are all that the next ones see in these layers."""
    child, query = segmented(model), prompt("windows query", 20)
    parts = texts(f"windows {model}", 2, 400)
    child.publish(parts)
    composed = child.ask(parts, query, 1, everything=True)
    child.call("erase")
    whole = child.probe("ask", sum(parts, []) + query, None, 1, everything=True, salt="whole")
    child.call("erase")
    other = child.probe("ask", sum(parts, [])[::-1] + query, None, 1, everything=True, salt="other")
    apart, unlike = (max(abs(a - b) for a, b in zip(whole, each)) for each in (composed, other))
    print(f"{model}: composed {apart:.1e} from full prefill, another text {unlike:.1e}")
    assert 0 < apart < unlike / 2


def test_states_in_bf16_are_composed(shared_daemon, expected):
    parts, query = texts("bf16 states", 3, 150), prompt("bf16 query", 20)
    whole = sum(parts, []) + query
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Child(MODEL, mamba_ssm_cache_dtype="bfloat16") as bare:
        ((wanted, logs, _),) = bare.generate([whole], 4)
    with Segmented(MODEL, options, mamba_ssm_cache_dtype="bfloat16") as child:
        child.publish(parts)
        tokens, found, cached = child.ask(parts, query)
    assert cached == 150 + interiors(150, 150)
    assert abs(found[0] - logs[0]) < 0.2


def test_every_rank_takes_its_own_part_of_a_segment(shared_daemon):
    parts, query = texts("ranks", 3, 150), prompt("ranks query", 20)
    options = connector(shared_daemon, segments=True, model_id="two ranks", **PATIENT)
    with Child(MODEL, tensor_parallel_size=2) as bare:
        ((wanted, logs, _),) = bare.generate([sum(parts, []) + query], 4)
    with Segmented(MODEL, options, tensor_parallel_size=2, worker_extension_cls="tiny_engines.Watched") as child:
        assert child.publish(parts) > 0
        sockets = shared_daemon.rpc_socket, shared_daemon.session_socket
        probed = child.probe("saved", sockets, sum(parts, []) + query, [150] * 3, "two ranks")  # of rank 0
        child.call("evaluate", "llm.collective_rpc('remember_jumps')")
        first = child.ask(parts, query)
        assert first[2] == probed[2] == 150 + interiors(150, 150)
        assert abs(first[1][0] - logs[0]) < 0.2, "composition is close to full prefill, not equal"
        ranks = child.call("evaluate", f"llm.collective_rpc('composed_apart', args=({sum(parts, []) + query!r},))")
        print(ranks)
        for layers in ranks:
            # The first layer's inputs have no position: each rank's shard is composed exactly, in fp32. The bound is that
            # of one rank (test_vllm_segments.py).
            assert len(layers) == 3 and 0 < layers[0]["interior"] <= 2e-6 and layers[0]["computed"] <= 2e-6
            # Deeper layers have computed their interiors without what stands before them.
            assert all(layer["chain"] < 0.6 for layer in layers)
        assert ranks[0] != ranks[1], "shards differ"
        child.call("erase")
        free = child.call("free_blocks")
        # One rank has landed nothing: no rank jumps.
        child.call("evaluate", "llm.collective_rpc('spoil_segments', args=(1,))")
        jumps = count(child, "jumps")
        tokens, found, cached = child.ask(parts, query)
        assert cached == 0 and count(child, "jumps") == jumps
        same([(tokens, found)], [(wanted, logs)], 2e-2)
        child.call("evaluate", "llm.collective_rpc('spoil_segments', args=(None,))")
        child.call("erase")
        child.probe("settle")
        assert child.call("free_blocks") == free
    with Segmented(MODEL, options, tensor_parallel_size=2) as child:  # restarted
        assert child.ask([parts[i] for i in (2, 0, 1)], query)[2] == interiors(150, 150)


def test_a_prompt_of_new_segments_takes_no_step_more(segmented, expected):
    """The scheduler's own lookup finds that nothing is cached."""
    child = segmented(MODEL)
    child.ask(texts("first of all", 2), prompt("first", 5))  # by now the worker has reported its layout
    child.probe("settle")
    empty = []
    for _ in range(5):
        parts = texts(f"new {random.random()}", 3)
        child.call("erase")
        answer, steps = child.probe("ask_and_count", sum(parts, []) + prompt("new query", 20), [100] * 3)
        assert answer[2] == 0
        empty.append(steps)
        child.probe("settle")
    assert sorted(empty)[2] == 0, f"{empty}: steps without tokens; a busy machine may delay some lookups"


def test_a_lookup_waits_for_a_part_of_the_prefill():
    assert lookup_wait(Options(lookup_wait_ms=3.0), 1000, 1000.0) == 0.003
    assert lookup_wait(Options(), 1000, 0.0) == 0.002, "the rate is unknown"
    assert lookup_wait(Options(), 4000, 40000.0) == pytest.approx(0.001)
    assert lookup_wait(Options(), 100, 1e6) == 0.0005 and lookup_wait(Options(), 10**6, 1e3) == 0.02
