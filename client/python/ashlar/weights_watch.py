# SPDX-License-Identifier: Apache-2.0
"""Detects that the weights of a model in memory have changed. Entries cached before then belong to another model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_SAMPLES = 256  # elements of each parameter
# Compared as bytes, so that NaN equals itself.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Places(NamedTuple):
    """Elements spread over a parameter."""

    elements: int
    step: int
    offset: int  # elements from the start of the storage
    kind: torch.dtype  # an integer of the elements' size


def _places(parameter: torch.Tensor) -> _Places | None:
    """Returns None if the parameter's type has no view of these elements."""
    numbers = parameter.numel()
    kind = _INTEGERS.get(parameter.element_size())
    if (
        numbers == 0
        or kind is None
        or type(parameter.data) is not torch.Tensor
        or parameter.layout is not torch.strided
    ):
        return None
    count = min(_SAMPLES, numbers)
    step = max(1, numbers // count)
    step -= step > 1 and step % 2 == 0  # an odd step spreads the samples of a matrix over many columns
    offset = parameter.storage_offset()
    if offset + (count - 1) * step >= parameter.untyped_storage().nbytes() // parameter.element_size():
        return None
    return _Places(count, step, offset, kind)


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


class Sight:
    """A comparison of the weights, at one point of the device's work, with the accepted weights."""

    def __init__(self, marked: bool, differences: list[torch.Tensor]) -> None:
        self._marked, self._differences = marked, differences

    def changed(self) -> bool:
        """Returns whether the weights differ. Waits for the device's work up to that point."""
        return self._marked or any(bool(each) for each in self._differences)


class WeightsWatch:
    """Compares a model's parameters with those at the last `accept`, or at the start.

    There are three signs of a change: a call of `load_weights`; the address, size, type and version counter of each
    parameter; and samples of its elements, because a write through `.data` leaves no other trace. A write that changes
    no sample is not detected. `sampled` False: for engines that move weights while they run; then only `load_weights`
    is a sign.
    """

    def __init__(self, model: Any, sampled: bool = True) -> None:
        self._loads = 0
        self._model, self._sampled = weakref.ref(model), sampled
        if callable(getattr(model, "load_weights", None)):
            model.load_weights = self._hooked(model.load_weights)
        self.accept()

    def _hooked(self, own: Callable[..., Any]) -> Callable[..., Any]:
        watch = weakref.ref(self)

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            if (watching := watch()) is not None:
                watching._loads += 1
            return own(*args, **kwargs)

        return load_weights

    def _look(self) -> tuple[list[Any], dict[Any, torch.Tensor]]:
        """Returns marks and samples of the parameters. Only makes views, because engines wait for it in each step that
        saves."""
        marks: list[Any] = [self._loads]
        samples: dict[Any, list[torch.Tensor]] = {}
        with torch.no_grad():
            for each, places in zip(self._parameters, self._sampled_places):
                parameter = each()
                if parameter is None or parameter.device.type == "meta":
                    marks.append(None)
                    continue
                marks.append((parameter.data_ptr(), parameter.numel(), parameter.dtype, _version(parameter)))
                if places is None:
                    continue
                try:
                    view = parameter.as_strided((places.elements,), (places.step,), places.offset).view(places.kind)
                except (RuntimeError, NotImplementedError) as error:  # its storage or its type has changed
                    marks.append(str(error))
                    continue
                samples.setdefault((parameter.device, places.kind), []).append(view)
        return marks, {key: torch.cat(views) for key, views in samples.items()}

    def look(self) -> Sight:
        """Compares the weights with the accepted ones, in the order of the device's work. Does not wait for the
        device."""
        marks, samples = self._look()
        before, known = self._known
        if marks != before or samples.keys() != known.keys():
            return Sight(True, [])
        return Sight(False, [(samples[key] != known[key]).any() for key in samples])

    def changed(self) -> bool:
        return self.look().changed()

    def accept(self) -> None:
        """Makes the current weights the ones with which later weights are compared."""
        model = self._model()
        listed = list(model.parameters()) if model is not None and self._sampled else []
        self._parameters = [weakref.ref(each) for each in listed]
        self._sampled_places = [None if each.device.type == "meta" else _places(each) for each in listed]
        self._known = self._look()
