# SPDX-License-Identifier: Apache-2.0
"""Pages by groups of layers, prompts that are only stored, and prefill handoffs without a cluster."""

import asyncio

import numpy as np
import pytest

import ashlar

DIM, HEADS, LINEAR, WIDE, NARROW = 8, 2, 0, 1, 2
MODEL = ashlar.Model(
    model_id="groups-python",
    weights_digest="1",
    page_tokens=16,
    head=4,
    tail=4,
    layers=[
        ashlar.Linear(ashlar.Family.RETNET, HEADS, HEADS, DIM, DIM, decay_table=[-0.3, -0.01]),
        ashlar.Attention(HEADS, DIM, DIM),
        ashlar.Attention(1, 4, DIM),
    ],
)
APART = {"groups": [ashlar.LayerGroup([WIDE]), ashlar.LayerGroup([NARROW], page_tokens=8, pages=160)]}
COMMON = {"groups": [ashlar.LayerGroup([WIDE]), ashlar.LayerGroup([NARROW], page_tokens=8)], "common_pages": True}
LENGTHS = [50, 91, 70]
TOKENS = np.arange(1, sum(LENGTHS) + 10, dtype=np.int32)


class Engine:
    """Keys and values of a token are its number, in both layers."""

    def __init__(self, daemon, **grouping):
        self.cache = ashlar.Cache(
            MODEL, daemon.rpc_socket, daemon.session_socket, pages=128, capture_tokens=16, **grouping
        )
        self.grouped = bool(grouping)
        self.rows = {layer: self.cache.page_rows(layer) for layer in (WIDE, NARROW)}

    def tables(self, first, tokens):
        """Returns pages for this number of tokens from `first`, in one table or one per group. No page is in two
        groups."""
        wide, narrow = -(-tokens // 16), -(-tokens // 8)
        if not self.grouped:
            return np.arange(first, first + wide)
        return [np.arange(first, first + wide), np.arange(first + wide, first + wide + narrow)[::-1]]

    def slots(self, layer, table, count):
        """Keys and values of positions [0, count)."""
        pages = table if not self.grouped else table[layer - WIDE]
        keys, values = self.rows[layer]
        size = keys.shape[1]
        at = np.repeat(np.asarray(pages), size)[:count], np.tile(np.arange(size), len(pages))[:count]
        return (keys, at), (values, at)

    def fill(self, table, tokens):
        for layer in (WIDE, NARROW):
            for rows, at in self.slots(layer, table, len(tokens)):
                rows[at] = np.asarray(tokens, np.float32)[:, None, None] + layer

    def expect(self, table, begin, end):
        for layer in (WIDE, NARROW):
            for rows, at in self.slots(layer, table, end):
                expected = np.broadcast_to(TOKENS[begin:end, None, None] + np.float32(layer), rows[at][begin:].shape)
                np.testing.assert_array_equal(rows[at][begin:], expected)

    def publish(self, request):
        for i, run in enumerate(request.missing):
            table = self.tables(40, len(run.tokens))
            self.fill(table, run.tokens)
            state = np.full((HEADS, DIM, DIM), run.tokens[0], np.float32)
            tensors = ashlar.LinearTensors(LINEAR, state, transition=np.full(HEADS, -0.5, np.float32))
            assert request.publish(i, [tensors], table) == "published"


@pytest.mark.parametrize("grouping", [APART, COMMON], ids=["apart", "common"])
def test_segments_and_prefixes_are_shared_between_groupings(daemon, grouping):
    grouped, one = Engine(daemon, **grouping), Engine(daemon)
    with pytest.raises(ValueError, match=r"^page_table: 1 tables; the cache has 2 groups"):
        grouped.cache.begin(TOKENS, LENGTHS, [np.arange(30)])
    with pytest.raises(ValueError, match=r"page_table\[1\]: not a list of integers"):
        grouped.cache.begin(TOKENS, LENGTHS, [np.arange(30), np.zeros((2, 2), np.int32)])
    with pytest.raises(ValueError, match="page_table: expected one list of integers for each group"):
        grouped.cache.begin(TOKENS, LENGTHS, 7)
    with grouped.cache.begin(TOKENS, LENGTHS, grouped.tables(0, len(TOKENS)), fill=True, store_only=True) as request:
        assert len(request.missing) == 3
        grouped.publish(request)
    for engine in (one, grouped, Engine(daemon, **(COMMON if grouping is APART else APART))):
        table = engine.tables(80, len(TOKENS))
        with engine.cache.begin(TOKENS, LENGTHS, table) as request:
            assert all(segment.used for segment in request.plan.segments)
            assert request.finish() == ashlar.Verdict.OK
            engine.expect(table, 0, 50)
            engine.expect(table, 54, 137)
            engine.expect(table, 145, 207)
    assert grouped.cache.take_quiesced_pages(64) == [], "what was only stored had its pages all the time"
    wide, narrow = grouped.tables(0, len(TOKENS))
    grouped.cache.begin(TOKENS, LENGTHS, [wide, narrow]).end()
    back = grouped.cache.take_quiesced_pages(64, 20_000), grouped.cache.take_quiesced_pages(64, group=1)
    assert list(map(sorted, back)) == list(map(sorted, (wide, narrow) if grouping is APART else ([*wide, *narrow], [])))

    text = np.resize(TOKENS, 592)
    engine = Engine(daemon, **grouping)
    table = engine.tables(0, 600)
    engine.fill(table, text)
    state = ashlar.LinearTensors(LINEAR, np.ones((HEADS, DIM, DIM), np.float32))
    assert engine.cache.commit(text, [(592, [state])], page_table=table) == ["kept"]
    scheduler = ashlar.Cache(
        MODEL, daemon.rpc_socket, daemon.session_socket, memory_kind=ashlar.MemoryKind.NONE, capture_tokens=16
    )
    with scheduler.begin(np.append(text, 7)) as begun:
        with engine.cache.land(begun.plan_bytes(), engine.tables(0, 600)) as landed:
            assert landed.plan.prefix_tokens == 592
            assert landed.finish() == ashlar.Verdict.OK
        table = one.tables(64, 600)
        with one.cache.land(begun.plan_bytes(), table) as landed:
            assert landed.finish() == ashlar.Verdict.OK
            one.expect(table, 0, len(TOKENS))


def test_groups_that_make_no_sense_are_refused_by_name(daemon):
    for message, groups in {
        r"^groups\[1\].layers\[0\]: layer 1 is in groups\[0\]": [ashlar.LayerGroup([1]), ashlar.LayerGroup([1])],
        r"^groups\[0\].layers\[1\]: 0 is not an attention layer": [ashlar.LayerGroup([1, 0])],
        "^groups: attention layer 2 is in no group": [ashlar.LayerGroup([1])],
    }.items():
        with pytest.raises(ValueError, match=message):
            Engine(daemon, groups=groups)
    with pytest.raises(ValueError, match="^common_pages: requires groups"):
        Engine(daemon, common_pages=True)


def test_a_request_restarts_with_pages_of_other_groups(daemon):
    engine = Engine(daemon, **APART)
    with engine.cache.begin(TOKENS, LENGTHS, engine.tables(0, len(TOKENS)), fill=True) as request:
        engine.publish(request)
        table = engine.tables(80, len(TOKENS))
        with pytest.raises(ValueError, match="^page_table: 1 tables"):
            request.look_again(table[:1])
        assert request.look_again(table) == ashlar.Verdict.OK
        assert request.finish() == ashlar.Verdict.OK
        engine.expect(table, 0, 50)
        with pytest.raises(RuntimeError, match="^move: the request takes no pages, or already has them"):
            request.move(table)


def test_a_handoff_without_a_cluster_is_refused(daemon):
    with ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, pages=64, capture_tokens=16) as cache:
        assert cache.handoff(TOKENS, "node1") == "unavailable"
        assert asyncio.run(cache.handoff_async(TOKENS, "node1", wait_ms=10)) == "unavailable"
        with pytest.raises(ValueError, match="node: expected a name of 1 to"):
            cache.handoff(TOKENS, "")
        with pytest.raises(ValueError, match="conversation: .* bytes were given; expected 16"):
            cache.handoff(TOKENS, "node1", conversation=b"short")
    with ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, pages=64) as cache:
        with pytest.raises(RuntimeError, match="without capture_tokens"):
            cache.handoff(TOKENS, "node1")
