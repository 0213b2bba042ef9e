# SPDX-License-Identifier: Apache-2.0
"""Detects that a model's weights differ from the ones for which its cache was opened."""

from __future__ import annotations

from typing import Any, NamedTuple

from ashlar.weights_watch import WeightsWatch


class Standing(NamedTuple):
    """A snapshot of a model, from one walk over its modules."""

    training: bool  # any part is in training mode
    adapters: str  # adapters in use: in each layer the active or merged ones, and their scales; "": none
    tensors: dict[str, tuple[int, int]]  # address and version of each parameter and buffer


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _adapted(module: Any) -> bool:
    """Returns whether this is one of PEFT's layers, which are recognized by their attributes."""
    return isinstance(getattr(type(module), "active_adapters", None), property)


def adapter_tensors(model: Any) -> dict[str, Any]:
    """Returns the tensors of PEFT's layers by name, without those of the layers that they adapt."""
    return {
        f"{name}.{own}": tensor
        for name, module in model.named_modules()
        if _adapted(module)
        for own, tensor in module.state_dict().items()
        if not own.startswith("base_layer.")
    }


def standing(model: Any) -> Standing:
    """Returns the model's current snapshot."""
    training, adapters, tensors = False, [], {}
    for name, module in model.named_modules():
        training |= module.training
        for part in (module._parameters, module._buffers):
            for own, tensor in part.items():
                if tensor is not None:
                    tensors[f"{name}.{own}"] = (tensor.data_ptr(), _version(tensor))
        if _adapted(module):
            active = [] if module.disable_adapters else list(module.active_adapters)
            scales = getattr(module, "scaling", None) or {}
            merged = list(getattr(module, "merged_adapters", ()))
            adapters.append((name, merged, [(adapter, scales.get(adapter)) for adapter in active]))
    return Standing(training, repr(adapters) if adapters else "", tensors)


class Weights:
    """The weights of one model when this object is created.

    A replaced tensor has a different address, and an in-place operation raises its version. Operations on `Tensor.data`
    do neither; WeightsWatch detects these by comparing some elements of each parameter.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = standing(model).tensors
        self._watch = WeightsWatch(model)

    def changed(self, now: Standing) -> bool:
        """Returns whether the weights differ from those when this object was created. `now`: `standing` of the
        model."""
        return any(now.tensors.get(name) != seen for name, seen in self._tensors.items()) or self._watch.changed()
