# SPDX-License-Identifier: Apache-2.0
"""The classes of caches that models run on. Most models run on a DynamicCache. Three kinds need a derived class:

- Mamba-1 models start the scan of several tokens from zero, even on a cache that has a state. Their caches pass the
  state to the wrapped scan (`rules.continuing`).
- MiniMax accepts only its own class, which keeps states in a list. The derived class keeps them in the layers.
- Layers with a sliding window drop the keys before it. The derived class keeps all keys, because segments and prefixes
  are stored whole; the model's mask hides the keys before the window.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_here = threading.local()  # continued: the state, and the number of tokens, of the next Mamba-1 scan of this thread


def cache_class(model: Any, base: Any = DynamicCache) -> Any:
    """Returns the class of caches for runs of `model`: `base`, a DynamicCache, or a class derived from it."""
    module = sys.modules[type(model).__module__]
    own = getattr(module, "MiniMaxCache", None)
    config = model.config.get_text_config(decoder=True)
    # Chunked attention has layers of the same class. Its chunks begin at fixed positions, so a segment cannot move.
    chunks = getattr(config, "attention_chunk_size", None) is not None
    windows = getattr(config, "sliding_window", None) is not None and not chunks
    return _derived(base, own, hasattr(module, "mamba_selective_scan"), windows)


@functools.cache
def _derived(base: Any, own: Any, scans: bool, windows: bool) -> Any:
    if own is not None:
        adapted = type(own.__name__, (_StatesInLayers, own), {})
        return adapted if base is DynamicCache else type(base.__name__, (base, adapted), {})
    mixins = (*((_ContinuedScans,) if scans else ()), *((_WholeWindows,) if windows else ()))
    return type(base.__name__, (*mixins, base), {}) if mixins else base


class WindowLayer(DynamicLayer):
    """A layer with a sliding window that keeps the keys and values of all tokens."""

    is_sliding = True  # models choose the mask of a layer by it


class _WholeWindows:
    """Mixin for the caches of models with sliding windows."""

    layers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers = [WindowLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self.layers]


class _ContinuedScans:
    """Mixin for the caches of Mamba-1 models."""

    layers: list[Any]

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        full: torch.Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
        layer = self.layers[layer_idx]  # its scan is the next one of this thread
        started = layer.is_recurrent_states_initialized[0]
        _here.continued = (layer.recurrent_states[0], conv_states.shape[-1]) if started else None
        return full


def take_continued(inputs: torch.Tensor) -> torch.Tensor | None:
    """Returns the state from which the scan of `inputs`, [1, channels, tokens], continues, or None: from zero."""
    continued, _here.continued = getattr(_here, "continued", None), None
    if continued is None:
        return None
    state, tokens = continued
    same = state.ndim == 3 and state.shape[:2] == inputs.shape[:2] and tokens == inputs.shape[-1]
    return state if same else None


def drop_continued() -> None:
    """Drops the state of a scan that did not run, because its layer failed."""
    _here.continued = None


class _StatesInLayers:
    """Mixin for MiniMaxCache: the states are in the layers of a DynamicCache."""

    layers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        DynamicCache.__init__(self, *args, **kwargs)  # type: ignore[arg-type]

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True

    __len__ = DynamicCache.__len__
    batch_repeat_interleave = DynamicCache.batch_repeat_interleave
    batch_select_indices = DynamicCache.batch_select_indices
