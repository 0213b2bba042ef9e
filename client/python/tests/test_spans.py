# SPDX-License-Identifier: Apache-2.0
"""Spans (KVBuffer §6): a prompt resumes after any of a text's last tokens, from rebuilt states."""

import numpy as np
import pytest

import ashlar

HEADS, DIM, CHANNELS, KERNEL, LINEAR, ATTENTION = 2, 64, 24, 4, 0, 1
DECAYS = (-0.3, -0.01)
MODEL = ashlar.Model(
    model_id="spans-python",
    weights_digest="1",
    page_tokens=16,
    head=4,
    tail=4,
    layers=[
        ashlar.Linear(
            ashlar.Family.RETNET, HEADS, HEADS, DIM, DIM, conv_channels=CHANNELS, conv_kernel=KERNEL, decay_table=DECAYS
        ),
        ashlar.Attention(1, 16, 16),
    ],
)
TABLE = np.arange(64, dtype=np.int32)
TOKENS, SPAN = 300, 12
RNG = np.random.default_rng(5)
TEXT = RNG.integers(0, 1000, TOKENS).astype(np.int32)
K, V = RNG.standard_normal((2, TOKENS, HEADS * DIM), dtype=np.float32)
CONV = RNG.standard_normal((TOKENS, CHANNELS), dtype=np.float32)


def states_after(tokens):
    """The recurrence S ← exp(decay) · S + kᵀ v, in float64."""
    state = np.zeros((HEADS, DIM, DIM))
    for t in range(tokens):
        for h in range(HEADS):
            head = slice(h * DIM, (h + 1) * DIM)
            state[h] = np.exp(DECAYS[h]) * state[h] + np.outer(K[t, head], V[t, head])
    return state.astype(np.float32)


def checkpoint(tokens):
    return tokens, [ashlar.LinearTensors(LINEAR, states_after(tokens), conv_tail=CONV[tokens - KERNEL + 1 : tokens])]


def rows(begin, **changed):
    given = {"k": K[begin:], "v": V[begin:], "conv_inputs": CONV[begin:], **changed}
    return begin, [ashlar.SpanRows(LINEAR, **given)]


def open_cache(daemon, **options):
    given = {"pages": 64, "capture_tokens": 1, "span_tokens": SPAN, **options}
    return ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, **given)


def commit(cache, span):
    return cache.commit(
        TEXT,
        [checkpoint(TOKENS - SPAN), checkpoint(TOKENS)],
        prompt_tokens=TOKENS - SPAN + 1,
        page_table=TABLE,
        span=span,
    )


@pytest.mark.parametrize("span_dtype, tolerance", [(ashlar.DType.F32, 1e-5), (ashlar.DType.F16, 1e-3)])
def test_a_prompt_resumes_inside_a_span(daemon, span_dtype, tolerance):
    with open_cache(daemon, span_dtype=span_dtype) as cache:
        assert commit(cache, rows(TOKENS - SPAN)) == ["kept", "kept_as_span"]
    with open_cache(daemon, span_dtype=span_dtype) as cache:
        shared = TOKENS - 5
        other = np.concatenate([TEXT[:shared], np.full(40, 7, np.int32)])
        with cache.begin(other, page_table=TABLE) as request:
            plan = request.plan
            assert (plan.prefix_tokens, plan.prefix_span_tokens) == (shared, SPAN - 5)
            # It stops before the last token, where the next span begins.
            assert plan.computed() == [(shared, len(other) - 1), (len(other) - 1, len(other))]
            state = np.zeros((HEADS, DIM, DIM), np.float32)
            assert request.advance(LINEAR, 0, shared, state) == ashlar.Verdict.OK
            tail = request.conv_tail(0, LINEAR)
            assert request.wait_layer(ATTENTION) == ashlar.Verdict.OK
            assert request.finish() == ashlar.Verdict.OK
        expected = states_after(shared)
        assert np.linalg.norm(state - expected) <= tolerance * np.linalg.norm(expected)
        np.testing.assert_array_equal(
            np.frombuffer(tail, np.float32).reshape(KERNEL - 1, CHANNELS), CONV[shared - KERNEL + 1 : shared]
        )


def test_without_a_span_the_states_are_kept(daemon):
    with open_cache(daemon) as cache:
        assert commit(cache, None) == ["kept", "kept"]


@pytest.mark.parametrize(
    "span, error, message",
    [
        (3, TypeError, "span: "),
        ((TOKENS - SPAN,), ValueError, "span: expected a pair"),
        ((0, []), ValueError, "span.begin: 0 is out of range"),
        ((TOKENS, []), ValueError, "span.begin: 300 is out of range"),
        (rows(TOKENS - SPAN - 1), ValueError, "span.begin: 13 tokens; the cache was opened with span_tokens 12"),
        ((TOKENS - SPAN, []), ValueError, "span.layers: empty"),
        ((TOKENS - SPAN, [3]), TypeError, r"span.layers\[0\]: .*ashlar.SpanRows"),
        (rows(TOKENS - SPAN, v=None), ValueError, r"span.layers\[0\].v: required"),
        (rows(TOKENS - SPAN, conv_inputs=None), ValueError, r"span.layers\[0\].conv_inputs: required"),
        (rows(TOKENS - SPAN, k=K[-3:]), ValueError, r"span.layers\[0\].k: 3 rows; expected .* 12 tokens"),
        (rows(TOKENS - SPAN, k=K[-SPAN:, :5]), ValueError, r"span.layers\[0\].k: "),
        (rows(TOKENS - SPAN, k=K[-2 * SPAN :: 2]), ValueError, r"span.layers\[0\].k: the rows are not adjacent"),
        (rows(TOKENS - SPAN, k=K[-SPAN:].astype(np.float64)), TypeError, r"span.layers\[0\].k: .*float32"),
    ],
)
def test_an_invalid_span_is_refused_and_nothing_is_kept(daemon, span, error, message):
    with open_cache(daemon) as cache:
        with pytest.raises(error, match=message):
            commit(cache, span)
        with cache.begin(TEXT, page_table=TABLE) as request:
            assert request.plan.prefix_tokens == 0


def test_a_cache_refuses_spans_that_are_too_long(daemon):
    with pytest.raises(ValueError, match="span_tokens: too large; expected at most 256"):
        open_cache(daemon, span_tokens=257)
