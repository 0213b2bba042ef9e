# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine: texts computed with the new weights are not cached under the name of the old
ones.

A generation is the scheduler's name for a set of weights; it is empty for the initial weights. A reset of the connector
begins a new generation. This watch detects weights that changed without a reset.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import Counter
from typing import Any

import torch
from vllm.logger import init_logger

from ashlar.vllm.adapters import AdapterLoad, LoadedAdapters, Report
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.messages import StepMetadata
from ashlar.vllm.order import Order
from ashlar.weights_watch import Sight, WeightsWatch

logger = init_logger("vllm.ashlar")


def model_of(layer: torch.nn.Module) -> Any:
    """Returns the engine's whole model, found as the owner of one of its layers, because vLLM gives a connector no
    model. Raises Unsupported."""
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
    """The weights at one step of a generation."""

    def __init__(self, weights: EngineWeights, generation: str, sight: Sight | None) -> None:
        self._weights, self.generation, self._sight = weights, generation, sight

    def current(self) -> bool:
        """Returns whether the weights are the generation's. Waits for the device's work up to the step."""
        if self._sight is not None and self._sight.changed():
            self._weights.outdate(self.generation)
        return not self._weights.is_outdated(self.generation)


class EngineWeights:
    """`begin` is for the engine's thread, all else for any thread."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        offload = vllm_config.offload_config
        prefetched = offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0
        moves = prefetched or vllm_config.parallel_config.enable_eplb
        self._watch = WeightsWatch(model, sampled=not moves)
        self._generation = ""
        self._lock = threading.Lock()
        self._outdated: str | None = None  # guarded by lock_

    def begin(self, generation: str) -> None:
        """Call it when a step of this generation begins. For a new generation, earlier changes of weights already have
        another name."""
        if generation != self._generation:
            self._generation = generation  # assigned first, so that a failing check is not retried in each step
            self._watch.accept()

    def look(self, generation: str) -> Seen:
        """Call after `begin` of this generation. Does not wait for the device's work."""
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


class StepWeights:
    """The weights and adapters at the steps of a worker. Call `begin` on the engine's thread, other methods on any
    thread."""

    def __init__(self) -> None:
        self._weights: EngineWeights | None = None  # None: not watched
        self._adapters: LoadedAdapters | None = None  # None: the engine has no adapters
        self._outdated: queue.SimpleQueue[str] = queue.SimpleQueue()  # generations whose weights have changed

    def watch(self, vllm_config: Any, layer: torch.nn.Module) -> None:
        """`layer`: one of the model's layers. Raises Unsupported if changes of its weights cannot be detected."""
        model = model_of(layer)
        self._weights = EngineWeights(vllm_config, model)
        if vllm_config.lora_config is not None:
            self._adapters = LoadedAdapters(model)

    def begin(self, step: StepMetadata) -> None:
        if self._weights is None or step.generation is None:
            return
        try:
            self._weights.begin(step.generation)
        except Exception:  # after any error the step's loads end
            logger.exception("Ashlar: cannot check the model's weights")
            self._weights.outdate(step.generation)

    def look(self, step: StepMetadata) -> Seen | None:
        """Returns the weights at this step. None: they are not watched."""
        if self._weights is None or step.generation is None:
            return None
        try:
            return self._weights.look(step.generation)
        except Exception:  # after any error the step's loads and saves end
            logger.exception("Ashlar: cannot check the model's weights")
            self._weights.outdate(step.generation)
            return Seen(self._weights, step.generation, None)

    def are_current(self, seen: Seen | None, order: Order) -> bool:
        """Returns whether the weights are those that the scheduler has named. If not, `take_outdated` returns it."""
        if seen is None:
            return True
        with order.copies():  # the engine's stream already has its next step
            current = seen.current()
        if not current:
            self._outdated.put(seen.generation)
        return current

    def look_at_adapters(self, step: StepMetadata, reports: Counter[Report]) -> None:
        if self._adapters is not None and step.generation is not None:
            self._adapters.look(step.number, step.adapters, reports)

    def has_adapter(self, load: AdapterLoad | None) -> bool:
        return load is None or (self._adapters is not None and self._adapters.has(load))

    def take_outdated(self) -> Counter[str]:
        """Returns the generations whose weights have changed, since the last call."""
        found: Counter[str] = Counter()
        while not self._outdated.empty():
            found[self._outdated.get()] += 1
        return found

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
