# SPDX-License-Identifier: Apache-2.0
"""Opaque layers: bytes of tokens and states that are kept and landed as they are."""

import dataclasses

import numpy as np
import pytest

import ashlar

PAGE, TOKENS = 16, 600  # two whole blocks of 256 tokens, and a part of a block
OPAQUE = ashlar.Opaque(token_bytes=48, state_bytes=100_000)  # a state of several units, the last of which is shorter
LAYERS = [
    ashlar.Opaque(token_bytes=7),
    OPAQUE,
    ashlar.Attention(kv_heads=2, key_dim=8, value_dim=8),
    ashlar.Opaque(state_bytes=5),
]
MODEL = ashlar.Model("opaque", "digest", LAYERS, page_tokens=PAGE)
TEXT = np.arange(TOKENS, dtype=np.int32)


def opened(daemon, model=MODEL, **options):
    given = {"pages": 64, "capture_tokens": 1, **options}
    return ashlar.Cache(model, daemon.rpc_socket, daemon.session_socket, **given)


def fill(cache, seed):
    source = np.random.default_rng(seed)
    for layer in (0, 1):
        rows = cache.page_bytes(layer)
        rows[:] = source.integers(0, 256, rows.shape, np.uint8)
    states = {1: source.integers(0, 256, 100_000, np.uint8), 3: source.integers(0, 256, 5, np.uint8)}
    return states


def tensors(states):
    return [ashlar.LinearTensors(layer, state) for layer, state in states.items()]


def rows(cache, layer, table, tokens):
    return cache.page_bytes(layer)[table].reshape(len(table) * PAGE, -1)[:tokens]


def test_bytes_of_tokens_and_states_are_restored_in_another_engine(daemon):
    table, other_table = np.arange(40, dtype=np.int32), np.arange(50, 10, -1, dtype=np.int32)
    with opened(daemon) as cache:
        states = fill(cache, 1)
        assert cache.commit(TEXT, [(TOKENS, tensors(states))], prompt_tokens=TOKENS, page_table=table) == ["kept"]
        kept = {layer: rows(cache, layer, table, TOKENS).copy() for layer in (0, 1)}
    with opened(daemon) as cache, cache.begin(np.append(TEXT, 7), page_table=other_table) as request:
        assert request.plan.prefix_tokens == TOKENS and request.plan.exact
        for layer, state in states.items():
            found = np.zeros_like(state)
            assert request.advance(layer, 0, TOKENS, found) == ashlar.Verdict.OK
            assert np.array_equal(found, state)
        assert request.finish() == ashlar.Verdict.OK
        for layer, expected in kept.items():
            assert np.array_equal(rows(cache, layer, other_table, TOKENS), expected)


def test_a_model_with_only_states_needs_no_pages(daemon):
    model = dataclasses.replace(MODEL, layers=[LAYERS[3]])
    state = np.arange(5, dtype=np.uint8)
    with opened(daemon, model, pages=0, memory_kind=ashlar.MemoryKind.NONE) as cache:
        assert cache.commit(TEXT, [(TOKENS, tensors({0: state}))], prompt_tokens=TOKENS) == ["kept"]
        with cache.begin(np.append(TEXT, 7)) as request:
            found = np.zeros_like(state)
            assert request.advance(0, 0, TOKENS, found) == ashlar.Verdict.OK and np.array_equal(found, state)


def test_each_rank_has_its_part(daemon):
    table = np.arange(40, dtype=np.int32)
    shards = [
        dataclasses.replace(MODEL, layers=[OPAQUE], tensor_parallel_size=2, tensor_parallel_rank=i) for i in (0, 1)
    ]
    states = [np.full(50_000, i + 1, np.uint8) for i in (0, 1)]
    caches = [opened(daemon, shard) for shard in shards]
    for rank, (cache, state) in enumerate(zip(caches, states)):
        assert cache.page_bytes(0).shape == (64, PAGE, 24)
        cache.page_bytes(0)[:] = rank + 10
        offered = [(TOKENS, tensors({0: state}))]
        assert cache.commit(TEXT, offered, prompt_tokens=TOKENS, page_table=table) == ["kept"]
    for rank, cache in enumerate(caches):
        cache.page_bytes(0)[:] = 0
        with cache.begin(np.append(TEXT, 7), page_table=table) as request:
            found = np.zeros(50_000, np.uint8)
            assert request.advance(0, 0, TOKENS, found) == ashlar.Verdict.OK
            assert request.finish() == ashlar.Verdict.OK
            assert (found == rank + 1).all() and (rows(cache, 0, table, TOKENS) == rank + 10).all()
        cache.close()


def test_segments_are_refused_by_the_layer(daemon):
    with opened(daemon) as cache:
        with pytest.raises(ValueError, match=r"segments: layout.layers\[0\]: is opaque"):
            cache.begin(TEXT, [300])


def test_arguments_that_do_not_fit_are_refused_by_name(daemon):
    def with_layers(*layers, **rest):
        return opened(daemon, dataclasses.replace(MODEL, layers=list(layers), **rest))

    with pytest.raises(ValueError, match=r"model.layers\[0\].token_bytes: 0, and state_bytes is 0"):
        with_layers(ashlar.Opaque())
    with pytest.raises(ValueError, match=r"model.layers\[0\].token_bytes: .* larger than an extent"):
        with_layers(ashlar.Opaque(token_bytes=1 << 20))
    with pytest.raises(ValueError, match=r"layers\[0\].state_bytes: 5 is not divisible by 2"):
        with_layers(ashlar.Opaque(state_bytes=5), tensor_parallel_size=2)
    table = np.arange(40, dtype=np.int32)
    with opened(daemon) as cache:
        states = fill(cache, 2)

        def commit(given):
            return cache.commit(TEXT, [(TOKENS, given)], prompt_tokens=TOKENS, page_table=table)

        with pytest.raises(ValueError, match=r"linear\[0\].state: 4 bytes; expected 100000"):
            commit(tensors({1: np.zeros(4, np.uint8)}))
        with pytest.raises(ValueError, match="layer 3, which has a state, is missing"):
            commit(tensors({1: states[1]}))
        with pytest.raises(ValueError, match="layer: 2 is not an opaque layer"):
            cache.page_bytes(2)
        assert commit(tensors(states)) == ["kept"]
        with cache.begin(np.append(TEXT, 7), page_table=table) as request:
            with pytest.raises(ValueError, match=r"end: \[0, 300\); layer 3 is opaque"):
                request.advance(3, 0, 300, np.zeros(5, np.uint8))
            with pytest.raises(ValueError, match="layer: 0 is not a linear layer"):
                request.advance(0, 0, TOKENS, np.zeros(7, np.uint8))
            assert request.finish() == ashlar.Verdict.OK
