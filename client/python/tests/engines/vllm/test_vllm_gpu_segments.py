# SPDX-License-Identifier: Apache-2.0
"""Segments on a GPU, without one: vLLM's code around its GPU kernels runs on CPUs, with torch in place of the kernels, and
the connector's operations run on a device that is not the CPU. No part of this has run on a real GPU."""

import contextlib
import os
import random
import time
import types

import check_gpu_segments
import gpu_delta_nets
import lagging_device
import numpy as np
import pytest
import torch
import vllm
from driven_specs import Driven, be_far, config_of, describe, in_child
from segmented_engines import MODEL, PATIENT, Segmented, texts
from test_vllm_devices import GDN, MIB, TEXT
from test_vllm_opaque import FULL, LATENT, states
from tiny_engines import connector, count, model_folder, prompt, same, settings_of
from vllm.config import AuxOutputConfig, CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

import ashlar
import ashlar.vllm.model
import ashlar.vllm.runs
from ashlar.tensors import compose, delta_tuple, segment_tuple
from ashlar.vllm.composing import Composer
from ashlar.vllm.forward import EngineModel, rotate
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.messages import CONTINUES, Alone, Fetch, Jump
from ashlar.vllm.options import Options
from ashlar.vllm.pace import Pace
from ashlar.vllm.ranks import Ranks
from ashlar.vllm.segments import refused


@pytest.fixture(scope="module")
def engines(shared_daemon):
    """Engines that take the code for GPUs."""
    children = {}
    with pytest.MonkeyPatch.context() as patch:
        gpu_delta_nets.emulate(patch)

        def get(model):
            if model not in children:
                options = connector(shared_daemon, segments=True, **PATIENT)
                children[model] = Segmented(model, options)
            return children[model]

        yield get
    for child in children.values():
        child.close()


@pytest.mark.parametrize("model", [MODEL, "qwen3_next"])
def test_states_of_gpu_kernels_are_composed_exactly_where_the_inputs_are_the_same(model, engines):
    child, parts, query = engines(model), texts(f"gpu {model}", 4), prompt("gpu query", 20)
    tokens, lengths = sum(parts, []), [len(part) for part in parts]
    cut = child.probe("tuples_against_one_run", tokens, lengths)
    print("tuples cut from one run, composed, and the engine's kernel", cut)
    assert len(cut) == 3 and all(one <= 1e-5 and whole <= 1e-5 and kernel <= 1e-5 for one, whole, kernel in cut)
    assert child.publish(parts) == 6
    full = child.probe("ask", tokens + query, None, salt="full")
    jumps = count(child, "jumps")
    first = child.ask(parts, query)
    assert first[2] == 100 + 3 * 84 and count(child, "jumps") == jumps + 4 and count(child, "load_failures") == 0
    child.call("erase")
    same([child.ask(parts, query)], [first[:2]])
    assert abs(first[1][0] - full[1][0]) < 0.2, "close to full prefill, not equal"
    composed = child.probe("composed_against_one_run", tokens + prompt("gpu other query", 10), lengths)
    for number, apart in enumerate(composed):
        print(f"layer {number}: {apart}")
    assert 0 < composed[0].interior <= 1e-5 and composed[0].computed <= 1e-5 and composed[0].exact <= 1e-5
    assert all(apart.interior <= 1e-5 or number for number, apart in enumerate(composed))


def check_here(model, sockets):
    """Runs the check of tools/gpu-check with an engine in this process, a child."""
    os.setsid()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return check_gpu_segments.check(check_gpu_segments.Local(model, connector(sockets, segments=True, **PATIENT)))


@pytest.mark.parametrize("model", check_gpu_segments.MODELS)
def test_the_check_for_gpus_passes_with_emulated_kernels(model, shared_daemon, monkeypatch):
    """Mamba-2 runs with vLLM's kernels for CPUs."""
    gpu_delta_nets.emulate(monkeypatch)
    errors = in_child(check_here, model_folder(model, **check_gpu_segments.MODELS[model]), shared_daemon)
    print(errors)
    assert all(0 <= found <= bound for found, bound in errors.values())
    assert errors["first token against full prefill"][0] > 0


def test_a_wrong_transition_fails_the_check_for_gpus(shared_daemon, monkeypatch):
    gpu_delta_nets.emulate(monkeypatch)

    def wrong(*given):
        state, *others = segment_tuple(*given)
        return state, *(2 * each for each in others)

    monkeypatch.setattr(ashlar.vllm.runs, "segment_tuple", wrong)
    model = model_folder(
        "qwen3_5", **check_gpu_segments.KERNELS, rms_norm_eps=2e-6
    )  # whose segments are not cached yet
    errors = in_child(check_here, model, shared_daemon)
    assert errors["interiors"][0] > errors["interiors"][1]


# ---- configurations


def config(device="cuda", lora=None, ranks=1, moe=False, experts=False):
    return types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device),
        lora_config=lora,
        aux_output_config=AuxOutputConfig(enable_return_routed_experts=experts),
        parallel_config=types.SimpleNamespace(data_parallel_size=ranks),
        model_config=types.SimpleNamespace(is_moe=moe),
    )


@pytest.mark.parametrize(
    "given, on_gpu, reason",
    [
        (config(), False, "they have never run on cuda; run tools/gpu-check, then set segments_on_gpu"),
        (config(), True, ""),
        (config("cpu"), False, ""),
        (config(lora=object()), True, "enable_lora is not supported"),
        (config(experts=True), True, "enable_return_routed_experts is not supported"),
        (config(ranks=2), True, ""),
        (config(ranks=2, moe=True), True, "data_parallel_size above 1 is not supported for mixtures of experts"),
    ],
)
def test_configurations_without_segments_are_refused_by_name(given, on_gpu, reason):
    assert refused(given, Options(segments=True, segments_on_gpu=on_gpu)) == reason


# ---- tuples


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("order", ashlar.StateOrder)
@pytest.mark.parametrize("tokens", [1, 63, 64, 200, 1100])
def test_a_tuple_is_the_recurrence_of_its_tokens(tokens, order, channels):
    """`channels`: KDA, with a decay for each channel, some of which forget at once."""
    torch.manual_seed(tokens)
    rows = k, v, g, beta = _rows_of(tokens)
    if channels:
        g = g[:, :, None] * torch.tensor([0.1, 1, 10, 2000]).repeat(4)
        rows = k, v, g, beta
    state, transition, decay = delta_tuple(*rows, order)
    wanted = _recur(torch.zeros(4, 16, 16), *rows), _recur(torch.eye(16).expand(4, 16, 16), *rows, adds=False)
    if order is ashlar.StateOrder.VALUE_FIRST:
        wanted = tuple(each.transpose(1, 2) for each in wanted)
    assert _apart(state, wanted[0]) < 1e-5 and _apart(transition, wanted[1]) < 1e-5
    assert torch.allclose(decay, g.sum(0).exp().view(4, -1).expand(4, 16))


def _rows_of(tokens):
    """k, v, g and beta, of which heads remember about 100 tokens."""
    k = torch.nn.functional.normalize(torch.randn(tokens, 2, 16), dim=-1)
    return k, torch.randn(tokens, 4, 16), -torch.rand(tokens, 4) / 50, torch.rand(tokens, 4) / 10


def _recur(state, k, v, g, beta, adds=True):
    """Returns the state after these tokens, in fp64: [heads, d_k, d_v]."""
    state, k, v, g, beta = (each.double() for each in (state, k.repeat_interleave(4 // k.shape[1], 1), v, g, beta))
    for t in range(len(k)):
        state = state * g[t].exp().view(4, -1, 1)
        write = beta[t][:, None] * (v[t] * adds - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * write[:, None, :]
    return state


def _apart(one, other):
    return float((one.double() - other).norm() / other.norm())


# ---- publishing, landing and composing on a device that is not the CPU

BLOCK = 128
ROPE = ashlar.Rope([0.5**i for i in range(16)], ashlar.RopeStyle.HALF_SPLIT)
DELTA, KEYS = GDN
LENGTHS = [100, 164, 100]  # the second interior ends at the end of a block


class Writer:
    @staticmethod
    def do_kv_cache_update(layer, keys, values, kv_cache, slots):
        kv_cache.transpose(1, 2).index_put_((slots // BLOCK, slots % BLOCK), torch.cat([keys, values], -1))


class Gdn:
    """A family of linear layers: its spec, and the inputs of its recurrence. `turns`: whether its keys are rotated."""

    specs, text, decays, turns = GDN, TEXT, None, False
    names, channels, shape = ("k", "v", "g", "beta"), 192, (4, 16, 16)  # shape: [heads, d_k, d_v]

    def rows(self, tokens):
        return _rows_of(tokens)

    def recur(self, state, *rows):
        """Returns the state after these tokens, in fp64."""
        return _recur(state, *rows)

    def as_engine(self, state):
        return state.transpose(1, 2)


class Kda(Gdn):
    specs = {DELTA: GDN[DELTA], KEYS: LATENT}
    text = types.SimpleNamespace(kv_lora_rank=64)

    def rows(self, tokens):
        k = torch.nn.functional.normalize(torch.randn(tokens, 4, 16), dim=-1)
        _, v, g, beta = _rows_of(tokens)
        return k, v, g[:, :, None] * torch.rand(16), beta


class Lightning(Gdn):
    specs = {DELTA: states(Backend.LINEAR, (4, 32, 32), dtypes=(torch.float32,)), KEYS: LATENT}
    family, text, decays, turns = ashlar.Family.LIGHTNING, Kda.text, -torch.tensor([0.3, 0.1, 0.03, 0.01]), True
    names, channels, shape = ("k", "v"), 0, (4, 32, 32)

    def rows(self, tokens):
        return torch.randn(2, tokens, 4, 32).unbind()

    def recur(self, state, k, v):
        state = state.double()
        for row in zip(k.double(), v.double()):
            state = self.decays.double().exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", *row)
        return state

    def as_engine(self, state):
        return state


class Mamba1(Gdn):
    specs = {DELTA: states(Backend.MAMBA1, (3, 128), (128, 16)), KEYS: FULL}
    family, text, decays = ashlar.Family.MAMBA1, None, -torch.linspace(0.1, 1, 16 * 128).view(1, 16, 128)
    names, channels, shape = ("k", "v", "beta"), 128, (1, 16, 128)

    def rows(self, tokens):
        return torch.randn(tokens, 16), torch.randn(tokens, 128), torch.rand(tokens, 128) / 10

    def recur(self, state, k, v, beta):
        state = state.double()
        for b, x, dt in zip(k.double(), v.double(), beta.double()):
            state = (self.decays.double() * dt).exp() * state + torch.einsum("k,v->kv", b, dt * x)
        return state

    def as_engine(self, state):
        return state[0].T


class Mamba2(Mamba1):
    specs = {DELTA: states(Backend.MAMBA2, (3, 256), (8, 16, 32)), KEYS: FULL}
    family, decays = ashlar.Family.MAMBA2, -torch.linspace(0.01, 1, 8)
    channels, shape = 256, (8, 32, 16)

    def rows(self, tokens):
        return torch.randn(tokens, 2, 32), torch.randn(tokens, 8, 16), torch.rand(tokens, 8) / 10

    def recur(self, state, k, v, beta):
        state = state.double()
        for b, x, dt in zip(k.double().repeat_interleave(4, 1), v.double(), beta.double()):
            state = (self.decays.double() * dt).exp()[:, None, None] * state + torch.einsum("hk,h,hv->hkv", b, dt, x)
        return state

    def as_engine(self, state):
        return state.transpose(1, 2)


class Text:
    """What the layers of a model compute of a text alone."""

    def __init__(self, tokens, family):
        torch.manual_seed(int(tokens[0]))
        count, latent = len(tokens), family.specs[KEYS] is LATENT
        self.rows, self.inputs = family.rows(count), torch.randn(count, family.channels).bfloat16()
        shapes = ((64,), (32,)) if latent else ((2, 32), (2, 32))
        self.keys, self.values = (torch.randn(count, *shape).bfloat16() for shape in shapes)
        # Keys are rotated by their position, or the rotary parts of MLA, which are in the place of values.
        self.turned, self.plain = (self.values, self.keys) if latent else (self.keys, self.values)


class Core:
    """A layer's core whose rows are computed on the engine's stream."""

    name, normalized = DELTA, True

    def __init__(self, text, family, states, rows):
        """`rows`: those of this run."""
        self._text, self._family, self._states, self._rows = text, family, states, rows

    def run_seen(self, count, block):
        end = self._family.recur(torch.zeros(self._family.shape), *(row[: self._rows.stop] for row in self._text.rows))
        self._states.state(block).copy_(self._family.as_engine(end).float().contiguous(), non_blocking=True)
        return {name: far(row[self._rows]) for name, row in zip(self._family.names, self._text.rows)}

    def inputs(self):
        return far(self._text.inputs[self._rows])


def far(tensor):
    return tensor.to(torch.device(lagging_device.NAME, 0), non_blocking=True)


class Engine(EngineModel):
    text = None  # tokens of the segment that runs

    def __init__(self, caches, states, family):
        self.ranks = Ranks(1)
        self._block, self.device, self._states = BLOCK, torch.device(lagging_device.NAME, 0), states
        self._family, layer = family, types.SimpleNamespace(impl=Writer, kv_cache=caches[KEYS])
        if family.specs[KEYS] is LATENT:
            layer = types.SimpleNamespace(kv_lora_rank=64, kv_cache=caches[KEYS].view(-1, BLOCK, 96))
        self._attention = {KEYS: layer}

    def rows(self, blocks, begin, end):
        """Returns the rotated and the unrotated values in the cache at positions [begin, end)."""
        cache = self._attention[KEYS].kv_cache
        cache = cache if cache.dim() == 3 else cache.transpose(1, 2)
        rows = [cache[blocks[position // BLOCK], position % BLOCK] for position in range(begin, end)]
        keys, values = torch.stack(rows).cpu().split([64, 32] if cache.dim() == 3 else [32, 32], -1)
        return (values, keys) if cache.dim() == 3 else (keys, values)

    def has_tokens(self, tokens):
        return True

    def decays(self, name):
        return None if self._family.decays is None else far(self._family.decays)

    def ropes(self, described):
        return {KEYS: ROPE} | ({DELTA: ROPE} if self._family.turns else {})

    def prepare(self, tokens, pages, at_linear, at_keys=None, shift=0, start=0):
        text, rows = Text(self.text, self._family), slice(start, start + len(tokens))

        def forward():
            at_linear(Core(text, self._family, self._states, rows))
            at_keys(KEYS, far(text.keys[rows]), far(text.values[rows]))

        return forward


def _until(found, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.001)
    raise TimeoutError


class Composing:
    """A composer on the lagging device, whose blocks are those of one linear layer and one attention layer."""

    def __init__(self, family, daemon, name, **given):
        be_far()
        ashlar.vllm.model._swaps_states = lambda: False
        config = config_of(family.specs)
        described = describe(config, name, text=family.text, staged=8 * MIB, packed=False)
        self.driven, self.family = Driven(config, described, daemon, far=True), family
        caches = self.driven.worker._caches
        sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
        options = Options(**sockets, segments=True, **PATIENT | given)
        self.states, self.engine = caches.states[0], Engine(self.driven.caches, caches.states[0], family)
        self.composer = Composer(self.engine, described, options, caches.states, 4096, True, Pace(), caches.order)
        _until(lambda: self.composer._opening.cache)
        self.keys, self.linear = next(iter(described.attention_groups)), described.linear[0].group

    def publish(self, parts, cuts=()):
        """`cuts`: where the parts of a segment's run end, from its end."""
        published = 0
        for number, part in enumerate(parts):
            self.engine.text, ends = part, [len(part) - cut for cut in cuts] + [len(part)]
            for begin, end in zip([0, *ends], ends):
                alone = Alone(number, part, begin, end, number == 0, "", {self.keys: [1, 2]}, {self.linear: 3})
                self.composer.run_alone(alone, lambda: True)
                (answer,) = _until(self.composer.take_ran).values()
                assert (answer == CONTINUES) == (end < len(part))
            published += answer
        return published

    def fetch(self, number, parts):
        """Returns the jumps of a prompt of these segments, once they have landed."""
        lengths, found = [len(part) for part in parts], {}
        self.composer.fetch(Fetch(number, np.append(np.concatenate(parts), 0).astype(np.int32), lengths), lambda: True)
        _until(lambda: found.update(self.composer.take_fetched()) or (found and found[number].ended))
        return found[number].jumps

    def jump(self, number, parts, jump, blocks):
        """Jumps from a random state. `blocks`: those of the attention layer, and of the linear one. Returns a function
        that waits for the device, and returns relative errors by name."""
        begin, end, first = jump
        ends, family, states = np.cumsum([len(part) for part in parts]), self.family, self.states
        segment, tables = int(np.searchsorted(ends, begin, "right")), [[], []]
        tables[self.keys], tables[self.linear] = blocks
        start, text = int(ends[segment]) - len(parts[segment]), Text(parts[segment], family)
        block, before = blocks[1][end // BLOCK], torch.randn(family.shape)
        states.state(block).copy_(family.as_engine(before).contiguous(), non_blocking=True)
        self.composer.apply(Jump(number, begin, end, tuple(tables), end // BLOCK))
        rows = [row[begin - start : end - start] for row in text.rows]
        if family.turns:
            rows[0] = _turned(rows[0], start)
        wanted = family.as_engine(family.recur(torch.zeros(family.shape) if first else before, *rows))
        turned, plain = (
            _turned(text.turned, start)[begin - start : end - start],
            text.plain[begin - start : end - start],
        )

        def errors():
            rotated, others = self.engine.rows(blocks[0], begin, end)
            pairs = dict(state=(states.state(block).cpu(), wanted), turned=(rotated, turned), plain=(others, plain))
            if family.channels:
                pairs["tail"] = states.tail(block).cpu(), text.inputs[end - start - 3 : end - start]
            if end % BLOCK == 0:
                pairs["end"] = states.state(blocks[1][end // BLOCK - 1]).cpu(), wanted
            return {name: _apart(one, other.double()) for name, (one, other) in pairs.items()}

        return errors

    def close(self):
        self.composer.close()
        self.driven.close()


def _turned(rows, position):
    return rotate(rows.double().flatten(0, -2), ROPE, position).view(rows.shape)


def _exact(errors):
    """Returns whether errors are those of fp32, and for rotated keys those of bf16."""
    bounds = dict(state=1e-5, end=1e-5, tail=0, plain=0, turned=1e-2)
    return all(error <= bounds[name] for name, error in errors.items())


def _parts(name, lengths=LENGTHS):
    chance = np.random.default_rng(len(name))
    return [chance.integers(1, 1 << 30, length).astype(np.int32) for length in lengths]


def composed(family, daemon, name, spoil, cuts=(), **given):
    """Returns the number of published segments, and errors after each jump."""
    with lagging_device.stream(lagging_device.ENGINE):
        one, parts, blocks = Composing(family, daemon, name, **given), _parts(name), ([5, 9, 6], [12, 10, 11])
        spoil(lagging_device)
        published = one.publish(parts, cuts)
        errors = [one.jump(9, parts, jump, blocks)() for jump in one.fetch(9, parts)]
        one.composer.release([9])
        one.close()
    return published, errors


def composed_after_another(family, daemon, name, spoil):
    """A prompt's segments land after the jumps of another prompt, which the device has not yet done. Returns the number
    of times that jumps waited for the device, and the errors of both prompts."""
    waits, stream = [], lagging_device.Stream
    with lagging_device.stream(lagging_device.ENGINE):
        one = Composing(family, daemon, name)
        texts = [_parts(f"{name}{'.' * number}", LENGTHS[:2]) for number in range(2)]
        for parts in texts:
            assert one.publish(parts) == 2
        spoil(lagging_device)
        found, run = [], stream.run
        for number, (parts, blocks) in enumerate(zip(texts, (([5, 9, 6], [12, 10, 11]), ([17, 19, 16], [13, 15, 14])))):
            jumps = one.fetch(number, parts)
            stream.run = lambda *given: (waits.append(given), run(*given))
            found += [one.jump(number, parts, jump, blocks) for jump in jumps]
            stream.run = run
            one.composer.release([number])
        while lagging_device.ENGINE._work:
            with contextlib.suppress(IndexError):  # slots that were overwritten
                lagging_device.ENGINE.run()
        errors = [each() for each in found]
        one.close()
    return len(waits), errors


def wait(device):
    """Spoils nothing."""


def omit_the_wait_for_the_run(device):
    device.Event.synchronize = lambda event: None


@pytest.mark.parametrize(
    "family, spoil, right",
    [
        (Gdn, wait, True),
        (Gdn, omit_the_wait_for_the_run, False),
        *((each, wait, True) for each in (Kda, Lightning, Mamba1, Mamba2)),
    ],
)
def test_segments_are_published_landed_and_composed_with_two_streams(family, spoil, right, shared_daemon):
    """The composer's thread copies on its own stream."""
    name = f"far segments {family.__name__} {spoil.__name__}"
    published, errors = in_child(composed, family(), shared_daemon, name=name, spoil=spoil)
    print(published, errors)
    assert published == 3 and [("end" in each) for each in errors] == [False, True, False]
    assert all(map(_exact, errors)) is right


@pytest.mark.parametrize(
    "family, spoil, right",
    [
        (Gdn, omit_the_wait_for_the_run, False),
        *((each, wait, True) for each in (Gdn, Kda, Lightning, Mamba1, Mamba2)),
    ],
)
def test_segments_that_run_in_parts_are_published_with_two_streams(family, spoil, right, shared_daemon):
    """Between two parts, the composer's thread copies keys that the engine's stream has computed."""
    name = f"far parts of segments {family.__name__} {spoil.__name__}"
    given = dict(name=name, spoil=spoil, cuts=(95, 50, 9, 5))
    published, errors = in_child(composed, family(), shared_daemon, **given)
    print(published, errors)
    assert published == 3 and all(map(_exact, errors)) is right


def omit_the_query_for_the_end_of_copies(device):
    device.Event.query = lambda event: True


@pytest.mark.parametrize("order", ashlar.StateOrder)
@pytest.mark.parametrize("tokens", [1, 64, 1100])
@pytest.mark.parametrize("family", [Lightning, Mamba1, Mamba2])
def test_a_tuple_of_decays_is_the_recurrence_of_its_tokens(family, tokens, order):
    seed, made = random.randrange(1 << 30), family()
    print("seed", seed)
    torch.manual_seed(seed)
    rows, before = made.rows(tokens), torch.randn(made.shape)
    heads, d_k, d_v = made.shape
    layer = ashlar.Linear(made.family, heads, heads, d_k, d_v, order=order)
    swapped = order is ashlar.StateOrder.VALUE_FIRST
    update, transition = segment_tuple(layer, dict(zip(made.names, rows)), made.decays)
    for state in (before, torch.zeros(made.shape)):
        found = (state.transpose(1, 2) if swapped else state).clone()
        compose(found, transition, update, layer, made.decays)
        assert _apart(found.transpose(1, 2) if swapped else found, made.recur(state, *rows)) <= 1e-5


@pytest.mark.parametrize("spoil, right", [(wait, True), (omit_the_query_for_the_end_of_copies, False)])
def test_jumps_do_not_wait_for_the_device_and_keep_their_memory_until_it_has_copied(spoil, right, shared_daemon):
    name = f"lasting segments {spoil.__name__}"
    waits, errors = in_child(composed_after_another, Gdn(), shared_daemon, name=name, spoil=spoil)
    print(waits, errors)
    assert waits == 0 and [_exact(each) for each in errors] == [right, right, True, True]
    assert right or all(each["state"] > 1e-2 and each["plain"] > 1e-2 for each in errors[:2]), "both were overwritten"


def test_tuples_in_float16_lose_no_more_than_their_precision(shared_daemon):
    published, errors = in_child(composed, Gdn(), shared_daemon, name="far halves", spoil=wait, segment_dtype="float16")
    print(published, errors)
    assert published == 3 and all(1e-5 < each["state"] < 1e-3 and each["tail"] == each["plain"] == 0 for each in errors)


# ---- vLLM's metadata on a device that is not the CPU


def metadata(specs, _, backend, kernel_block, graphs):
    """Returns the metadata of a text of 200 tokens and of a step of two tokens after it, in CPU memory."""
    be_far()
    gdn_attn.async_tensor_h2d = lambda data, device: data.to(device)  # vLLM for CPUs copies nothing
    device = torch.device(lagging_device.NAME, 0)
    config = vllm.EngineArgs(**settings_of("qwen3_5")).create_engine_config()
    config.cache_config.mamba_cache_mode = "align"
    if graphs:
        compilation = config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2, 4], 4
    engine = EngineModel.__new__(EngineModel)
    engine._config, engine._block, engine.device = config, BLOCK, device
    keys = types.SimpleNamespace(get_attn_backend=lambda: backend, kv_cache=torch.empty(8, 2, kernel_block, 64))
    engine._layers = {KEYS: keys, DELTA: types.SimpleNamespace(get_attn_backend=lambda: gdn_attn.GDNAttentionBackend)}
    engine._attention, engine._linear = {KEYS: keys}, {DELTA: 1}
    with lagging_device.stream(lagging_device.ENGINE), set_current_vllm_config(config):
        engine._groups = {0: engine._group([KEYS], specs[KEYS]), 1: engine._group([DELTA], specs[DELTA])}
        whole = engine.metadata(0, 200, {0: [5, 9]})[KEYS]
        return [
            _near(each) for each in (whole, *(engine._metadata_of(DELTA, *rows, 7) for rows in ((0, 200), (200, 202))))
        ]


def _near(found):
    """Copies the fields that are tensors of the device. A tensor of the CPU has a name that says so."""
    tensors = {name: each for name, each in vars(found).items() if isinstance(each, torch.Tensor)}
    far = {name: each for name, each in tensors.items() if isinstance(each, lagging_device.Tensor)}
    assert all(name.endswith("_cpu") for name in tensors.keys() - far.keys()), tensors.keys() - far.keys()
    numbers = {name: each for name, each in vars(found).items() if isinstance(each, int)}
    return types.SimpleNamespace(**numbers, **{name: each.cpu().numpy().tolist() for name, each in far.items()})


@pytest.mark.parametrize("backend", [FlashAttentionBackend, TritonAttentionBackend])
@pytest.mark.parametrize("kernel_block, graphs", [(BLOCK, False), (32, False), (BLOCK, True)])
def test_the_engines_builders_make_metadata_on_the_device(backend, kernel_block, graphs, shared_daemon):
    given = dict(backend=backend, kernel_block=kernel_block, graphs=graphs)
    keys, first, later = in_child(metadata, GDN, shared_daemon, **given)
    parts = BLOCK // kernel_block
    assert keys.block_table == [[block * parts + part for block in (5, 9) for part in range(parts)]]
    assert (keys.seq_lens, keys.query_start_loc, keys.max_query_len, keys.max_seq_len) == ([200], [0, 200], 200, 200)
    assert keys.slot_mapping == [*range(5 * BLOCK, 6 * BLOCK), *range(9 * BLOCK, 9 * BLOCK + 72)]
    assert (first.num_prefills, first.num_prefill_tokens, first.num_decodes) == (1, 200, 0)
    assert first.prefill_state_indices == first.non_spec_state_indices_tensor == [7]
    assert first.has_initial_state == first.prefill_has_initial_state == [False]
    assert first.prefill_query_start_loc == [0, 200] and first.chunk_indices == [[0, i] for i in range(4)]
    assert (later.num_prefills, later.num_prefill_tokens) == (1, 2) and later.prefill_has_initial_state == [True]


def test_other_attention_back_ends_are_refused_by_name(shared_daemon):
    other = types.SimpleNamespace(get_name=lambda: "FLASHINFER")
    engine = EngineModel.__new__(EngineModel)
    engine._layers = engine._attention = {KEYS: types.SimpleNamespace(get_attn_backend=lambda: other)}
    said = "segments: the attention back end FLASHINFER is not supported; set attention_backend to FLASH_ATTN or TRITON_ATTN"
    with pytest.raises(Unsupported, match=said):
        engine._group([KEYS], GDN[KEYS])


def run_inside_a_graphs_step(specs, _):
    """Returns how a segment is run that follows a step with a graph, and whether its inputs are on the device."""
    be_far()
    config, seen = vllm.EngineArgs(**settings_of("qwen3_5")).create_engine_config(), []

    def model(input_ids, positions):
        context = get_forward_context()
        seen.append((context.cudagraph_runtime_mode.name, context.skip_compiled))
        seen.append([isinstance(each, lagging_device.Tensor) for each in (input_ids, positions)])

    engine = EngineModel.__new__(EngineModel)
    engine.ranks, engine._config, engine._model, engine.device = (
        Ranks(1),
        config,
        model,
        torch.device(lagging_device.NAME, 0),
    )
    engine._layers, engine._linear, engine._attention = {}, {}, {}
    step = dict(num_tokens=4, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    with lagging_device.stream(lagging_device.ENGINE), set_forward_context({}, config, **step):
        engine.run(np.arange(4, dtype=np.int32), {}, lambda core: None)
        seen.append(get_forward_context().cudagraph_runtime_mode.name)
    return seen


def test_a_segments_run_is_neither_compiled_nor_part_of_a_graph(shared_daemon):
    seen = in_child(run_inside_a_graphs_step, GDN, shared_daemon)
    assert seen == [("NONE", True), [True, True], "FULL"]
