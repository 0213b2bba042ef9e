# SPDX-License-Identifier: Apache-2.0
"""Halves of the connector that cannot serve all: nothing is held, nothing is awaited, and what is left is served."""

import types

import pytest
from tiny_engines import BLOCK, PAIR, Child, connector, count, prompt, same

import ashlar.vllm.worker
from ashlar.vllm import model as described
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.options import Options


@pytest.mark.parametrize("model, error", zip(PAIR, [Unsupported("as of a GPU"), KeyError("model.layers.0.attn")]))
def test_a_worker_that_cannot_be_served_holds_no_blocks(model, error, shared_daemon, engine, expected, monkeypatch):
    texts = [prompt(f"refused {model} {i}", 2 * BLOCK[model] + 20) for i in range(3)]
    engine(model).generate(texts[:1])  # what a scheduler that goes on would find

    def places(*_):
        raise error

    monkeypatch.setattr(ashlar.vllm.worker, "places", places)
    room = dict(num_gpu_blocks_override=64, max_model_len=3 * BLOCK[model])
    with Child(model, connector(shared_daemon), **room) as child:
        for _ in range(2):
            for text in texts:
                same(child.generate([text]), expected(model, [text]))
        child.call("erase")
        assert child.call("free_blocks") == 63, "all but the null block"
        assert count(child, "stores", "kept") == 0 and count(child, "hits", "dram", "keys") == 0
        before = child.call("metrics")
        child.generate([prompt(f"refused {model} later", 2 * BLOCK[model] + 20)])
        assert child.call("metrics") == before, "the scheduler has stopped asking"


@pytest.mark.parametrize(
    "settings, failures", [(dict(tensor_parallel_size=2), 0), ({}, 1)], ids=["by their layout", "by the engine's model"]
)
def test_where_no_prompt_can_be_set_declared_segments_are_a_prompt_like_any_other(
    settings, failures, shared_daemon, monkeypatch, model="qwen3_5"
):
    def rope(self):
        raise Unsupported("segments: the model has no rotary embedding")

    if not settings:
        monkeypatch.setattr(EngineModel, "rope", rope)

    def ask(name):
        whole = prompt(f"unset {model} {name}", 2 * BLOCK[model] + 20)
        child.call("erase")
        return child.call("evaluate", f"__import__('segment_probe').ask_and_hear(server, {whole!r}, [300] * 2)")

    with Child(model, connector(shared_daemon, segments=True), **settings) as child:
        if failures:
            (*_, cached), _ = ask("the first")  # ends with the worker's word
            assert cached == 0
        first, heard = ask(str(settings))
        again, heard_again = ask(str(settings))
        assert first[2] == 0 and again[2] == 2 * BLOCK[model], "kept as exact, and found"
        same([again], [first[:2]])
        assert count(child, "load_failures") == failures and heard == heard_again == [], "said once, at the start"


def test_layers_of_a_draft_model_are_refused(monkeypatch):
    """vLLM 0.33 marks them in their specs."""
    monkeypatch.setattr(described, "_check", lambda config: None)
    parallel = types.SimpleNamespace(tensor_parallel_size=1)
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_text_config=None), parallel_config=parallel)
    group = types.SimpleNamespace(layer_names=["draft.0.attn"], kv_cache_spec=types.SimpleNamespace(is_draft=True))
    with pytest.raises(Unsupported, match="draft.0.attn: layers of a draft model are not supported"):
        described.describe(config, types.SimpleNamespace(kv_cache_groups=[group]), Options(), 0)
