# SPDX-License-Identifier: Apache-2.0
"""Tuples that wait in host memory: their values, their size and their number."""

import types

import numpy as np
import pytest
import test_vllm_segment_layers
import torch
from driven_specs import in_child

import ashlar
import ashlar.vllm.composing
from ashlar.tensors import compose, scaled_half
from ashlar.vllm import landed_tuples
from ashlar.vllm.host_memory import HostMemory, whole_size
from ashlar.vllm.landed_tuples import keep, state_shape, transition_shape, tuple_bytes
from ashlar.vllm.options import Options
from ashlar.vllm.segments import segment_tokens, segment_tuples, tuple_memory

HEADS, DIM, GIB = 6, 32, 1 << 30
CPU = torch.device("cpu")


def layer(family=ashlar.Family.GDN, **given):
    fields = dict(state_dtype=ashlar.DType.F16, conv_channels=64, conv_kernel=4, conv_dtype=ashlar.DType.BF16)
    order = ashlar.StateOrder.VALUE_FIRST if family is ashlar.Family.GDN else ashlar.StateOrder.KEY_FIRST
    return ashlar.Linear(family, HEADS, HEADS, DIM, 16, order=order, **fields | given)


def stored(linear, seed):
    """Returns the state, as float16 and exponents, and the transition of a tuple as the cache stores them."""
    made = torch.Generator().manual_seed(seed)
    half = torch.randn(state_shape(linear), generator=made).half()
    half[0] *= 2.0**-20  # subnormal numbers
    half[1] = 65504 * half[1].sign()
    half[2] = 0
    half[3, 0, 0] = 2.0**15
    exponents = torch.tensor([0, 3, 5, -40, 100, -2], dtype=torch.int32)
    transition = torch.randn(transition_shape(linear), generator=made)
    return half, exponents, transition.half().float() if transition.dim() == 3 else transition


def read(half, exponents):
    """As `Request.read_tuple` reads it."""
    return torch.from_numpy(np.ldexp(half.float().numpy(), exponents.numpy()[:, None, None]))


class Lease:
    """Counts what is taken."""

    def __init__(self):
        self.taken, self._lease = 0, HostMemory(CPU).lease()

    def copy(self, tensor):
        self.taken += whole_size(tensor.numel() * tensor.element_size())
        return self._lease.copy(tensor)


@pytest.mark.parametrize(
    "family", [ashlar.Family.GDN, ashlar.Family.KDA, ashlar.Family.LIGHTNING, ashlar.Family.MAMBA1]
)
def test_tuples_of_16_bits_compose_to_the_same_bits_as_in_float32(family):
    linear, memory = layer(family), Lease()
    half, exponents, transition = stored(linear, 1)
    before, tail = torch.randn(state_shape(linear)), torch.arange(64 * 3 * 2) % 251
    kept = keep(memory, linear, read(half, exponents), transition, tail.to(torch.uint8))
    assert kept.state.dtype == torch.float16 and torch.equal(kept.state_on(CPU), read(half, exponents))
    assert torch.equal(kept.transition.float(), transition) and kept.tail.tolist() == tail.tolist()
    decays = -torch.rand(HEADS, DIM, 16)
    wanted, found = before.clone(), before.clone()
    compose(wanted, transition, read(half, exponents), linear, decays)
    compose(found, kept.transition, kept.state_on(CPU), linear, decays)
    assert torch.equal(found, wanted)
    assert memory.taken <= tuple_bytes(linear)


def test_scaled_states_lose_nothing_a_second_time():
    linear = layer()
    half, exponents = scaled_half(torch.randn(state_shape(linear)) * torch.logspace(-20, 20, HEADS)[:, None, None])
    state = read(half, exponents)
    assert torch.equal(keep(Lease(), linear, state, None, None).state_on(CPU), state)


def test_tuples_of_float32_and_rotated_states_stay_float32():
    state = torch.randn(HEADS, DIM, 16)
    rope = ashlar.Rope([1.0])
    lightning = layer(ashlar.Family.LIGHTNING, conv_kernel=0, conv_channels=0, conv_dtype=None, rope=rope)
    for linear in (lightning, layer(ashlar.Family.KDA, state_dtype=ashlar.DType.F32)):
        memory, transition = Lease(), torch.randn(transition_shape(linear))
        kept = keep(memory, linear, state, transition, None)
        assert torch.equal(kept.state_on(CPU), state) and torch.equal(kept.transition, transition)
        assert memory.taken <= tuple_bytes(linear)


def test_transitions_of_low_rank_are_rounded_to_16_bits():
    """The cache stores these in factors, which the daemon's client multiplies."""
    transition = torch.eye(DIM) - torch.einsum("hri,hrj->hij", *torch.randn(2, HEADS, 3, DIM) / DIM)
    kept = keep(Lease(), layer(), torch.zeros(HEADS, 16, DIM), transition, None)
    assert (kept.transition - transition).abs().max() <= 2**-11 * transition.abs().max()
    assert kept.transition.dtype == torch.float16


# ---- in an engine


def landed(kind, daemon):
    """Returns the errors of `composed` with tuples in float16, and with the same ones in float32."""
    found, types_seen = [], set()

    def keep_floats(memory, linear, state, transition, tail):
        copies = [None if each is None else memory.copy(each) for each in (transition, state, tail)]
        return landed_tuples.LandedTuple(copies[0], copies[1], None, copies[2])

    own = landed_tuples.keep

    def keep_halves(*given):
        kept = own(*given)
        types_seen.add(kept.state.dtype)
        return kept

    for each in (keep_halves, keep_floats):
        landed_tuples.keep = each
        found.append(test_vllm_segment_layers.composed(kind, daemon, segment_dtype="float16")[2])
    return found, types_seen


@pytest.mark.parametrize("kind", ["kimi", "minimax", "jamba"])
def test_prompts_are_composed_to_the_same_states_from_either_type(kind, shared_daemon):
    (halves, floats), types_seen = in_child(landed, kind, shared_daemon)
    print(kind, halves)
    assert halves == floats and types_seen == {torch.float16}
    assert len(halves) == 3 and 1e-6 < max(map(max, halves)) < 1e-2


def landed_in_two(kind, daemon):
    ashlar.vllm.composing.segment_tuples = lambda described, options: 2
    answers, take = [], ashlar.vllm.composing.Composer.take_fetched

    def take_fetched(composer):
        found = take(composer)
        answers.extend((each.unfit, composer._pages._free_tuples) for each in found.values() if each.ended)
        return found

    ashlar.vllm.composing.Composer.take_fetched = take_fetched
    return len(test_vllm_segment_layers.composed(kind, daemon, segment_dtype="float16")[2]), answers


def test_a_prompt_with_more_tuples_than_fit_takes_the_first_segments(shared_daemon):
    assert in_child(landed_in_two, "ring", shared_daemon) == (2, [(1, 0)])


# ---- capacity


def described(linear, attention):
    return types.SimpleNamespace(segments=[linear] * 36 + [attention] * 12 + ["not supported"])


QWEN3_NEXT = described(
    ashlar.Linear(ashlar.Family.GDN, 16, 32, 128, 128, conv_channels=8192, conv_kernel=4, conv_dtype=ashlar.DType.BF16),
    ashlar.Attention(2, 256, 256, ashlar.DType.BF16),
)


def test_the_default_holds_keys_values_and_tuples_in_4_gib():
    options = Options()
    keys = 12 * 2 * 512 * 2  # bytes of a token
    assert segment_tokens(QWEN3_NEXT, options) == 65536
    assert 65536 * keys + tuple_memory(QWEN3_NEXT, options) == 4 * GIB
    assert segment_tuples(QWEN3_NEXT, options) == 33
    assert segment_tuples(QWEN3_NEXT, Options(segment_dtype="float32")) == 17
    assert segment_tuples(QWEN3_NEXT, Options(segment_tokens=131072)) == 67, "in proportion"


def test_wide_keys_leave_half_of_the_memory_for_tuples():
    wide = described(QWEN3_NEXT.segments[0], ashlar.Attention(16, 256, 256, ashlar.DType.BF16))
    keys = 12 * 16 * 512 * 2
    tokens = segment_tokens(wide, Options())
    assert tokens == 4 * GIB // (2 * keys) and tuple_memory(wide, Options()) == tokens * keys


def test_models_without_linear_layers_keep_keys_and_values_only():
    wide = types.SimpleNamespace(segments=[ashlar.Attention(16, 256, 256, ashlar.DType.BF16)] * 12)
    assert segment_tokens(wide, Options()) == 4 * GIB // (12 * 16 * 512 * 2)
    assert segment_tuples(wide, Options()) > 1 << 40
