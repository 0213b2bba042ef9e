# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine: what is computed with them is not cached by the name of the former ones.

A generation is the scheduler's name for a set of weights, empty for those of the start. A reset of the connector
begins another one. This watch finds weights that changed without a reset.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from vllm.logger import init_logger

from ashlar.vllm.identity import Unsupported
from ashlar.weights_watch import Sight, WeightsWatch

logger = init_logger("vllm.ashlar")


def model_of(layer: torch.nn.Module) -> Any:
    """The engine's whole model, as the owner of one of its layers: vLLM hands a connector none. Raises Unsupported."""
    found = None
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, torch.nn.Module) and hasattr(kind, "compute_logits") and layer in each.modules():
            if found is None or found in each.modules():
                found = each
    if found is None:
        raise Unsupported("cannot find the engine's model")
    return found


class Seen:
    """The weights at one step, which has a generation."""

    def __init__(self, weights: EngineWeights, generation: str, sight: Sight | None) -> None:
        self._weights, self.generation, self._sight = weights, generation, sight

    def current(self) -> bool:
        """Whether they are those of the generation. Waits for the device's work up to the step."""
        if self._sight is not None and self._sight.changed():
            self._weights.outdate(self.generation)
        return not self._weights.is_outdated(self.generation)


class EngineWeights:
    """`look` belongs to the engine's thread, the rest to any."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        offload = vllm_config.offload_config
        prefetched = offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0
        moves = prefetched or vllm_config.parallel_config.enable_eplb
        self._watch = WeightsWatch(model, sampled=not moves)
        self._generation = ""
        self._lock = threading.Lock()
        self._outdated: str | None = None  # guarded by lock_

    def begin(self, generation: str) -> None:
        """A step of this generation begins. Of a new one, whatever has changed has another name already."""
        if generation != self._generation:
            self._generation = generation  # first: what raises is not tried again in each step
            self._watch.accept()

    def look(self, generation: str) -> Seen:
        """At a step of this generation. Does not wait for the device's work."""
        self.begin(generation)
        return Seen(self, generation, None if self.is_outdated(generation) else self._watch.look())

    def outdate(self, generation: str) -> None:
        with self._lock:
            if self._outdated == generation:
                return
            self._outdated = generation
        logger.warning(
            "Ashlar: the model's weights have changed without a reset of the connector; the cache continues under a new "
            "identity, and objects stored before are no longer found"
        )

    def is_outdated(self, generation: str) -> bool:
        with self._lock:
            return self._outdated == generation
