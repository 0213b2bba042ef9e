# SPDX-License-Identifier: Apache-2.0
"""Halves of the connector that can only load or only save: nothing is held or awaited for the other direction, and the
supported one works."""

import pytest
from tiny_engines import BLOCK, PAIR, Child, connector, count, prompt, same

import ashlar.vllm.caches
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.identity import Unsupported


@pytest.mark.parametrize("model, error", zip(PAIR, [Unsupported("as of a GPU"), KeyError("model.layers.0.attn")]))
def test_a_worker_that_cannot_be_served_holds_no_blocks(model, error, shared_daemon, engine, expected, monkeypatch):
    texts = [prompt(f"refused {model} {i}", 2 * BLOCK[model] + 20) for i in range(3)]
    engine(model).generate(texts[:1])  # the texts that a continuing scheduler would find

    def places(*_):
        raise error

    monkeypatch.setattr(ashlar.vllm.caches, "places", places)
    limits = dict(num_gpu_blocks_override=64, max_model_len=3 * BLOCK[model])
    with Child(model, connector(shared_daemon), **limits) as child:
        for _ in range(2):
            for text in texts:
                same(child.generate([text]), expected(model, [text]))
        child.call("erase")
        assert child.call("free_blocks") == 63, "all but the null block"
        assert count(child, "stores", "kept") == 0 and count(child, "hits", "dram", "keys") == 0
        before = child.call("metrics")
        child.generate([prompt(f"refused {model} later", 2 * BLOCK[model] + 20)])
        assert child.call("metrics") == before, "the scheduler has stopped asking"


def test_declared_segments_are_ignored_if_unsupported(shared_daemon, monkeypatch, model="qwen3_5"):
    def ropes(self, described):
        raise Unsupported("segments: the model has no rotary embedding")

    monkeypatch.setattr(EngineModel, "ropes", ropes)

    def ask(name):
        whole = prompt(f"unset {model} {name}", 2 * BLOCK[model] + 20)
        child.call("erase")
        return child.call("evaluate", f"__import__('segment_probe').ask_and_hear(server, {whole!r}, [300] * 2)")

    with Child(model, connector(shared_daemon, segments=True)) as child:
        first, heard = ask("one")
        again, heard_again = ask("one")
        assert first[2] == 0 and again[2] == 2 * BLOCK[model], "kept as exact, and found"
        same([again], [first[:2]])
        assert count(child, "load_failures") == 0 and heard == heard_again == [], "said once, at the start"
