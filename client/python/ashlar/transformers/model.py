# SPDX-License-Identifier: Apache-2.0
"""Derives the shape of a Transformers model's cached state from its behaviour: runs it on a few tokens, and inspects
its cache and the calls of its rules. No number is derived from the config."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ashlar.checkpoint import config_text
from ashlar.model import Attention, DType, Family, Linear, Model, Rope, StateOrder, TailOrder
from ashlar.transformers.caches import cache_class
from ashlar.transformers.rules import Tape, continuing, mamba1_heads
from ashlar.transformers.weights import adapter_tensors, standing

# The versions whose caches and rules this module supports; each was tried. Tests run with the oldest, the newest, and
# 5.19.0.
OLDEST, BELOW = (5, 18), (5, 25)

DTYPES = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_SHIFT = 37  # positions by which the probe rotates keys


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """One linear layer of a model."""

    index: int  # index into ashlar.Model.layers
    layer: int  # index among the layers of the model's DynamicCache
    state: tuple[int, ...]  # [value heads, d_k, d_v], or [value heads, d_v, d_k]
    cached: tuple[int, ...]  # shape of the state in the DynamicCache; Mamba-1: [1, d_inner, d_state]
    dtype: torch.dtype  # type of the state in the DynamicCache
    key_heads: int
    d_k: int
    channels: int
    kernel: int  # 0: no convolution
    family: Family

    @property
    def transition(self) -> tuple[int, ...]:
        """Shape of a transition, as in LinearTensors."""
        if self.family is Family.MAMBA1:
            return self.state[:2]
        scalar = self.family in (Family.MAMBA2, Family.LIGHTNING)
        return self.state[:1] if scalar else (self.state[0], self.d_k, self.d_k)


@dataclasses.dataclass(frozen=True)
class AttentionPlace:
    """One attention layer of a model."""

    index: int  # index into ashlar.Model.layers
    layer: int  # index among the layers of the model's DynamicCache


@dataclasses.dataclass(frozen=True)
class Shape:
    """The layers of a model whose states or keys are cached."""

    linear: tuple[LinearPlace, ...]
    attention: tuple[AttentionPlace, ...]
    adapters: str  # the active adapters when the model was described


def check_version() -> None:
    """ImportError: the installed version of transformers is not supported."""
    version = importlib.metadata.version("transformers")
    found = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= found < BELOW:
        known = f"{OLDEST[0]}.{OLDEST[1]} to below {BELOW[0]}.{BELOW[1]}"
        raise ImportError(f"transformers: version {version} is not supported; expected {known}")


def weights_digest(model: Any) -> str:
    """Returns SHA-256 over the config and all weights in memory, in hexadecimal digits. It does not depend on the
    folder."""
    return _tensors_digest(config_text(model.config.to_dict()), model.state_dict())


def _tensors_digest(begin: bytes, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(begin)
    for name, weight in sorted(tensors.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_type(model: Any) -> None:
    """ValueError: the model is wrapped or compiled, so changes to its attributes do not affect how it runs."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: {kind} was given; expected a PreTrainedModel of Transformers; for a wrapper, pass the wrapped model"
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(f"model: {kind}.compile() was called; pass the model before it is compiled")


def _refuse(layer: int, reason: str) -> ValueError:
    return ValueError(f"model.layers[{layer}]: {reason}")


@contextlib.contextmanager
def _probing(model: Any) -> Iterator[None]:
    """Converts errors of the probe into ValueError, which names the model's class."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        raise ValueError(f"model: {type(model).__name__} does not run on a DynamicCache ({why})") from error


def run(model: Any, cache: DynamicCache, tokens: torch.Tensor, first: int) -> Any:
    """Runs tokens, [1, count], from position `first` through the model without its head."""
    # Positions are passed explicitly. Most models derive them from the cache, but Bamba begins at 0 again.
    positions = torch.arange(first, first + tokens.shape[1], device=model.device).unsqueeze(0)
    with continuing(model):
        return model.base_model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)


def _frequencies(model: Any, layer: int) -> list[torch.Tensor]:
    """Returns the tensors that may be a layer's rotary frequencies, in radians per position."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    kind = kinds[layer] if kinds is not None and layer < len(kinds) else ""
    found = []
    for module in model.modules():
        # Some models have one tensor for each type of layers, such as sliding_attention_inv_freq.
        values = [getattr(module, name, None) for name in ("inv_freq", f"{kind}_inv_freq")]
        own = [each for each in values if isinstance(each, torch.Tensor)]
        rotation = getattr(module, "rope_type", "default")
        rotation = rotation.get(kind) if isinstance(rotation, dict) else rotation
        if own and rotation in ("dynamic", "longrope"):
            raise ValueError(
                f"model.config.rope_parameters: frequencies of type {rotation} change with the prompt's length"
            )
        found += [each.detach().double().cpu().flatten() for each in own]
    return found


def turn(keys: torch.Tensor, frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    """Rotates keys by this number of positions: [..., dim], pairs half the rotary dimensions apart."""
    angles = frequencies * positions
    cos, sin, half = angles.cos(), angles.sin(), len(frequencies)
    keys = keys.double()
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _rope(model: Any, layer: int, keys: torch.Tensor, shifted: torch.Tensor) -> Rope | None:
    """Returns the rotation of a layer's keys, by comparing them with keys shifted by `_SHIFT` positions. None: not
    rotated."""
    size = keys.double().norm()
    tolerance = 1e-3 if keys.dtype == torch.float32 else 5e-2
    if (shifted.double() - keys.double()).norm() <= tolerance * size:
        return None
    for frequencies in _frequencies(model, layer):
        if 2 * len(frequencies) <= keys.shape[-1]:
            turned = turn(keys.cpu(), frequencies, _SHIFT)
            if (shifted.cpu().double() - turned).norm() <= tolerance * size:
                return Rope(frequencies.tolist())
    raise _refuse(layer, "the rotation of its keys does not match the frequencies of the model")


def _linear(index: int, layer: int, whole: Tape, second: Tape) -> tuple[Linear, LinearPlace]:
    call, cached = whole.calls.get(layer), whole.layers[layer].recurrent_states[0]
    # Zamba calls the rule once per head.
    if call is None or (call.rule.family is Family.MAMBA1 and cached.ndim != 3):
        raise _refuse(layer, "its linear layer uses an unsupported recurrence")
    if second.calls[layer].start is None:
        raise _refuse(layer, "this version of transformers cannot continue from a state with several tokens")
    rule, state = call.rule, mamba1_heads(cached) if call.rule.family is Family.MAMBA1 else cached[0]
    sizes = tuple(state.shape)
    heads, d_k, d_v = sizes if rule.order is StateOrder.KEY_FIRST else (sizes[0], sizes[2], sizes[1])
    if rule.family is Family.MAMBA2:
        key_heads = call.arguments["B"].shape[2]
    elif rule.family is Family.MAMBA1:
        key_heads = 1
    elif rule.family is Family.LIGHTNING:
        key_heads = heads
    else:
        key_heads = _distinct_heads(call.arguments["key"][0], heads)
    conv = whole.layers[layer].conv_states[0]
    channels, kernel = (0, 0) if conv is None else conv.shape[1:]
    linear = Linear(
        rule.family, key_heads, heads, d_k, d_v, order=rule.order, conv_channels=channels, conv_kernel=kernel,
        conv_dtype=None if conv is None else DTYPES[conv.dtype],
        conv_order=TailOrder.TOKEN_FIRST if conv is None else TailOrder.CHANNEL_FIRST,
        decay_table=None if rule.decay is None else rule.decay(call.arguments).float().cpu().flatten().tolist(),
    )  # fmt: skip
    place = LinearPlace(
        index, layer, sizes, tuple(cached.shape), cached.dtype, key_heads, d_k, channels, kernel, rule.family
    )
    return linear, place


def _distinct_heads(key: torch.Tensor, heads: int) -> int:
    """Returns the number of key heads. Up to 5.22 keys are repeated for value heads before the rule: equal neighbours
    are one key head."""
    if key.shape[1] != heads:
        return key.shape[1]
    equal = [bool((key[:, head] == key[:, head - 1]).all()) for head in range(1, heads)]
    distinct = heads - sum(equal)
    if heads % distinct or any(same != (head % (heads // distinct) > 0) for head, same in enumerate(equal, 1)):
        return heads
    return distinct


@torch.no_grad()
def describe(model: Any, digest: str | None, head: int, tail: int, page_tokens: int) -> tuple[Model, Shape]:
    """Returns the model's description for a cache, and its layers. ValueError: the model is not supported."""
    check_version()
    check_type(model)
    if model.dtype not in DTYPES:
        raise ValueError(f"model.dtype: {model.dtype} is not supported; expected float32, float16 or bfloat16")
    config = model.config.get_text_config(decoder=True)
    chance = torch.Generator().manual_seed(20)
    tokens = torch.randint(0, config.vocab_size, (1, 24), generator=chance).to(model.device)
    whole, second = (cache_class(model, Tape)(config) for _ in range(2))
    turned = cache_class(model)(config=config)
    with torch.autocast(model.device.type, enabled=False), _probing(model):
        with whole.recording(model):
            run(model, whole, tokens, 0)
        run(model, second, tokens[:, :12], 0)
        with second.recording(model):
            run(model, second, tokens[:, 12:], 12)
        run(model, turned, tokens, _SHIFT)

    layers: list[Attention | Linear] = []
    linear_places, attention_places = [], []
    for number, layer in enumerate(whole.layers):
        if any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
            if layer.number_of_states != 1:
                raise _refuse(number, f"{layer.number_of_states} states per layer; expected 1")
            linear, place = _linear(len(layers), number, whole, second)
            layers.append(linear)
            linear_places.append(place)
        elif any(getattr(layer, "is_conv_states_initialized", {}).values()):
            raise _refuse(number, "a convolution without a state is not supported")
        if isinstance(layer, DynamicSlidingWindowLayer):
            raise _refuse(number, "chunked attention, or a window in a layer with a state, is not supported")
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            rope = _rope(model, number, keys, turned.layers[number].keys)
            kind = DTYPES[keys.dtype]
            layers.append(Attention(keys.shape[1], keys.shape[-1], values.shape[-1], kind, rope))
            attention_places.append(AttentionPlace(len(layers) - 1, number))
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} stores no keys or states in a DynamicCache: models with a "
            "cache class of their own (Mamba, RWKV) are not supported"
        )
    _check_gate(whole, second)
    switched = standing(model).adapters
    if digest:  # names only the weights; the configuration and adapters also determine states
        begin = f"{digest} ".encode() + config_text(model.config.to_dict())
        digest = _tensors_digest(begin, adapter_tensors(model) if switched else {})
    else:
        digest = weights_digest(model)
    if switched:
        digest = hashlib.sha256(f"{digest} {switched}".encode()).hexdigest()
    described = Model(
        model_id=config.model_type, weights_digest=digest, layers=layers, page_tokens=page_tokens,
        head=head, tail=tail, dtype=_NAMES[model.dtype],
    )  # fmt: skip
    return described, Shape(tuple(linear_places), tuple(attention_places), switched)


def _check_gate(whole: Tape, second: Tape) -> None:
    """prefill(A); forward(B) must leave the same states as prefill(A + B). Otherwise no cached prefix could be
    continued."""
    for number, (one, two) in enumerate(zip(whole.layers, second.layers, strict=True)):
        states = getattr(one, "recurrent_states", {}).get(0), getattr(two, "recurrent_states", {}).get(0)
        keys = getattr(one, "keys", None), getattr(two, "keys", None)
        for name, (a, b) in {"state": states, "keys": keys}.items():
            if a is None or b is None:
                continue
            # Rounding may change which expert a token is routed to. The tolerance allows for that and is far below the
            # error of a lost state.
            tolerance = 1e-2 if a.dtype == torch.float32 else 1e-1
            error = float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
            if not error <= tolerance:
                raise _refuse(number, f"{name} differs by {error:.2g} between a run in two parts and one run")


def numpy_view(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Returns a torch tensor in the memory of an array whose bytes have type `dtype`."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
