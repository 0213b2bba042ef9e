# SPDX-License-Identifier: Apache-2.0
"""Segments of KDA, lightning attention, Mamba-1 and Mamba-2 on GPUs, and of MLA in their models: vLLM's own layers,
metadata and specs on CPUs, with torch in place of the kernels. No part of this has run on a real GPU."""

import dataclasses
import functools
import time
import types

import gpu_layers
import numpy as np
import pytest
import torch
from driven_specs import Driven, config_of, describe, in_child
from segmented_engines import PATIENT
from test_vllm_opaque import FULL, LATENT, states
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import KVQuantMode, SparseCacheRole

import ashlar
import ashlar.daemon
import ashlar.vllm.composing
import ashlar.vllm.rows
from ashlar.tensors import compose, segment_tuple
from ashlar.vllm.composing import Composer
from ashlar.vllm.forward import EngineModel, _Group, _rope, rotate
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.messages import CONTINUES, Alone, Fetch, Jump
from ashlar.vllm.options import Options
from ashlar.vllm.pace import Pace
from ashlar.vllm.ranks import Ranks
from ashlar.vllm.segments import segments_model, unsupported

BLOCK, LINEAR, KEYS = 128, "model.layers.0.mixer", "model.layers.1.attn"
LENGTHS = [100, 164, 100]  # the second interior ends at the end of a block
BLOCKS, PARTS = 24, 4  # PARTS: blocks of MLA's kernels in one of the engine's
PLAIN = [16, 17, 18]  # MLA's blocks of a prompt that is run as a whole
FAMILIES = dict(kimi="KDA", bounded="KDA", ling="KDA", ring="LIGHTNING", minimax="LIGHTNING", jamba="MAMBA1")
FAMILIES["granite"] = "MAMBA2"


class Engine(EngineModel):
    """An engine whose model has one linear layer of vLLM, and one of MLA, or random keys."""

    latent = None

    def __init__(self, kind, daemon):
        ashlar.vllm.rows.packs = lambda: False
        gpu_layers.emulate()
        self.ranks = Ranks(1)
        self._config, self._block, self.device = gpu_layers.engine_config(), BLOCK, torch.device("cpu")
        self.layer, forward = gpu_layers.build(kind, self._config, LINEAR)
        spec, keys, attend, modules = self.layer.get_kv_cache_spec(self._config), FULL, None, [self.layer]
        if kind in gpu_layers.LATENTS:
            owner, attend = gpu_layers.build(kind, self._config, KEYS, gpu_layers.LATENTS)
            modules.append(owner)
            self.latent = self._config.compilation_config.static_forward_context[KEYS]
            keys = dataclasses.replace(self.latent.get_kv_cache_spec(self._config), block_size=BLOCK)
        self.config = config_of({LINEAR: spec, KEYS: keys})
        text = types.SimpleNamespace(kv_lora_rank=gpu_layers.MLA["kv_lora_rank"])
        self.described = describe(self.config, f"layer {kind}", text=text, packed=False)
        self.driven = Driven(self.config, self.described, daemon)
        self.layer.bind_kv_cache(self.driven.caches[LINEAR])
        self._layers, self._attention, self._linear = {LINEAR: self.layer}, {}, {LINEAR: 0}
        if attend:
            self._layers[KEYS] = self._attention[KEYS] = self.latent
            self.latent.bind_kv_cache(self.driven.caches[KEYS].view(-1, 1, BLOCK // PARTS, keys.head_size))
        with set_current_vllm_config(self._config):
            self._groups = {0: self._group([LINEAR], spec)}
            if attend:
                self._groups[1] = self._group([KEYS], keys)
        table = torch.randn(512, gpu_layers.WIDTH, generator=torch.Generator().manual_seed(2))

        def run(input_ids, positions):
            forward(table[input_ids], positions)
            if attend:
                attend(table[input_ids], positions)
            else:
                self._keys(*torch.randn(2, len(input_ids), 2, 32).bfloat16())

        self.forward_without_latents = lambda input_ids, positions: forward(table[input_ids], positions)
        self._model = torch.nn.ModuleList(modules)
        self._model.forward = run

    def prepare(self, tokens, pages, at_linear, at_keys=None, shift=0, start=0):
        self._keys = (lambda key, value: at_keys(KEYS, key, value)) if at_keys else (lambda key, value: None)
        pages = (pages or {1: [13, 14, 15]}) if self.latent else {}
        return super().prepare(tokens, pages, at_linear, at_keys, shift, start)

    def ropes(self, described):
        return {KEYS: None} | super().ropes(described)

    def _try(self, described, position):
        return super()._try(described, position) if self.latent else {LINEAR: None}

    def put_keys(self, name, keys, values, slots):
        """Other keys are tested elsewhere."""
        if self.latent:
            super().put_keys(name, keys, values, slots)

    def latents(self, table, begin, end):
        """Returns what the cache has of MLA at these positions: latents and rotary parts."""
        slots, rank = self.slots(table, begin, end), self.latent.kv_lora_rank
        return self.driven.caches[KEYS].flatten(0, 2)[slots].tensor_split([rank], -1)

    def recurrence(self, tokens, position):
        """Returns the recurrence of these tokens at a position of the prompt: (state, begin, end) -> state."""
        seen = gpu_layers.recorded
        self.run(tokens, {}, lambda core: core.run(0, len(tokens), BLOCKS - 1), shift=position)
        return seen[-1]


def _apart(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


def _tokens(name, length):
    return np.random.default_rng(len(name) + length).integers(1, 512, length).astype(np.int32)


def ranges(kind, daemon):
    """Returns relative errors: of a state that the layer computed in ranges of rows, of its tail, and of a state composed
    from a tuple of observed rows, each compared with one run in fp64."""
    engine = Engine(kind, daemon)
    driven = engine.driven
    states, tokens, found = driven.worker._caches.states[0], _tokens(kind, 200), []
    recur = engine.recurrence(tokens, 0)
    zero = torch.zeros(states.state(1).shape)
    layer, decays = engine.described.segments[0], engine.decays(LINEAR)

    def at_linear(core):
        states.state(1).fill_(7)
        core.run(0, 200, 1)
        found.append(_apart(states.state(1), recur(zero)))
        states.state(2).fill_(7)
        for begin, end in ((0, 40), (40, 42), (42, 200)):
            core.run(begin, end, 2)
        found.append(_apart(states.state(2), recur(zero)))
        if layer.conv_kernel:
            found.append(_apart(states.tail(2), states.tail(1)) + _apart(states.tail(2), core.inputs()[-3:]))
        rows = {name: row[20:190] for name, row in core.run_seen(200, 3).items()}
        assert torch.equal(states.state(3), states.state(1))
        shape = (layer.value_heads, layer.d_v, layer.d_k)
        before = torch.randn(zero.shape)
        state = before.view(shape if layer.order is ashlar.StateOrder.VALUE_FIRST else zero.shape).clone()
        update, transition, *_ = segment_tuple(layer, rows, decays)
        compose(state, transition, update, layer, decays)
        found.append(_apart(state.view(zero.shape), recur(before, 20, 190)))

    engine.run(tokens, {}, at_linear)
    driven.close()
    return found


@pytest.mark.parametrize("kind", gpu_layers.LAYERS)
def test_a_layer_runs_in_ranges_and_its_inputs_are_observed(kind, shared_daemon):
    errors = in_child(ranges, kind, shared_daemon)
    print(kind, errors)
    assert max(errors) <= 1e-5


def _until(found, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.001)
    raise TimeoutError


def alone(number, tokens, begin=0, end=None):
    end = len(tokens) if end is None else end
    return Alone(number, tokens, begin, end, number == 0, "", {1: [1, 2]}, {0: 3})


def composed(kind, daemon, change=lambda engine: None, name="", cuts=(), **given):
    """`cuts`: where the parts of a segment's run end, from its end. Returns the number of published segments, the layer's family, and relative errors after each jump of a prompt: of
    the states, compared with the recurrence of the whole prompt in fp64, of the tails, and of MLA's latents and rotary
    parts, compared with a run of the whole prompt."""
    engine = Engine(kind, daemon)
    driven = engine.driven
    caches = driven.worker._caches
    sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
    options = Options(**sockets, segments=True, **PATIENT | given)
    composer = Composer(engine, engine.described, options, caches.states, 4096, True, Pace(), caches.order)
    _until(lambda: composer._opening.cache)
    change(engine)
    parts = [_tokens(f"{kind} {name}{number}", length) for number, length in enumerate(LENGTHS)]
    published, inputs = 0, []
    for number, part in enumerate(parts):
        ends = [len(part) - cut for cut in cuts] + [len(part)]
        for begin, end in zip([0, *ends], ends):
            composer.run_alone(alone(number, part, begin, end), lambda: True)
            (answer,) = _until(composer.take_ran).values()
            assert (answer == CONTINUES) == (end < len(part))
        published += answer
        engine.run(part, {}, lambda core: inputs.append(core.run(0, 4, 4) or core.inputs().clone()))
    composer.fetch(Fetch(9, np.append(np.concatenate(parts), 0).astype(np.int32), LENGTHS), lambda: True)
    found, states = {}, caches.states[0]
    _until(lambda: found.update(composer.take_fetched()) or (found and found[9].ended))
    tables, errors = ([12, 10, 11], [5, 9, 6]), []
    starts = np.cumsum([0, *LENGTHS])
    whole = [engine.recurrence(part, int(start)) for part, start in zip(parts, starts)]
    if engine.latent:
        engine.run(np.concatenate(parts), {1: PLAIN}, lambda core: core.run(0, sum(LENGTHS), BLOCKS - 1))
    chain, done = torch.zeros(states.state(1).shape, dtype=torch.float64), 0

    def advance(state, begin, end):
        for start, length, recur in zip(starts, LENGTHS, whole):
            part = max(begin - start, 0), min(end - start, length)
            state = recur(state, *map(int, part)) if part[0] < part[1] else state
        return state

    for begin, end, _ in found[9].jumps:
        segment = int(np.searchsorted(np.cumsum(LENGTHS), begin, "right"))
        block = tables[0][end // BLOCK]
        chain = advance(chain, done, begin)
        states.state(block).copy_(chain)
        composer.apply(Jump(9, begin, end, tables, end // BLOCK))
        chain, done = advance(chain, begin, end), end
        pairs = [(states.state(block), chain)]
        if engine.described.segments[0].conv_kernel:
            pairs.append((states.tail(block), inputs[segment][end - starts[segment] - 3 : end - starts[segment]]))
        if end % BLOCK == 0:
            pairs.append((states.state(tables[0][end // BLOCK - 1]), chain))
        if engine.latent:
            pairs += zip(engine.latents(tables[1], begin, end), engine.latents(PLAIN, begin, end))
        errors.append([_apart(*pair) for pair in pairs])
        chain = states.state(block).double()
    composer.release([9])
    composer.close()
    driven.close()
    return published, composer.model.layers[0].family.name, errors


@pytest.mark.parametrize("kind", gpu_layers.LAYERS)
def test_segments_compose_to_the_recurrence_of_the_whole_prompt(kind, shared_daemon):
    published, family, errors = in_child(composed, kind, shared_daemon)
    print(kind, published, errors)
    assert (published, family) == (3, FAMILIES[kind])
    count = 1 + (family != "LIGHTNING") + 2 * (kind in gpu_layers.LATENTS)
    assert [len(each) for each in errors] == [count, count + 1, count]
    assert max(map(max, errors)) <= 1e-5


def composed_in_parts(kind, daemon):
    return composed(kind, daemon, name="in parts ", cuts=(95, 50, 9, 5))


@pytest.mark.parametrize("kind", gpu_layers.LAYERS)
def test_segments_that_run_in_parts_compose_to_the_same(kind, shared_daemon):
    """The first part ends inside the head. The interior ends in the last part but one, whose rows are fewer than the
    convolution's."""
    published, family, errors = in_child(composed_in_parts, kind, shared_daemon)
    print(kind, published, errors)
    assert published == 3 and max(map(max, errors)) <= 1e-5


def composed_in_few_pages(kind, daemon):
    return composed(kind, daemon, segment_tokens=256)


def test_a_prompt_longer_than_the_pages_takes_the_segments_that_fit(shared_daemon):
    _, _, errors = in_child(composed_in_few_pages, "ring", shared_daemon)  # another test may have published them
    assert len(errors) == 2, "interiors at 0 to 100 and 108 to 256, of 364 tokens"
    assert max(map(max, errors)) <= 1e-5


def found_at_rates(kind, daemon):
    """Returns the jumps and the missing segments that a prompt finds at three rates of prefill, one after another."""
    engine = Engine(kind, daemon)
    sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
    caches, options = engine.driven.worker._caches, Options(**sockets, segments=True, **PATIENT)
    composer = Composer(engine, engine.described, options, caches.states, 4096, True, Pace(), caches.order)
    _until(lambda: composer._opening.cache)
    parts, numbers, found = [_tokens(f"rates {number}", length) for number, length in enumerate(LENGTHS)], [0], {}
    for number, part in enumerate(parts):
        composer.run_alone(alone(number, part), lambda: True)
        _until(composer.take_ran)

    def fetch():
        numbers[0] += 1
        composer.fetch(Fetch(numbers[0], np.append(np.concatenate(parts), 0).astype(np.int32), LENGTHS), lambda: True)
        _until(lambda: found.update(composer.take_fetched()) or (numbers[0] in found and found[numbers[0]].ended))
        composer.release(numbers)
        return found[numbers[0]]

    def fetch_at(rate):
        composer.set_rate(rate)  # a later fetch uses it, in another session
        _until(lambda: fetch() and composer._opening.cache.model.tokens_per_second == rate)
        return len(fetch().jumps), fetch().missing

    try:
        return [fetch_at(rate) for rate in (1.0, 1e12, 2.0)], composer._pages.free == composer._pages.count
    finally:
        composer.close()
        engine.driven.close()


def test_segments_that_land_more_slowly_than_they_are_computed_are_no_hits(tmp_path):
    """The cache has these segments, so they are not missing: computing them again would not help."""
    with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        found, all_free = in_child(found_at_rates, "ring", daemon)
    assert found == [(3, []), (0, []), (3, [])] and all_free


def composed_unrotated(kind, daemon):
    ashlar.vllm.composing.rotate = lambda keys, rope, position: keys
    return composed(kind, daemon)


def test_states_of_rotated_keys_are_rotated_to_their_position(shared_daemon):
    *_, errors = in_child(composed_unrotated, "ring", shared_daemon)
    assert max(errors[0]) <= 1e-5 < 1e-2 < min(map(max, errors[1:]))


def composed_with_other_decays(kind, daemon):
    return composed(kind, daemon, lambda engine: engine.layer.A.data.mul_(2), seam_tail=9)


@pytest.mark.parametrize("kind", ["jamba", "granite"])
def test_segments_compose_with_the_decays_of_changed_weights(kind, shared_daemon):
    published, _, errors = in_child(composed_with_other_decays, kind, shared_daemon)
    print(kind, published, errors)
    assert published == 3 and max(map(max, errors)) <= 1e-5


def composed_without_rope(kind, daemon):
    own = Engine.ropes
    Engine.ropes = lambda engine, described: own(engine, described) | {KEYS: None}
    return composed(kind, daemon)


def test_rotary_parts_of_latents_are_rotated_to_their_position(shared_daemon):
    *_, errors = in_child(composed_without_rope, "ling", shared_daemon)
    print(errors)
    assert max(errors[0]) <= 1e-5 < 1e-2 < min(each[-1] for each in errors[1:])
    assert max(each[-2] for each in errors) <= 1e-5, "latents have no position"


def _refusal(call, *args):
    with pytest.raises(Unsupported) as refused:
        call(*args)
    return str(refused.value)


def refusals(kind, daemon):
    """Returns why these are refused: keys that rotate twice as far, a layer that is not run, a layer of another model,
    another back end."""
    engine = Engine(kind, daemon)
    rotary, spec = engine._model[1].rotary_emb, engine.config.kv_cache_groups[1].kv_cache_spec
    own = rotary.forward
    rotary.forward = lambda positions, *keys: own(2 * positions, *keys)
    found = [_refusal(engine.ropes, engine.described)]
    engine._model.forward = engine.forward_without_latents
    found.append(_refusal(engine.ropes, engine.described))
    engine._model = torch.nn.ModuleList([engine.layer])
    found.append(_refusal(engine.ropes, engine.described))
    engine.latent.attn_backend = types.SimpleNamespace(get_name=lambda: "FLASHMLA_SPARSE")
    found.append(_refusal(engine._group, [KEYS], spec))
    engine.driven.close()
    return found


@pytest.mark.parametrize("context", [4096, 1 << 20])
def test_frequencies_of_yarn_are_found_for_any_context(context):
    rotary = types.SimpleNamespace(
        rotary_dim=64, base=1e7, scaling_factor=4.0, beta_fast=32, beta_slow=1, max_position_embeddings=context,
        is_neox_style=False,
    )  # fmt: skip
    rotary._compute_inv_freq = functools.partial(DeepseekScalingRotaryEmbedding._compute_inv_freq, rotary)
    frequencies = rotary._compute_inv_freq(4.0).double()
    angles = torch.arange(1001)[:, None] * frequencies
    rotary.cos_sin_cache = 1.3 * torch.cat([angles.cos(), angles.sin()], -1)
    assert _rope(rotary) == ashlar.Rope(frequencies.tolist(), ashlar.RopeStyle.INTERLEAVED)


def text_positions(kind, daemon):
    """Returns the positions that the model gets, with rotary positions of three and of four axes."""
    engine, found = Engine(kind, daemon), []
    engine._model.forward = lambda input_ids, positions: found.append(positions.tolist())
    for section in ([2, 1, 1], [1, 1, 1, 1]):
        engine._config.model_config.hf_config.rope_parameters["mrope_section"] = section
        engine.run(_tokens(kind, 3), {}, None, shift=7)
    engine.driven.close()
    return found


def test_a_text_has_the_same_position_on_each_axis(shared_daemon):
    assert in_child(text_positions, "minimax", shared_daemon) == [[[7, 8, 9]] * 3, [[7, 8, 9]] * 4]


@pytest.mark.parametrize("scaling", [None, 4.0])
@pytest.mark.parametrize("section, interleaved", [([3, 3, 2], True), ([4, 2, 2], False), ([2, 2, 2, 2], False)])
def test_rotations_by_several_axes_are_plain_for_texts(section, interleaved, scaling):
    """Keys of 32 elements, of which 16 rotate."""
    with set_current_vllm_config(VllmConfig()):
        rotary = MRotaryEmbedding(
            32, 16, 2048, 10000.0, True, torch.float32, section, interleaved, positions_factor=1, scaling_factor=scaling
        )
    rope = _rope(rotary)
    assert rope.style is ashlar.RopeStyle.HALF_SPLIT
    if scaling is None:
        assert list(rope.frequencies) == pytest.approx([10000.0 ** (-i / 8) for i in range(8)])
    keys, axes = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)), (len(section), 1)

    def rotated(positions):
        return rotary.forward_native(positions, keys, keys)[1].double()

    straight = rotated(torch.zeros(3, dtype=torch.long).repeat(axes))
    for position in (1, 37, 1000):
        where = torch.full((3,), position)
        found = rotated(where.repeat(axes))
        assert torch.equal(found, rotated(where)), "as by positions of one axis"
        assert _apart(found, rotate(straight, rope, position)) < 1e-4
        other = where.repeat(axes)
        other[1] += 100  # as in an image
        assert _apart(rotated(other), found) > 1e-2


def test_tables_of_blocks_have_a_length_that_all_kernels_accept():
    engine = EngineModel.__new__(EngineModel)
    builder = types.SimpleNamespace(build=lambda _, common: common)
    engine._block, engine.device, engine._groups = 64, torch.device("cpu"), {1: _Group([KEYS], builder, parts=2)}
    common = engine.metadata(0, 130, {1: [5, 6, 7]})[KEYS]
    assert common.block_table_tensor.tolist() == [[10, 11, 12, 13, 14, 15, 0, 0]]
    assert common.slot_mapping[-2:].tolist() == [7 * 64, 7 * 64 + 1]


def test_latents_that_cannot_be_observed_are_refused(shared_daemon):
    assert in_child(refusals, "ring", shared_daemon) == [
        f"segments: {KEYS}: its keys do not match its rotary embedding",
        f"segments: {KEYS}: the operator of MLAAttention is not supported",
        f"segments: {KEYS}: layers of a draft model are not supported; remove speculative_config",
        "segments: the attention back end FLASHMLA_SPARSE is not supported; set attention_backend to FLASH_ATTN_MLA or "
        "FLASHMLA or FLASHINFER_MLA or CUTLASS_MLA or TRITON_MLA",
    ]


# ---- specs


def test_decay_tables_that_no_layout_can_hold_are_refused():
    described = segments_of(states(Backend.MAMBA1, (3, 8192), (8192, 16)))
    decays, rope = {LINEAR: torch.empty(8 << 20)}, ashlar.Rope([1.0])
    with pytest.raises(Unsupported, match="of a rank take 33554440 bytes; expected at most 33554432"):
        segments_model(described, {KEYS: rope}, decays, Options())


def test_only_rank_0_has_the_engines_name():
    """Probes ask for that name. Ranks have different namespaces, and rank 0 and an engine of one rank do, too."""
    whole = segments_of(states(Backend.MAMBA1, (3, 64), (64, 16)))
    models = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        part = dataclasses.replace(whole.model, tensor_parallel_rank=rank, tensor_parallel_size=size)
        described = dataclasses.replace(whole, model=part)
        models.append(segments_model(described, {KEYS: ashlar.Rope([1.0])}, {LINEAR: torch.zeros(64, 16)}, Options()))
    name = whole.model.model_id
    assert [each.model_id for each in models] == [name, name, f"{name} rank 1 of 2"]
    assert len({each.dtype for each in models}) == 3


def segments_of(spec, attention=FULL, **text):
    return describe(config_of({LINEAR: spec, KEYS: attention}), text=types.SimpleNamespace(**text), packed=False)


def test_layers_of_these_families_are_described_by_their_specs():
    kda = segments_of(states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)))
    assert isinstance(kda.model.layers[0], ashlar.Opaque), "in prefixes"
    layer = kda.segments[0]
    assert (layer.family, layer.key_heads, layer.value_heads, layer.d_k, layer.d_v) == (ashlar.Family.KDA, 4, 4, 16, 16)
    lightning = segments_of(states(Backend.LINEAR, (4, 32, 32), dtypes=(torch.float32,)))
    assert (lightning.segments[0].family, lightning.segments[0].conv_kernel) == (ashlar.Family.LIGHTNING, 0)
    mamba1 = segments_of(states(Backend.MAMBA1, (3, 8192), (8192, 16)))
    layer = mamba1.segments[0]
    assert (layer.family, layer.value_heads, layer.d_k, layer.d_v) == (ashlar.Family.MAMBA1, 32, 16, 256)
    mamba2 = segments_of(states(Backend.MAMBA2, (3, 256), (8, 16, 32)))
    layer = mamba2.segments[0]
    assert (layer.family, layer.key_heads, layer.value_heads, layer.d_k, layer.d_v) == (
        ashlar.Family.MAMBA2,
        2,
        8,
        32,
        16,
    )
    assert layer.order is ashlar.StateOrder.VALUE_FIRST
    assert not any(map(unsupported, (kda, lightning, mamba1, mamba2)))


def test_mla_is_described_by_its_spec_and_the_configuration():
    layer = segments_of(states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)), LATENT, kv_lora_rank=64).segments[1]
    assert (layer.kind, layer.kv_heads, layer.key_dim, layer.value_dim) == (ashlar.LayerKind.MLA, 1, 64, 32)


@pytest.mark.parametrize(
    "change, text, reason",
    [
        (dict(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, cache_dtype_str="fp8"), {}, "latents in fp8"),
        (dict(state_content_bytes=656, cache_dtype_str="fp8_ds_mla"), {}, "latents in fp8_ds_mla"),
        (dict(cache_role=SparseCacheRole.INDEXER), {}, "sparse MLA"),
        (dict(), dict(index_topk=2048), "sparse MLA"),
        (dict(), dict(kv_lora_rank=96), "MLAAttentionSpec whose rows are unknown"),
        (dict(model_version="deepseek_v4"), {}, "MLAAttentionSpec whose rows are unknown"),
    ],
)
def test_other_latents_have_no_segments(change, text, reason):
    spec = dataclasses.replace(LATENT, **change)
    described = segments_of(states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)), spec, **{"kv_lora_rank": 64} | text)
    assert unsupported(described) == f"not for models with {reason}"


@pytest.mark.parametrize(
    "spec, attention, reason",
    [
        (states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)), LATENT, "MLAAttentionSpec whose rows are unknown"),
        (states(Backend.GDN_ATTN, (3, 200), (4, 16, 16)), FULL, "states of GDN_ATTN"),
        (states(Backend.MAMBA1, (3, 128), (128, 16), (8, 16), dtypes=3 * (torch.float32,)), FULL, "states of MAMBA1"),
        (states(Backend.SHORT_CONV, (2, 64)), FULL, "states of SHORT_CONV"),
    ],
)
def test_other_layers_have_no_segments(spec, attention, reason):
    assert unsupported(segments_of(spec, attention)) == f"not for models with {reason}"


def test_a_gated_delta_net_of_equal_heads_is_not_taken_for_kda():
    spec = states(Backend.GDN_ATTN, (3, 192), (4, 16, 16), dtypes=(torch.bfloat16, torch.float16))
    assert unsupported(segments_of(spec, linear_num_key_heads=4)) == "not for models with states of GDN_ATTN"
