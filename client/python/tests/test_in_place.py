# SPDX-License-Identifier: Apache-2.0
"""Segments and prefixes shared in place, and media with rotary shifts."""

import time

import numpy as np
import pytest

import ashlar

DIM, HEADS, LINEAR, ATTENTION, PAGE_TOKENS, PAGES = 8, 2, 0, 1, 16, 64
MODEL = ashlar.Model(
    model_id="in-place-python",
    weights_digest="1",
    page_tokens=PAGE_TOKENS,
    head=4,
    tail=4,
    layers=[
        ashlar.Linear(ashlar.Family.RETNET, HEADS, HEADS, DIM, DIM, decay_table=[-0.3, -0.01]),
        ashlar.Attention(HEADS, DIM, DIM),
    ],
)
LENGTHS = [50, 91, 41]
TOKENS = np.arange(1, sum(LENGTHS) + 10, dtype=np.int32)


def opened(daemon, **options):
    return ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, pages=PAGES, **options)


def write(rows, pages, tokens):
    """The keys and values of a token are its number."""
    slots = np.arange(len(tokens))
    for each in rows:
        each[np.asarray(pages)[slots // PAGE_TOKENS], slots % PAGE_TOKENS] = np.asarray(tokens, np.float32)[
            :, None, None
        ]


def publish(cache, request, pages):
    rows = cache.page_rows(ATTENTION)
    for i, run in enumerate(request.missing):
        write(rows, pages, run.tokens)
        state = np.full((HEADS, DIM, DIM), run.tokens[0], np.float32)
        transition = np.full(HEADS, -0.5, np.float32) if run.transition else None
        tensors = [ashlar.LinearTensors(LINEAR, state, transition=transition)]
        assert request.publish(i, tensors, pages) == "published"


def fill(cache):
    with cache.begin(TOKENS, LENGTHS, fill=True) as request:
        assert request.admit(8) is None
        publish(cache, request, request.own_pages)
        assert request.look_again() == ashlar.Verdict.OK
        assert request.finish() == ashlar.Verdict.OK


def expect_shared(cache, request, segment, start):
    keys, values = cache.page_rows(ATTENTION)
    place = request.shared_segments[segment]
    tokens = np.arange(place.first_token, place.end_token)
    slots = place.first_slot + tokens
    pages = np.asarray(place.pages)[slots // PAGE_TOKENS]
    for rows in (keys, values):
        assert np.all(rows[pages, slots % PAGE_TOKENS] == TOKENS[start + tokens].astype(np.float32)[:, None, None])


def test_requests_read_one_copy_of_each_segment(daemon):
    cache = opened(daemon, share_in_place=True)
    fill(cache)
    request = cache.begin(TOKENS, LENGTHS)
    assert request.admit(8) is None
    segment = request.shared_segments[1]
    with cache.begin(TOKENS, LENGTHS) as other:
        assert other.admit(8) is None
        assert other.shared_segments[1] == segment
        assert not set(other.own_pages) & set(request.own_pages)
        assert other.wait_layer(ATTENTION) == ashlar.Verdict.OK
        assert other.finish() == ashlar.Verdict.OK
    assert request.finish() == ashlar.Verdict.OK
    for i, start in enumerate(np.cumsum([0, *LENGTHS])[:-1]):
        expect_shared(cache, request, i, start)
    request.end()
    cache.close()


def test_requests_read_one_copy_of_a_prefix(daemon):
    text = np.arange(600, dtype=np.int32)
    with opened(daemon, share_in_place=True, capture_tokens=16) as cache:
        rows = cache.page_rows(ATTENTION)
        with cache.begin(text) as request:
            assert request.admit(38) is None
            write(rows, request.own_pages, text)
            assert request.finish() == ashlar.Verdict.OK
            states = [ashlar.LinearTensors(LINEAR, np.ones((HEADS, DIM, DIM), np.float32))]
            outcomes = cache.commit(text, [(600, states)], request=request, page_table=request.own_pages)
            assert outcomes == ["kept"]
        prompt, tables = np.append(text, text[:3]), []
        requests = [cache.begin(prompt) for _ in range(2)]
        for request in requests:
            assert (request.plan.prefix_tokens, request.plan.shared_prefix_tokens) == (600, 512)
            deadline = time.monotonic() + 60
            while request.admit(6) is not None:  # the pages of the ended request return in the background
                assert time.monotonic() < deadline
                time.sleep(0.01)
            tables.append(request.shared_prefix_pages + request.own_pages)
        assert tables[0][:32] == tables[1][:32]
        assert len({*tables[0], *tables[1]}) == 32 + 2 * 6  # two copies would not fit: they have 2 * 38 pages
        for request, table in zip(requests, tables, strict=True):
            assert request.wait_layer(ATTENTION) == ashlar.Verdict.OK
            assert request.finish() == ashlar.Verdict.OK
            slots = np.arange(600)
            for each in rows:
                got = each[np.asarray(table)[slots // PAGE_TOKENS], slots % PAGE_TOKENS]
                assert np.all(got == text.astype(np.float32)[:, None, None])
            request.end()


def test_a_shortage_reports_page_counts(daemon):
    with opened(daemon, share_in_place=True) as cache, cache.begin(TOKENS, LENGTHS) as request:
        shortage = request.admit(PAGES + 1)
        assert isinstance(shortage, ashlar.PageShortage)
        assert shortage.free + shortage.reclaimable + shortage.held == PAGES
        assert shortage.needed > shortage.free
        assert request.own_pages == []
        assert request.shared_segments == []
        assert request.admit(2) is None
        assert len(request.own_pages) == 2
        assert request.admit(3) is None
        assert len(request.own_pages) == 3


def test_refusals_name_the_argument(daemon):
    with opened(daemon, share_in_place=True) as cache:
        with pytest.raises(ValueError, match="^page_table: the daemon allocates the pages of this cache; call admit"):
            cache.begin(TOKENS, LENGTHS, np.arange(12))
        with pytest.raises(ValueError, match="^rotary_shifts: not allowed with"):
            cache.begin(TOKENS, LENGTHS, rotary_shifts=[0, 1, 1])
    with opened(daemon) as cache:
        with pytest.raises(RuntimeError, match="^share_in_place: the cache was opened without it"):
            cache.begin(TOKENS, LENGTHS).admit(1)
        with pytest.raises(ValueError, match=r"^rotary_shifts: 2; expected one per segment, 3"):
            cache.begin(TOKENS, LENGTHS, rotary_shifts=[0, 1])
        with pytest.raises(ValueError, match=r"^rotary_shifts\[0\]: 1; expected 0"):
            cache.begin(TOKENS, LENGTHS, rotary_shifts=[1, 1, 1])
        with pytest.raises(ValueError, match=r"^rotary_shifts\[1\]: -51 is out of range; expected at least -50"):
            cache.begin(TOKENS, LENGTHS, rotary_shifts=[0, -51, 0])
