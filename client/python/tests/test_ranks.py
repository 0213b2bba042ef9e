# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks: each publishes and lands its shards of segments."""

import dataclasses

import numpy as np
import pytest

import ashlar

HEADS, DIM, LINEAR, ATTENTION, RANKS = 2, 8, 0, 1, 2
LENGTHS = [50, 91]
TOKENS = np.arange(1, sum(LENGTHS) + 10, dtype=np.int32)
TABLE = np.arange(32, dtype=np.int32)


class Rank:
    """One rank of two, or the whole model. Pages hold the rows of k as keys, and their negatives as values."""

    def __init__(self, daemon, key_heads, number, size=RANKS, **options):
        layers = [
            ashlar.Linear(ashlar.Family.RETNET, key_heads, HEADS, DIM, DIM, decay_table=[-0.3, -0.01]),
            ashlar.Attention(key_heads, DIM, DIM),
        ]
        model = ashlar.Model("ranks-python", "1", layers, page_tokens=16, head=4, tail=4)
        model = dataclasses.replace(model, tensor_parallel_rank=number, tensor_parallel_size=size)
        self.cache = ashlar.Cache(model, daemon.rpc_socket, daemon.session_socket, **options)
        heads, keys = HEADS // size, max(1, key_heads // size)
        self.values_of = slice(number * heads, (number + 1) * heads)
        first = number * keys if key_heads >= size else 0  # ranks share the only key head
        self.keys_of = slice(first, first + keys)

    def rows(self, tokens, heads):
        every = np.sin(1.7 * np.asarray(tokens)[:, None, None] * (np.arange(HEADS * DIM).reshape(HEADS, DIM) + 3.0))
        return np.ascontiguousarray(every[:, heads], np.float32)

    def inputs(self, tokens):
        keys = self.rows(tokens, self.keys_of)
        return {"q": keys, "k": keys, "v": self.rows(tokens, self.values_of)}

    def pages(self):
        """Returns the keys and the values of the positions in TABLE: [positions, heads, dim]."""
        rows = self.cache.page_rows(ATTENTION)
        return [each[TABLE].reshape(-1, *each.shape[2:]) for each in rows]

    def set_pages(self, keys):
        """Values are the negative keys."""
        for each, sign in zip(self.cache.page_rows(ATTENTION), (1, -1)):
            assert each.shape[2:] == keys.shape[1:], "the heads of this rank"
            positions = np.arange(len(keys))
            each[TABLE[positions // 16], positions % 16] = sign * keys

    def state(self):
        heads = self.values_of.stop - self.values_of.start
        return np.zeros((heads, DIM, DIM), np.float32)

    def fill(self):
        """Publishes this rank's missing shards. Returns their segments."""
        with self.cache.begin(TOKENS, LENGTHS, fill=True, store_only=True) as request:
            missing = request.missing
            for number, run in enumerate(missing):
                state = self.state()
                transition, inputs = np.zeros(len(state), np.float32), self.inputs(run.tokens)
                self.cache.compute_alone(request, number, LINEAR, state, transition=transition, **inputs)
                self.set_pages(inputs["k"])
                tensors = [ashlar.LinearTensors(LINEAR, state, transition=transition)]
                assert request.publish(number, tensors, TABLE) == "published"
            return [run.segment for run in missing]

    def run(self, request):
        """Computes what the plan leaves, and returns the states at the prompt's end."""
        state = self.state()
        tokens = np.concatenate([TOKENS[begin:end] for begin, end in request.plan.computed()])
        assert request.advance(LINEAR, 0, len(TOKENS), state, **self.inputs(tokens)) == ashlar.Verdict.OK
        assert request.wait_layer(ATTENTION) == ashlar.Verdict.OK
        assert request.finish() == ashlar.Verdict.OK
        return state


@pytest.mark.parametrize("key_heads", [HEADS, 1])
def test_ranks_assemble_a_prompt_from_their_shards(daemon, key_heads):
    scheduler = Rank(daemon, key_heads, 0, memory_kind=ashlar.MemoryKind.NONE).cache
    ranks = [Rank(daemon, key_heads, number, pages=32) for number in range(RANKS)]

    def misses():
        with scheduler.begin(TOKENS, LENGTHS) as request:
            return [segment.miss for segment in request.plan.segments]

    assert misses() == ["never_seen"] * 2
    assert ranks[0].fill() == [0, 1]
    assert misses() == ["being_published"] * 2, "one shard of two"
    assert ranks[0].fill() == [] and ranks[1].fill() == [0, 1]

    whole = Rank(daemon, key_heads, 0, size=1, pages=32)
    with whole.cache.begin(TOKENS, page_table=TABLE) as request:
        expected = whole.run(request)
    with scheduler.begin(TOKENS, LENGTHS) as planned:
        assert [segment.miss for segment in planned.plan.segments] == [None, None]
        plan = planned.plan_bytes()
        for rank in ranks:
            keys = rank.inputs(TOKENS)["k"]
            rank.set_pages(np.zeros_like(keys))
            with rank.cache.land(plan, TABLE) as request:
                assert request.plan.computed() == [(50, 54), (137, 150)]
                np.testing.assert_allclose(rank.run(request), expected[rank.values_of], rtol=1e-4, atol=1e-4)
            landed = np.r_[0:50, 54:137]
            for rows, sign in zip(rank.pages(), (1, -1)):
                np.testing.assert_array_equal(rows[landed], sign * keys[landed])
                assert not rows[50:54].any() and not rows[137:150].any(), "the engine computes the rest"
    for cache in (scheduler, whole.cache, *(rank.cache for rank in ranks)):
        cache.close()
