# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine without a reset of the connector: no stale hits, and nothing is saved under
the old name."""

import pytest
from segmented_engines import Segmented
from test_vllm_resets import OTHER_WEIGHTS, of_segments
from tiny_engines import Child, connector, count, prompt, same, saved

import ashlar.vllm.reloads

BACK = OTHER_WEIGHTS  # flipping twice gives the first weights
IN_PLACE = "llm.apply_model(lambda model: [each.data.mul_(1.01) for each in model.parameters()])"
LOADED = "llm.apply_model(lambda model: model.load_weights([]))"
KEPT = "server.connector()._scheduler._names.generation"


def changed(child, text, change=OTHER_WEIGHTS):
    """Answers with other weights. vLLM's own cache is emptied without notifying the connector."""
    child.call("execute", change)
    assert child.call("evaluate", "llm.reset_prefix_cache()")
    return child.generate([text])


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])
def test_a_change_without_a_reset_is_detected(model, shared_daemon, engine, expected):
    text, later = prompt(f"reload {model}", 900), prompt(f"reload later {model}", 900)
    with Child(model, connector(shared_daemon)) as child:
        same(child.generate([text]), expected(model, [text]))
        child.call("erase")
        child.generate([text])
        before = saved(child)
        assert before > 0
        answer = changed(child, text)
        assert answer[0][1] != expected(model, [text])[0][1], "the weights are other ones"
        assert saved(child) == before, "no stale hit"
        fresh = child.generate([later])
        child.call("erase")
        same(child.generate([text]), [each[:2] for each in answer])
        child.call("erase")
        same(child.generate([later]), [each[:2] for each in fresh])
        assert saved(child) > before, "what was stored afterwards is found by this engine"
        child.call("execute", BACK)
        child.call("erase")
        same(child.generate([text]), expected(model, [text]))
    other = engine(model)
    other.call("erase")
    count = saved(other)
    same(other.generate([later]), expected(model, [later]))
    assert saved(other) == count, "nothing of other weights is found by the checkpoint's name"


def test_earlier_blocks_of_the_engines_own_cache_are_not_resumed(shared_daemon, expected):
    text = prompt("reload and nothing", 600)
    longer = text + prompt("reload and nothing more", 300)
    with Child("qwen3", connector(shared_daemon)) as child:
        child.generate([text])
        child.call("execute", OTHER_WEIGHTS)
        child.generate([prompt("seen by this one", 300)])  # vLLM is not told, and there is no reset
        answer = child.generate([longer])
        assert answer[0][2] == 0, "neither vLLM's blocks of former weights nor Ashlar's"
        child.call("erase")
        same(child.generate([longer]), [each[:2] for each in answer])


@pytest.mark.parametrize("change", [IN_PLACE, LOADED])
def test_each_kind_of_change_begins_one_generation(change, shared_daemon):
    with Child("qwen3", connector(shared_daemon)) as child:
        child.generate([prompt("ways 0", 300)])
        assert child.call("evaluate", KEPT) == ""
        child.call("execute", change)
        child.generate([prompt("ways 1", 300)])
        first = child.call("evaluate", KEPT)
        assert first
        child.generate([prompt("ways 2", 300), prompt("ways 3", 900)])
        assert child.call("evaluate", KEPT) == first


def test_an_announced_reset_begins_only_one_generation(shared_daemon):
    with Child("qwen3", connector(shared_daemon)) as child:
        child.generate([prompt("told 0", 300)])
        child.call("execute", OTHER_WEIGHTS)
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        told = child.call("evaluate", KEPT)
        child.generate([prompt("told 1", 300)])
        assert child.call("evaluate", KEPT) == told


def test_all_ranks_change_together(shared_daemon):
    text = prompt("ranks reload", 600)
    ranks = dict(tensor_parallel_size=2, worker_extension_cls="tiny_engines.Watched")
    with Child("qwen3", connector(shared_daemon), **ranks) as child:
        child.generate([text])
        child.call("erase")
        child.generate([text])
        before = saved(child)
        assert before > 0
        answer = changed(child, text, "llm.collective_rpc('flip_weights')")
        assert saved(child) == before
        for _ in range(2):  # the first load failed, and the text was not saved
            child.call("erase")
            same(child.generate([text]), [each[:2] for each in answer])
        assert saved(child) > before


def test_segments_are_dropped_when_weights_change(shared_daemon):
    parts, query = [prompt(f"reload segments {i}", 100) for i in range(3)], prompt("reload query", 20)
    with Segmented("qwen3_5", of_segments(shared_daemon)) as child:
        child.publish(parts)
        child.probe("begin_to_land", "over", sum(parts, []) + query, [100] * 3)
        child.call("execute", OTHER_WEIGHTS)
        child.probe("go_on")
        assert child.call("evaluate", KEPT)
        assert count(child, "jumps") == 0


def test_a_model_that_cannot_be_watched_is_not_cached(shared_daemon, expected, monkeypatch):
    def broken(*_):
        raise RuntimeError("as a test wants it")

    monkeypatch.setattr(ashlar.vllm.reloads, "EngineWeights", broken)
    text = prompt("unwatched", 300)
    with Child("qwen3", connector(shared_daemon)) as child:
        for _ in range(2):
            child.call("erase")
            same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 0
