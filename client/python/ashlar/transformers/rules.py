# SPDX-License-Identifier: Apache-2.0
"""The recurrences of Transformers' linear layers: what a layer passes to its rule, in the form that kernels take.

Every linear layer of Transformers calls one function of its module with all tokens of a run, its *rule*. A tape records
these calls while a model runs, together with the convolution's inputs. A recorded call yields the rows for
`Cache.compute_alone`. Running the rule again from zero and from the identity yields the state and the transition of any
part of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from ashlar.model import Family, StateOrder

_here = threading.local()
_wrapping = threading.RLock()  # rules are wrapped in modules that several models may share


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a rule, with its arguments by name. Tensors are [1, tokens, heads, dim]."""

    rule: Rule
    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def start(self) -> torch.Tensor | None:
        """The state before the call's first token; None: zero."""
        return self.arguments.get(self.rule.initial)

    def rows(self, key_heads: int) -> dict[str, torch.Tensor]:
        """Returns q, k, v, g and beta as the kernels take them: normalized, scaled, one key per key head; float32."""
        rows = self.rule.rows(self.arguments, key_heads)
        return {name: row[0].float().cpu().contiguous() for name, row in rows.items()}

    def tuple_by_identity(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the state from zero and the transition of tokens [begin, end), computed by the rule itself."""
        part = {
            name: value[:, begin:end] if name in self.rule.by_token and value is not None else value
            for name, value in self.arguments.items()
        }
        return self.rule.identity(self.function, part)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The recurrence of a kind of linear layer, which the model's module has as a function."""

    function: str  # name of the function in the module of the model
    family: Family
    order: StateOrder
    positional: tuple[str, ...]  # names of the arguments without keywords
    by_token: frozenset[str]  # arguments with one row per token: [1, tokens, …]
    initial: str  # name of the argument for the first state
    rows: Callable[[dict[str, Any], int], dict[str, torch.Tensor]]
    identity: Callable[[Callable[..., Any], dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def _normed(rows: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    rows = rows.float()
    if arguments.get("use_qk_l2norm_in_kernel"):
        rows = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)
    return rows


def _delta_rows(arguments: dict[str, Any], key_heads: int) -> dict[str, torch.Tensor]:
    repeated = arguments["key"].shape[2] // key_heads
    query, key = (_normed(arguments[name][:, :, ::repeated], arguments) for name in ("query", "key"))
    return {
        "q": query * query.shape[-1] ** -0.5,
        "k": key,
        "v": arguments["value"],
        "g": arguments["g"],
        "beta": arguments["beta"],
    }


def _delta_identity(function: Callable[..., Any], part: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    part = {**part, "initial_state": None, "output_final_state": True}
    _, state = function(**part)
    value = part["value"]
    _, _, heads, d_k = part["key"].shape
    heads = value.shape[2]
    eye = torch.eye(d_k, dtype=torch.float32, device=value.device).expand(1, heads, d_k, d_k).contiguous()
    nothing = value.new_zeros(*value.shape[:3], d_k)
    _, transition = function(**{**part, "value": nothing, "initial_state": eye})
    return state[0], transition[0]


def _steps(arguments: dict[str, Any]) -> torch.Tensor:
    dt = arguments["dt"]
    if arguments.get("dt_bias") is not None:
        dt = dt + arguments["dt_bias"].to(dt.dtype)
    if arguments.get("dt_softplus"):
        dt = torch.nn.functional.softplus(dt)
    low, high = arguments.get("dt_limit", (0.0, float("inf")))
    return dt.clamp(low, high)


def _mamba2_rows(arguments: dict[str, Any], key_heads: int) -> dict[str, torch.Tensor]:
    return {"q": arguments["C"], "k": arguments["B"], "v": arguments["hidden_states"], "beta": _steps(arguments)}


def _mamba2_identity(function: Callable[..., Any], part: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    part = {**part, "return_final_states": True}
    part["initial_states"] = None
    _, state = function(**part)
    # A scalar transition is stored as its logarithm, the sum of the steps' logarithms, because the product would
    # underflow.
    return state[0], (_steps(part).float() * part["A"].float()).sum(1)[0]


_DELTA = ("query", "key", "value", "g", "beta")
RULES = {
    rule.function: rule
    for rule in (
        Rule("torch_chunk_gated_delta_rule", Family.GDN, StateOrder.KEY_FIRST, _DELTA, frozenset(_DELTA),
             "initial_state", _delta_rows, _delta_identity),
        Rule("chunk_kimi_delta_attention", Family.KDA, StateOrder.KEY_FIRST, _DELTA, frozenset(_DELTA),
             "initial_state", _delta_rows, _delta_identity),
        Rule("mamba2_chunk_scan", Family.MAMBA2, StateOrder.VALUE_FIRST, ("hidden_states", "dt", "A", "B", "C"),
             frozenset(("hidden_states", "dt", "B", "C")), "initial_states", _mamba2_rows, _mamba2_identity),
    )
}  # fmt: skip


class Tape(DynamicCache):
    """A model's cache that also records what each linear layer passes to its convolution and its rule."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.inputs: dict[int, torch.Tensor] = {}
        self.calls: dict[int, Call] = {}
        self._layer: int | None = None

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inputs[layer_idx] = conv_states
        self._layer = layer_idx
        full: torch.Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return full

    def take(self, call: Call) -> None:
        if self._layer is not None:
            self.calls[self._layer] = call

    def tail(self, layer_idx: int, end: int, kernel: int) -> torch.Tensor:
        """Returns the convolution's inputs before token `end` of a run that began at token 0: [channels, kernel −
        1]."""
        inputs = self.inputs[layer_idx][0, :, max(0, end - kernel + 1) : end]
        return torch.nn.functional.pad(inputs, (kernel - 1 - inputs.shape[-1], 0)).contiguous()

    @contextlib.contextmanager
    def recording(self, model: Any) -> Iterator[None]:
        """Records runs of `model` in this thread within the block, in which the rules of the model's module are
        wrapped."""
        with _wrapping, self._wrapped_rules(sys.modules[type(model).__module__]):
            yield

    @contextlib.contextmanager
    def _wrapped_rules(self, module: Any) -> Iterator[None]:
        before = {name: getattr(module, name) for name in RULES if hasattr(module, name)}
        outer = getattr(_here, "tape", None)
        _here.tape = self
        for name, function in before.items():
            setattr(module, name, _wrapped(RULES[name], function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(module, name, function)
            _here.tape = outer


def _wrapped(rule: Rule, function: Callable[..., Any]) -> Callable[..., Any]:
    def record_call(*args: Any, **kwargs: Any) -> Any:
        tape: Tape | None = getattr(_here, "tape", None)
        if tape is not None:
            tape.take(Call(rule, function, {**dict(zip(rule.positional, args, strict=False)), **kwargs}))
        return function(*args, **kwargs)

    return record_call
