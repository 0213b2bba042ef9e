"""A worker that cannot reach the engine's caches, beside a scheduler that could: nothing is held, and nothing is awaited."""

import pytest
from tiny_engines import BLOCK, PAIR, Child, connector, count, prompt, same

import ashlar.vllm.worker
from ashlar.vllm.model import Unsupported


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
        child.call("forget")
        assert child.call("free_blocks") == 63, "all but the null block"
        assert count(child, "saves", "kept") == 0 and count(child, "hits", "dram", "keys") == 0
        before = child.call("metrics")
        child.generate([prompt(f"refused {model} later", 2 * BLOCK[model] + 20)])
        assert child.call("metrics") == before, "the scheduler has stopped asking"
