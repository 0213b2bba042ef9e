# SPDX-License-Identifier: Apache-2.0
"""The run of a segment alone, in one or several forward passes, and the tensors that it leaves to publish.

The engine's blocks carry the keys and values, the states and the inputs of convolutions from one part to the next. The
tuple of a part is composed with that of the parts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import ashlar
from ashlar.tensors import joined, segment_tuple
from ashlar.vllm.forward import Core, EngineModel
from ashlar.vllm.landed_tuples import state_shape
from ashlar.vllm.memory import States
from ashlar.vllm.messages import CONTINUES, Alone
from ashlar.vllm.model import LinearPlace
from ashlar.vllm.order import Mark, Order
from ashlar.vllm.segments import NORM_EPSILON


class Run:
    """Between two parts it holds, on the device, a tuple in float32 of each linear layer, and in CPU memory the keys and
    values of all tokens so far. The engine's thread and the composer's use it in turns."""

    alone: Alone  # the last part
    mark: Mark | None = None  # the engine's work up to the end of that part

    def __init__(self, states: Mapping[str, tuple[LinearPlace, States]], model: ashlar.Model) -> None:
        """`states`: of the linear layers, by name. `model`: the layout of segments."""
        self._states, self._model = states, model
        self.is_current: list[Callable[[], bool]] = []  # by part
        # In CPU memory, instead of a tuple, if there is only one part.
        self.rows: dict[str, dict[str, torch.Tensor]] = {}
        self.tuples: dict[str, tuple[torch.Tensor, ...]] = {}
        self.inputs: dict[str, torch.Tensor] = {}  # last inputs of the convolutions
        self.ends: dict[str, torch.Tensor] = {}  # states at the end of a first segment
        self.keys: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # keys and values by part

    @property
    def complete(self) -> bool:
        return self.alone.end == len(self.alone.tokens)

    @property
    def interior(self) -> tuple[int, int]:
        """Returns the begin and the end of what is stored."""
        last = len(self.alone.tokens)
        return (0, last) if self.alone.first else (self._model.head, last - self._model.tail)

    def prepare(self, alone: Alone, engine: EngineModel, is_current: Callable[[], bool]) -> Callable[[], None]:
        """Returns a function that computes the next part. `is_current`: whether its weights are those that the
        scheduler names."""
        self.alone = alone
        self.is_current.append(is_current)
        count = alone.end - alone.begin
        begin, end = (min(max(each - alone.begin, 0), count) for each in self.interior)  # rows of this part

        def at_linear(core: Core) -> None:
            name = core.name
            (place, states), decays = self._states[name], engine.decays(name)
            block, layer = alone.states[place.group], linear_of(self._model, place)
            rows = core.run_seen(count, block)
            if alone.first:
                if self.complete:
                    state = states.state(block).view(state_shape(layer))
                    self.ends[name] = state.to(torch.float32, copy=True)
            elif count == len(alone.tokens) and not core.normalized:
                self.rows[name] = rows
            elif begin < end:
                part = {each: row[begin:end] for each, row in rows.items()}
                if not core.normalized:
                    part["k"] = part["k"] * (part["k"].square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
                found = segment_tuple(layer, part, decays)
                self.tuples[name] = joined(layer, self.tuples[name], found, decays) if name in self.tuples else found
            inputs = core.inputs()[max(0, end - layer.conv_kernel + 1) : end]
            if name in self.inputs:
                inputs = torch.cat([self.inputs[name], inputs])
                inputs = inputs[max(0, len(inputs) - layer.conv_kernel + 1) :]
            self.inputs[name] = inputs.clone()

        def at_keys(name: str, key: torch.Tensor, value: torch.Tensor) -> None:
            self.keys.setdefault(name, []).append((key.clone(), value.clone()))

        tokens = alone.tokens[alone.begin : alone.end]
        return engine.prepare(tokens, alone.pages, at_linear, at_keys, start=alone.begin)

    def release_device(self, order: Order) -> int:
        """Moves to CPU memory the keys and values of the last part, and everything if the run is complete. Returns
        CONTINUES."""
        if self.mark is not None:
            self.mark.synchronize()
        with order.copies():
            for parts in self.keys.values():
                keys, values = parts[-1]
                parts[-1] = keys.cpu(), values.cpu()
            if self.complete:
                self.tuples = {name: tuple(each.cpu() for each in found) for name, found in self.tuples.items()}
                self.inputs = {name: inputs.cpu() for name, inputs in self.inputs.items()}
                self.ends = {name: state.cpu() for name, state in self.ends.items()}
        return CONTINUES


def linear_of(model: ashlar.Model, place: LinearPlace) -> ashlar.Linear:
    layer = model.layers[place.layer]
    assert isinstance(layer, ashlar.Linear)
    return layer
