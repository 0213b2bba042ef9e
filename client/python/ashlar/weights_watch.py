# SPDX-License-Identifier: Apache-2.0
"""Notices that the weights of a model in memory are other ones: what is cached of it is then another model's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

_SAMPLES = 256  # elements of each parameter
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: NaN is equal to itself


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """A view of elements spread over a parameter; None: of a kind that has no such view."""
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
    step -= step > 1 and step % 2 == 0  # odd, so that the samples of a matrix lie in many columns
    offset = parameter.storage_offset()
    if offset + (count - 1) * step >= parameter.untyped_storage().nbytes() // parameter.element_size():
        return None
    return torch.as_strided(parameter.detach(), (count,), (step,), offset).view(kind)


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


class Sight:
    """The weights at one point of the device's work, beside those that are known."""

    def __init__(self, marked: bool, differences: list[torch.Tensor]) -> None:
        self._marked, self._differences = marked, differences

    def changed(self) -> bool:
        """Waits for the device's work up to the look."""
        return self._marked or any(bool(each) for each in self._differences)


class WeightsWatch:
    """Compares a model's parameters with those of the last `accept`, or of the start.

    Three signs: a call of `load_weights`; the address and the version counter of each parameter; and samples of its
    elements, as a write through `.data` leaves no other trace. A write that leaves all samples as they were is not seen.
    `sampled` False: for engines that move weights about as they run; `load_weights` alone is a sign then.
    """

    def __init__(self, model: Any, sampled: bool = True) -> None:
        self._told = 0
        self._model, self._sampled = weakref.ref(model), sampled
        if callable(getattr(model, "load_weights", None)):
            model.load_weights = self._hooked(model.load_weights)
        self.accept()

    def _hooked(self, own: Callable[..., Any]) -> Callable[..., Any]:
        watch = weakref.ref(self)

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            if (told := watch()) is not None:
                told._told += 1
            return own(*args, **kwargs)

        return load_weights

    def _look(self) -> tuple[list[Any], dict[Any, torch.Tensor]]:
        marks: list[Any] = [self._told]
        samples: dict[Any, list[torch.Tensor]] = {}
        for each in self._parameters:
            parameter = each()
            if parameter is None or parameter.device.type == "meta":
                marks.append(None)
                continue
            marks.append((parameter.data_ptr(), _version(parameter)))
            sample = None
            with contextlib.suppress(RuntimeError, NotImplementedError), torch.no_grad():
                sample = _sample(parameter)
            if sample is not None:
                samples.setdefault((parameter.device, sample.dtype), []).append(sample)
        return marks, {key: torch.cat(views) for key, views in samples.items()}

    def look(self) -> Sight:
        """Does not wait for the device."""
        marks, samples = self._look()
        before, known = self._known
        if marks != before or samples.keys() != known.keys():
            return Sight(True, [])
        return Sight(False, [(samples[key] != known[key]).any() for key in samples])

    def changed(self) -> bool:
        return self.look().changed()

    def accept(self) -> None:
        """Takes the weights as they are now for the known ones."""
        model = self._model()
        listed = model.parameters() if model is not None and self._sampled else ()
        self._parameters = [weakref.ref(each) for each in listed]
        self._known = self._look()
