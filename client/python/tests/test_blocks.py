# SPDX-License-Identifier: Apache-2.0
"""Features for real engines: states in an engine's own blocks, rows that the library normalises, decays, unresolved
pages."""

import warnings

import numpy as np
import pytest

import ashlar

HEADS, DIM, CHANNELS, KERNEL = 2, 16, 96, 4
TEXT, PAGES = 300, 64


def model(family=ashlar.Family.GDN, order=ashlar.TailOrder.CHANNEL_FIRST, dtype=ashlar.DType.F32):
    linear = ashlar.Linear(
        family,
        HEADS,
        HEADS,
        DIM,
        DIM,
        conv_channels=CHANNELS,
        conv_kernel=KERNEL,
        conv_dtype=ashlar.DType.F16,
        conv_order=order,
        state_dtype=dtype,
    )
    return ashlar.Model(
        model_id="blocks",
        weights_digest=str(order),
        page_tokens=16,
        head=4,
        tail=4,
        layers=[linear, ashlar.Attention(1, 8, 8)],
    )


def open_cache(daemon, described, **options):
    return ashlar.Cache(described, daemon.rpc_socket, daemon.session_socket, pages=PAGES, **options)


@pytest.fixture
def random():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


def rows(random, count=TEXT):
    q, k, v = (random.standard_normal((count, HEADS, DIM), np.float32) for _ in range(3))
    g = -random.random((count, HEADS), np.float32) / 50
    return dict(q=q, k=k, v=v, g=g, beta=random.random((count, HEADS), np.float32))


def normalised(given, epsilon, scale):
    norm = lambda x: x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + epsilon)
    return {**given, "q": (norm(given["q"]) * scale).astype(np.float32), "k": norm(given["k"]).astype(np.float32)}


@pytest.mark.parametrize("order", list(ashlar.TailOrder))
def test_states_and_tails_use_strided_blocks(daemon, random, order):
    described = model(order=order)
    tokens = random.integers(0, 1000, TEXT).astype(np.int32)
    # A block of an engine, with padding between heads.
    blocks = random.standard_normal((5, HEADS, DIM * DIM + 24), np.float32)
    states = blocks[3, :, 8 : 8 + DIM * DIM]
    grid = (KERNEL - 1, CHANNELS) if order is ashlar.TailOrder.TOKEN_FIRST else (CHANNELS, KERNEL - 1)
    tails = random.standard_normal((grid[0], grid[1] + 7)).astype(np.float16)[:, : grid[1]]
    assert not states.flags.c_contiguous and not tails.flags.c_contiguous
    with open_cache(daemon, described, capture_tokens=16) as cache:
        assert cache.commit(
            tokens, [(TEXT, [ashlar.LinearTensors(0, states, tails)])], page_table=np.arange(PAGES)
        ) == ["kept"]
    with open_cache(daemon, described, capture_tokens=16) as cache:
        with cache.begin(np.append(tokens, 1), page_table=np.arange(PAGES)) as request:
            assert request.plan.prefix_tokens == TEXT
            landed = np.full((2, HEADS, DIM * DIM + 5), 7, np.float32)
            assert request.advance(0, 0, TEXT, landed[1, :, : DIM * DIM]) == ashlar.Verdict.OK
            np.testing.assert_array_equal(landed[1, :, : DIM * DIM], states)
            assert (landed[0] == 7).all() and (landed[1, :, DIM * DIM :] == 7).all(), "nothing beside it is written"
            assert request.conv_tail(0, 0) == np.ascontiguousarray(tails).tobytes()
            assert request.finish() == ashlar.Verdict.OK


def test_rows_are_normalised_and_scaled_on_request(daemon, random):
    given, epsilon, scale = rows(random), 1e-6, DIM**-0.5
    with open_cache(daemon, model()) as cache:
        results = []
        for inputs, flags in (
            (given, dict(norm_epsilon=epsilon, q_scale=scale)),
            (normalised(given, epsilon, scale), {}),
        ):
            with cache.begin(np.zeros(TEXT, np.int32), page_table=np.arange(PAGES)) as request:
                state, out = np.zeros((HEADS, DIM, DIM), np.float32), np.zeros((TEXT, HEADS, DIM), np.float32)
                assert request.advance(0, 0, TEXT, state, out=out, **inputs, **flags) == ashlar.Verdict.OK
                assert request.finish() == ashlar.Verdict.OK
                results.append((state, out))
        for mine, theirs in zip(*results):
            assert np.abs(mine - theirs).max() <= 1e-5 * np.abs(theirs).max()
        with cache.begin(np.zeros(4, np.int32), page_table=np.arange(PAGES)) as request:
            for name in ("norm_epsilon", "q_scale"):
                with pytest.raises(ValueError, match=name):
                    four = {key: value[:4] for key, value in given.items()}
                    request.advance(0, 0, 4, np.zeros((HEADS, DIM, DIM), np.float32), **four, **{name: float("nan")})


def test_decays_of_a_run_come_with_its_tuple_and_blocks_compose_in_either_place(daemon, random):
    given, tokens = rows(random), random.integers(0, 1000, 2 * TEXT + 1).astype(np.int32)
    pages, flags = np.arange(PAGES, dtype=np.int32), dict(norm_epsilon=1e-6, q_scale=0.25)
    with open_cache(daemon, model()) as cache, cache.begin(tokens, [TEXT, TEXT], pages, fill=True) as request:
        ((at, run),) = [(i, run) for i, run in enumerate(request.missing) if run.transition]
        state, transition = np.zeros((HEADS, DIM, DIM), np.float32), np.zeros((HEADS, DIM, DIM), np.float32)
        decay = np.zeros((HEADS, DIM), np.float32)
        for wrong in (
            {"transition": transition.transpose(0, 2, 1)},
            {"transition": transition, "decay": decay[:, ::-1]},
        ):
            with pytest.raises(ValueError, match=f"^{list(wrong)[-1]}: not dense"):
                cache.compute_alone(request, at, 0, state, **wrong, **given, **flags)
        assert not transition.any() and not decay.any()
        cache.compute_alone(request, at, 0, state, transition=transition, decay=decay, **given, **flags)
        exact = np.exp(given["g"][run.capture_begin : run.capture_end].astype(np.float64).sum(0))
        np.testing.assert_allclose(decay, np.repeat(exact[:, None], DIM, 1), rtol=1e-6)
        padded = np.zeros((HEADS, DIM * DIM + 3), np.float32)
        padded[:, : DIM * DIM] = state.reshape(HEADS, -1)
        tail = np.zeros((CHANNELS, KERNEL - 1), np.float16)
        tensors = ashlar.LinearTensors(0, padded[:, : DIM * DIM], tail, transition, decay)
        assert request.publish(at, [tensors], pages) == "published"
    states, start = [], random.standard_normal((HEADS, DIM * DIM), np.float32)
    for in_daemon in (False, True):
        with open_cache(daemon, model(), compose_in_daemon=in_daemon) as cache:
            with cache.begin(tokens, [TEXT, TEXT], pages) as request:
                kinds = [step.kind for step in request.plan.steps]
                assert ashlar.StepKind.INTERIOR in kinds
                count = sum(end - begin for begin, end in request.plan.computed())
                inputs = {name: np.concatenate([value] * 3)[:count] for name, value in given.items()}
                block = np.full((HEADS, DIM * DIM + 9), 5, np.float32)
                block[:, : DIM * DIM] = start
                verdict = request.advance(0, 0, 2 * TEXT + 1, block[:, : DIM * DIM], **inputs, **flags)
                assert verdict == ashlar.Verdict.OK and request.finish() == ashlar.Verdict.OK
                assert (block[:, DIM * DIM :] == 5).all()
                states.append(block[:, : DIM * DIM].copy())
    assert np.abs(states[0] - states[1]).max() <= 1e-5 * np.abs(states[0]).max()


def test_tuples_of_16_bits_are_computed_and_read_back(daemon, random):
    """The same run as in float32: states within the 11 bits of float16, in fewer bytes."""
    given, tokens = rows(random), random.integers(0, 1000, 2 * TEXT + 1).astype(np.int32)
    pages, flags = np.arange(PAGES, dtype=np.int32), dict(norm_epsilon=1e-6, q_scale=0.25)
    square, tail, found = (HEADS, DIM, DIM), np.zeros((CHANNELS, KERNEL - 1), np.float16), []
    for dtype, stored in ((ashlar.DType.F32, np.float32), (ashlar.DType.F16, np.float16)):
        with open_cache(daemon, model(dtype=dtype), epsilon=3e-4) as cache:
            with cache.begin(tokens, [TEXT, TEXT], pages, fill=True) as request:
                ((at, run),) = [(i, run) for i, run in enumerate(request.missing) if run.transition]
                state, transition = np.zeros(square, stored), np.zeros(square, np.float32)
                exponents = np.zeros(HEADS, np.int32) if stored is np.float16 else None
                outputs = dict(transition=transition, exponents=exponents)
                cache.compute_alone(request, at, 0, state, **outputs, **given, **flags)
                assert request.publish(at, [ashlar.LinearTensors(0, state, tail, **outputs)], pages) == "published"
            with cache.begin(tokens, [TEXT, TEXT], pages) as request:
                (number,) = [i for i, step in enumerate(request.plan.steps) if step.kind is ashlar.StepKind.INTERIOR]
                assert request.wait_layer(0) == ashlar.Verdict.OK
                read = np.zeros(square, np.float32), np.zeros(square, np.float32)
                assert request.read_tuple(number, 0, *read)
                for wrong in (np.zeros(square, np.float16), np.zeros((HEADS, DIM), np.float32)):
                    with pytest.raises(ValueError, match="^transition: "):
                        request.read_tuple(number, 0, read[0], wrong)
                assert request.finish() == ashlar.Verdict.OK
            found.append((*read, cache.stored_segments()["bytes"]))
    (state, transition, size), (half, rounded, half_size) = found
    assert np.abs(state - half).max() <= 2**-11 * np.abs(state).max()
    assert np.abs(transition - rounded).max() <= 2**-11
    assert half_size < size


def test_blocks_that_make_no_sense_are_refused(daemon):
    wide = np.zeros((HEADS, DIM, 2 * DIM), np.float32)
    with (
        open_cache(daemon, model()) as cache,
        cache.begin(np.zeros(4, np.int32), page_table=np.arange(PAGES)) as request,
    ):
        with pytest.raises(ValueError, match="state: a head, or row, is not dense"):
            request.advance(0, 0, 0, wide[:, :, :DIM])
        with pytest.raises(ValueError, match="state: 1024 elements; expected 512"):
            request.advance(0, 0, 0, wide)
        for heads in (0, DIM * DIM - 4):  # all heads at one address, and heads that overlap
            state = np.lib.stride_tricks.as_strided(wide, (HEADS, DIM * DIM), (4 * heads, 4))
            with pytest.raises(ValueError, match="state: its rows overlap"):
                request.advance(0, 0, 0, state)


def committed(cache, **changed):
    given = {
        "state": np.zeros((HEADS, DIM, DIM), np.float32),
        "conv_tail": np.zeros((CHANNELS, KERNEL - 1), np.float16),
    }
    linear = [ashlar.LinearTensors(0, **{**given, **changed})]
    return cache.commit(np.arange(TEXT, dtype=np.int32), [(TEXT, linear)], page_table=np.arange(PAGES))


@pytest.mark.parametrize(
    ("part", "wrong", "why"),
    [
        ("state", np.zeros((HEADS, DIM, DIM), np.float64), "expected an array of float32, float16 or bfloat16"),
        ("state", np.zeros((HEADS, DIM, DIM), np.float16), "float16; expected float32"),
        ("state", [[0.0]], "list was given"),
        ("conv_tail", np.zeros((CHANNELS, KERNEL - 1), np.int16), "expected an array of float32"),
        ("conv_tail", np.zeros((CHANNELS, 2 * KERNEL), np.uint8)[:, : 2 * (KERNEL - 1)], "its bytes are not dense"),
        ("exponents", np.zeros(HEADS, np.int64), "int64; expected int32"),
        ("exponents", np.zeros(2 * HEADS, np.int32)[::2], "not dense"),
    ],
)
def test_states_of_another_type_are_refused_by_name(daemon, part, wrong, why):
    with open_cache(daemon, model(), capture_tokens=16) as cache:
        with pytest.raises((TypeError, ValueError), match=rf"^checkpoints\[0\].linear\[0\].{part}: {why}"):
            committed(cache, **{part: wrong})
        tail = np.zeros((CHANNELS, KERNEL - 1), np.float16).view(np.uint8)
        assert committed(cache, conv_tail=tail) == ["kept"], "nothing was kept before, and a tail may be its bytes"


def test_transitions_are_read_in_place_or_refused(daemon):
    tokens, square = np.arange(2 * TEXT + 1, dtype=np.int32), (HEADS, DIM, DIM)
    good = {
        "state": np.zeros(square, np.float32),
        "conv_tail": np.zeros((CHANNELS, KERNEL - 1), np.float16),
        "transition": np.zeros(square, np.float32),
        "decay": np.ones((HEADS, DIM), np.float32),
    }
    wrong = [
        ("transition", np.zeros(square, np.float64), "float64; expected float32"),
        ("transition", np.zeros(square, np.float32).transpose(0, 2, 1), "not dense"),  # a converted copy would be freed
        ("decay", np.ones((HEADS, DIM), np.float64), "float64; expected float32"),
        ("decay", np.ones((DIM, HEADS), np.float32).T, "not dense"),
    ]
    with open_cache(daemon, model()) as cache:
        with cache.begin(tokens, [TEXT, TEXT], np.arange(PAGES), fill=True) as request:
            (at,) = [i for i, run in enumerate(request.missing) if run.transition]
            for part, array, why in wrong:
                with pytest.raises(ValueError, match=rf"^linear\[0\].{part}: {why}"):
                    request.publish(at, [ashlar.LinearTensors(0, **{**good, part: array})], np.arange(PAGES))
            assert request.publish(at, [ashlar.LinearTensors(0, **good)], np.arange(PAGES)) == "published"


def test_an_epsilon_below_the_types_precision_causes_a_warning(daemon):
    with pytest.warns(UserWarning, match="epsilon: 1e-06 is below 0.00028"):
        open_cache(daemon, model(dtype=ashlar.DType.F16)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cache(daemon, model(dtype=ashlar.DType.F16), epsilon=3e-4).close()
        open_cache(daemon, model(dtype=ashlar.DType.F16), epsilon=0).close()
        open_cache(daemon, model()).close()
