# SPDX-License-Identifier: Apache-2.0
"""Segments that requests share in place: the pages that the daemon allocates for them, and the cache of Transformers
that reads them there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from ashlar.model import Attention, Model
from ashlar.transformers import shared_attention
from ashlar.transformers.caches import cache_class
from ashlar.transformers.model import Shape, run, turn
from ashlar.transformers.shared_attention import SharedRows

_SLOTS = 37  # positions by which the check shifts shared keys


class _SharedLayer:
    """Adds shared rows, which come before the layer's own, to a layer of a DynamicCache."""

    shared: SharedRows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if self.shared.spans:
            if not shared_attention.is_active(self.shared.config):
                raise RuntimeError("past_key_values: its segments are shared in place; use it inside ashlar.attach")
            keys.ashlar_shared = self.shared  # read by the attention function, which gets this tensor
        return keys, values

    def get_seq_length(self) -> int:
        own: int = super().get_seq_length()  # type: ignore[misc]
        return self.shared.tokens + own

    def crop(self, tokens_to_remove: int) -> None:
        own = self.get_seq_length() - self.shared.tokens
        # A positive number is the length to keep.
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.get_seq_length() - tokens_to_remove)
        if removed > own:
            raise ValueError(f"tokens_to_remove: {removed}; only the last {own} tokens are not shared")
        super().crop(-removed)  # type: ignore[misc]

    def reset(self) -> None:
        self.shared = SharedRows(self.shared.config, self.shared.frequencies)
        super().reset()  # type: ignore[misc]


# The classes of layers that can be extended. `_layer_type` would register an extension as the class for all caches.
_EXTENDED: dict[type, Any] = {
    base: type(f"Shared{base.__name__}", (_SharedLayer, base), {"_layer_type": None})
    for base in (DynamicLayer, LinearAttentionAndFullAttentionLayer)
}


def _extend(layer: Any, shared: SharedRows) -> Any:
    kind = _EXTENDED[type(layer)]
    extended = kind.__new__(kind)
    extended.__dict__.update(layer.__dict__, shared=shared)
    return extended


class SharedCache(DynamicCache):
    """A DynamicCache whose attention layers also read shared rows. One sequence."""

    def __init__(self, config: Any, model: Model, shape: Shape, lease: Any = None) -> None:
        super().__init__(config=config)
        for place in shape.attention:
            layer, described = self.layers[place.layer], model.layers[place.index]
            assert isinstance(described, Attention)
            rope = described.rope
            frequencies = None if rope is None else torch.tensor(rope.frequencies, dtype=torch.float64)
            self.layers[place.layer] = _extend(layer, SharedRows(config, frequencies, lease))


def key_value_bytes(caches: Iterable[DynamicCache]) -> tuple[int, int]:
    """Returns the bytes of keys and values of these caches: own rows, and whole shared pages, each of which counts
    once."""
    own, shared = 0, dict[int, int]()
    for cache in caches:
        for layer in cache.layers:
            rows = getattr(layer, "keys", None), getattr(layer, "values", None)
            own += sum(part.nbytes for part in rows if part is not None)
            if isinstance(layer, _SharedLayer):
                shared |= layer.shared.pages
    return own, sum(shared.values())


def _refuse(layer: int, reason: str) -> ValueError:
    return ValueError(f"model.layers[{layer}]: shared_tokens: {reason}")


@torch.no_grad()
def check(model: Any, described: Model, shape: Shape) -> None:
    """Compares a run of the model over shared rows with a run over copies. ValueError: its attention cannot read
    them."""
    if not shape.attention:
        raise ValueError("shared_tokens: the model has no attention layers; set shared_tokens to 0")
    if model.device.type != "cpu":
        raise ValueError(
            f"shared_tokens: the model is on {model.device}, but shared rows are in host memory; move the model to the "
            "CPU, or set shared_tokens to 0"
        )
    config = model.config.get_text_config(decoder=True)
    plain = cache_class(model)(config=config)
    for place in shape.attention:
        attention = described.layers[place.index]
        assert isinstance(attention, Attention)
        if plain.layers[place.layer].is_sliding:
            raise _refuse(place.layer, "its attention has a sliding window; set shared_tokens to 0")
        if type(plain.layers[place.layer]) not in _EXTENDED:
            kind = type(plain.layers[place.layer]).__name__
            expected = " or ".join(sorted(each.__name__ for each in _EXTENDED))
            raise _refuse(place.layer, f"its cache is a {kind}; expected {expected}")
        if attention.key_dim != attention.value_dim:
            raise _refuse(
                place.layer,
                f"keys of {attention.key_dim} and values of {attention.value_dim} dimensions; expected equal ones",
            )
    tokens = torch.randint(0, config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(21))
    with torch.autocast("cpu", enabled=False):
        whole = _last(model, plain, tokens)
        before, name = config._attn_implementation, shared_attention.implementation(model)
        cache = cache_class(model, SharedCache)(config, described, shape)
        failure: Exception | None = None
        try:
            model.set_attn_implementation(name)
            run(model, cache, tokens[:, :16], 0)
            for place in shape.attention:
                _share_all(cache.layers[place.layer])
            found = _last(model, cache, tokens[:, 16:], 16)
        except (RuntimeError, ValueError) as error:
            failure = error
        finally:
            model.set_attn_implementation(before)
    for place in shape.attention:
        if isinstance(failure, ValueError):
            break
        if not cache.layers[place.layer].shared.attended:
            raise _refuse(place.layer, "its attention does not read keys and values as its cache returns them")
    if failure is not None:
        raise ValueError(f"shared_tokens: {failure}") from failure
    apart = float((found - whole).norm() / whole.norm().clamp_min(1e-30))
    if not apart <= (1e-2 if model.dtype == torch.float32 else 1e-1):  # the tolerances of `describe`
        raise ValueError(
            f"shared_tokens: outputs over shared keys differ by {apart:.2g} from those over copies; set shared_tokens "
            "to 0"
        )


def _last(model: Any, cache: DynamicCache, tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
    hidden: torch.Tensor = run(model, cache, tokens, first).last_hidden_state[0, -8:]
    return hidden.double()


def _share_all(layer: Any) -> None:
    """Turns a layer's own rows into two shared spans, one of which has keys that are rotated to other positions."""
    keys, values = (rows[0].transpose(0, 1) for rows in (layer.keys, layer.values))
    layer.keys, layer.values = layer.keys[..., :0, :], layer.values[..., :0, :]
    layer.shared.add(keys[:6], values[:6], 0)
    frequencies = layer.shared.frequencies
    others = keys[6:] if frequencies is None else turn(keys[6:], frequencies, _SLOTS).to(keys.dtype)
    layer.shared.add(others, values[6:], -_SLOTS)
