# SPDX-License-Identifier: Apache-2.0
"""Detects that the weights of a model in memory have changed. Entries cached before then belong to another model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_SAMPLES = 256  # elements of each parameter
# Compared as bytes, so that NaN equals itself.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Places(NamedTuple):
    """Elements spread over a parameter."""

    elements: int
    step: int
    offset: int  # elements from the start of the storage
    size: int  # bytes of an element


def _places(parameter: torch.Tensor) -> _Places | None:
    """Returns None if the parameter's type has no view of these elements."""
    numbers, size = parameter.numel(), parameter.element_size()
    if (
        numbers == 0
        or size not in _INTEGERS
        or type(parameter.data) is not torch.Tensor
        or parameter.layout is not torch.strided
    ):
        return None
    count = min(_SAMPLES, numbers)
    step = max(1, numbers // count)
    step -= step > 1 and step % 2 == 0  # an odd step spreads the samples of a matrix over many columns
    offset = parameter.storage_offset()
    if offset + (count - 1) * step >= parameter.untyped_storage().nbytes() // size:
        return None
    return _Places(count, step, offset, size)


class _Memory:
    """Elements in CPU memory, for NumPy. It does not keep the memory allocated."""

    def __init__(self, places: _Places, address: int) -> None:
        """`address`: start of the storage."""
        self.__array_interface__ = {
            "version": 3,
            "data": (address + places.offset * places.size, True),
            "shape": (places.elements,),
            "strides": (places.step * places.size,),
            "typestr": np.dtype(f"i{places.size}").str,
        }


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


class _Parameter:
    """A parameter, which this object does not keep alive.

    Attributes:
        places: its sampled elements; None: none.
        near: a view of these elements if they are in CPU memory. Read it only while `mark` holds.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.get = weakref.ref(parameter)
        self.places = None if parameter.is_meta else _places(parameter)
        self.near: npt.NDArray[Any] | None = None
        if self.places is not None and parameter.device.type == "cpu":
            self.near = np.asarray(_Memory(self.places, parameter.untyped_storage().data_ptr()))

    def mark(self, held: list[Any]) -> Any:
        """Returns what any change except a write through `.data` changes. Appends to `held` what keeps the elements
        allocated."""
        parameter = self.get()
        if parameter is None or parameter.is_meta:
            return None
        if self.places is None:
            return parameter.data_ptr(), parameter.numel(), parameter.dtype, _version(parameter)
        try:
            storage = parameter.untyped_storage()
        except (RuntimeError, NotImplementedError) as error:  # its type has changed
            return str(error)
        held += parameter, storage
        place = storage.data_ptr(), storage.nbytes(), parameter.storage_offset()
        return *place, parameter.numel(), parameter.dtype, _version(parameter)


class Sight:
    """A comparison of the weights, at one point of the device's work, with the accepted weights."""

    def __init__(self, marked: bool, differences: list[Any]) -> None:
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

    def _marks(self, held: list[Any]) -> list[Any]:
        """Returns the parameters' marks. `held`: as for `_Parameter.mark`."""
        return [self._loads, *(each.mark(held) for each in self._parameters)]

    def _samples(self) -> dict[Any, Any]:
        """Returns the parameters' samples, by device and size. Call it while the known marks hold."""
        samples: dict[Any, Any] = {size: np.concatenate(views) for size, views in self._near.items()}
        far: dict[Any, list[torch.Tensor]] = {}
        with torch.no_grad():
            for each in self._far:
                parameter, places = each.get(), each.places
                if parameter is not None and places is not None:
                    view = parameter.as_strided((places.elements,), (places.step,), places.offset)
                    far.setdefault((parameter.device, places.size), []).append(view.view(_INTEGERS[places.size]))
        return samples | {key: torch.cat(views) for key, views in far.items()}

    def look(self) -> Sight:
        """Compares the weights with the accepted ones, in the order of the device's work. Does not wait for the device.

        Engines wait for it in each step that saves. Samples in CPU memory are therefore read through views that are
        made once.
        """
        held: list[Any] = []
        if self._marks(held) != self._known_marks:
            return Sight(True, [])
        samples, known = self._samples(), self._known
        if samples.keys() != known.keys():
            return Sight(True, [])
        return Sight(False, [(samples[key] != known[key]).any() for key in samples])

    def changed(self) -> bool:
        return self.look().changed()

    def accept(self) -> None:
        """Makes the current weights the ones with which later weights are compared."""
        model = self._model()
        listed = list(model.parameters()) if model is not None and self._sampled else []
        self._parameters = [_Parameter(each) for each in listed]
        self._near: dict[int, list[npt.NDArray[Any]]] = {}
        for each in self._parameters:
            if each.near is not None:
                self._near.setdefault(each.near.itemsize, []).append(each.near)
        self._far = [each for each in self._parameters if each.near is None and each.places is not None]
        self._known_marks = self._marks([])
        self._known = self._samples()
