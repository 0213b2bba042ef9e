# SPDX-License-Identifier: Apache-2.0
"""Torch operations on segments, compared with the library's operations on the same tuples, by family."""

import numpy as np
import pytest
import torch

import ashlar
from ashlar.tensors import MATRIX, SCALAR, compose, joined, scaled_half

HEADS, D_K, D_V, TEXT, PAGE = 2, 8, 12, 96, 16


def linear(family, order, dtype=ashlar.DType.F32, d_k=D_K, d_v=D_V):
    counts = {ashlar.Family.MAMBA1: HEADS * d_k * d_v, ashlar.Family.LIGHTNING: HEADS, ashlar.Family.RETNET: HEADS}
    counts[ashlar.Family.MAMBA2] = HEADS
    table = [-0.01 - 0.001 * i for i in range(counts[family])] if family in counts else None
    return ashlar.Linear(family, HEADS, HEADS, d_k, d_v, state_dtype=dtype, order=order, decay_table=table)


def transition_of(layer, generator):
    shapes = {**dict.fromkeys(MATRIX, (HEADS, layer.d_k, layer.d_k)), **dict.fromkeys(SCALAR, (HEADS,))}
    shapes |= {ashlar.Family.GLA: (HEADS, layer.d_k), ashlar.Family.MAMBA1: (HEADS, layer.d_v)}
    numbers = torch.rand(shapes[layer.family], generator=generator)
    if layer.family in MATRIX:
        return torch.eye(layer.d_k) * 0.9 + 0.2 * (numbers - 0.5)
    return numbers * 5 if layer.family is ashlar.Family.MAMBA1 else -numbers / 2


def composed_by_the_library(daemon, layer, state, dtype, generator, sizes, make=transition_of, decay=None):
    """Publishes a tuple, and appends the stored bytes to `sizes`. Returns the tuple, and the tuple as it is read back;
    `state` becomes the state after the tuple."""
    attention, name = ashlar.Attention(2, 8, 4), f"{layer.family} {layer.order} {layer.state_dtype}"
    model = ashlar.Model("tensors", name, [layer, attention], PAGE, head=4, tail=4)
    pages, tokens = 2 * TEXT // PAGE + 1, np.arange(2 * TEXT + 1, dtype=np.int32)
    epsilon = 1e-6 if dtype is torch.float32 else 3e-4
    with ashlar.Cache(model, daemon.rpc_socket, daemon.session_socket, pages=2 * pages, epsilon=epsilon) as cache:
        source, target = np.arange(pages, dtype=np.int32), np.arange(pages, 2 * pages, dtype=np.int32)
        with cache.begin(tokens, [TEXT, TEXT], source, fill=True) as request:
            ((number, run),) = [(i, run) for i, run in enumerate(request.missing) if run.transition]
            transition, update = make(layer, generator), torch.randn(state.shape, generator=generator)
            stored, exponents = scaled_half(update) if dtype is torch.float16 else (update.to(dtype), None)
            tensors = ashlar.LinearTensors(0, stored, transition=transition, exponents=exponents, decay=decay)
            assert request.publish(number, [tensors], source) == "published"
            sizes.append(cache.stored_segments()["bytes"])
        with cache.begin(tokens, [TEXT, TEXT], target) as request:
            (step,) = [step for step in request.plan.steps if step.kind is ashlar.StepKind.INTERIOR]
            assert request.wait_layer(1) == ashlar.Verdict.OK
            assert request.advance(0, step.begin, step.end, state) == ashlar.Verdict.OK
            read = torch.full(state.shape, 7.0), torch.full(transition.shape, 7.0)
            assert request.read_tuple(request.plan.steps.index(step), 0, *read)
            assert request.finish() == ashlar.Verdict.OK
        return (transition, update), read[::-1]


@pytest.mark.parametrize("order", list(ashlar.StateOrder))
@pytest.mark.parametrize("family", list(ashlar.Family))
def test_a_tuple_composes_as_in_the_library(family, order, daemon):
    layer, generator = linear(family, order), torch.Generator().manual_seed(7)
    shape = (HEADS, D_K, D_V) if order is ashlar.StateOrder.KEY_FIRST else (HEADS, D_V, D_K)
    before = torch.randn(shape, generator=generator)
    wanted, found = before.clone(), before.clone()
    (transition, update), read = composed_by_the_library(daemon, layer, wanted, torch.float32, generator, [])
    assert torch.equal(read[1], update) and (read[0] - transition).abs().max() <= 1e-6
    compose(found, transition, update, layer)
    assert not torch.allclose(wanted, before + update, atol=1e-2), "the transition counts"
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("order", list(ashlar.StateOrder))
@pytest.mark.parametrize("family", list(ashlar.Family))
def test_a_joined_tuple_composes_like_its_parts_one_after_the_other(family, order):
    layer, generator = linear(family, order), torch.Generator().manual_seed(3)
    shape = (HEADS, D_K, D_V) if order is ashlar.StateOrder.KEY_FIRST else (HEADS, D_V, D_K)
    before, first, second = (torch.randn(shape, generator=generator) for _ in range(3))
    parts = [
        (update, transition_of(layer, generator), *([torch.rand(HEADS, D_K, generator=generator)] * (family in MATRIX)))
        for update in (first, second)
    ]
    wanted, found = before.clone(), before.clone()
    for update, transition, *_ in parts:
        compose(wanted, transition, update, layer)
    update, transition, *decay = joined(layer, *parts)
    compose(found, transition, update, layer)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert [each.tolist() for each in decay] == ([(parts[0][2] * parts[1][2]).tolist()] if family in MATRIX else [])
    assert torch.equal(parts[0][0], first), "the arguments are unchanged"


@pytest.mark.parametrize("family", list(ashlar.Family))
def test_states_of_16_bits_compose_to_the_last_bits(family, daemon):
    """One unit in the last place of the largest element: dense transitions are stored in float16, whose rounding may
    differ."""
    layer, generator = linear(family, ashlar.StateOrder.KEY_FIRST, ashlar.DType.BF16), torch.Generator().manual_seed(8)
    before = torch.randn((HEADS, D_K, D_V), generator=generator).bfloat16()
    wanted, found = before.clone(), before.clone()
    (transition, update), _ = composed_by_the_library(daemon, layer, wanted, torch.bfloat16, generator, [])
    compose(found, transition, update.bfloat16(), layer)
    assert (found.float() - wanted.float()).abs().max() <= 2**-7 * wanted.float().abs().max()


@pytest.mark.parametrize("family", list(ashlar.Family))
def test_tuples_of_16_bits_are_exact_to_their_type_and_half_as_large(family, daemon):
    """Running states are float32. float16 has 11 bits with exponents by head, bfloat16 has 8."""
    bounds = {
        ashlar.DType.F32: (torch.float32, 1e-5),
        ashlar.DType.F16: (torch.float16, 2**-10),
        ashlar.DType.BF16: (torch.bfloat16, 2**-8),
    }
    sizes = []
    for dtype, (stored, bound) in bounds.items():
        layer, generator = linear(family, ashlar.StateOrder.KEY_FIRST, dtype, 64, 64), torch.Generator().manual_seed(5)
        before = torch.randn((HEADS, 64, 64), generator=generator)
        found, exact = before.clone(), before.clone()
        (transition, update), read = composed_by_the_library(daemon, layer, found, stored, generator, sizes)
        compose(exact, transition, update, layer)
        assert (found - exact).abs().max() <= bound * exact.abs().max()
        compose(before, *read, layer)
        assert (found - before).abs().max() <= 1e-5 * found.abs().max(), "of the tuple as it is stored"
    keys = (TEXT - 8) * 2 * (8 + 4) * 4
    tuples = [size - keys for size in sizes]
    assert max(tuples[1:]) < 0.6 * tuples[0]


@pytest.mark.parametrize("order", list(ashlar.StateOrder))
@pytest.mark.parametrize("family", list(ashlar.Family))
def test_transitions_of_small_forms_are_read_as_the_family_has_them(family, order, daemon):
    """A head that has decayed stores nothing; a head of a matrix family with a small remainder stores its factors."""
    layer = linear(family, order, d_k=32, d_v=16)

    def decayed(layer, generator):
        made = transition_of(layer, generator)
        if family in MATRIX:
            made[0] = 0
            factors = torch.randn(2, 2, layer.d_k, generator=generator) * 0.1
            made[1] = factors[0].T @ factors[1]
        else:
            made[0] = 1e5 if family is ashlar.Family.MAMBA1 else -60.0
        return made

    decay = torch.zeros(HEADS, 32) if family in (ashlar.Family.GDN, ashlar.Family.KDA) else None
    generator, sizes = torch.Generator().manual_seed(4), []
    shape = (HEADS, 32, 16) if order is ashlar.StateOrder.KEY_FIRST else (HEADS, 16, 32)
    before = torch.randn(shape, generator=generator)
    wanted = before.clone()
    (transition, update), read = composed_by_the_library(
        daemon, layer, wanted, torch.float32, generator, sizes, decayed, decay
    )
    for each in ((transition, update), read):
        found = before.clone()
        compose(found, *each, layer)
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    if family in MATRIX:
        assert sizes[0] < 4 * (HEADS * 32 * 32 + HEADS * 32 * 16) + (TEXT - 8) * 2 * 12 * 4, "smaller than dense"


def test_states_of_any_size_keep_their_bits_in_float16():
    state = (
        torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1e-6, 1.0, 1e7, 0.0])[:, None, None]
    )
    half, exponents = scaled_half(state)
    found = half.float() * torch.exp2(exponents.float())[:, None, None]
    largest = state.abs().flatten(1).amax(1)
    assert ((found - state).abs().flatten(1).amax(1) <= 2**-11 * largest).all()
    assert exponents.dtype is torch.int32 and half.isfinite().all()
