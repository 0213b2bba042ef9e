# SPDX-License-Identifier: Apache-2.0
"""The recurrences of Transformers' linear layers: what a layer passes to its rule, in the form that kernels take.

Every linear layer of Transformers calls one function of its module with all tokens of a run, its *rule*. A tape records
these calls while a model runs, together with the convolution's inputs. Lightning attention has no such function: the
layer itself is its rule. A recorded call yields the rows for `Cache.compute_alone`. Running the rule again from zero and
from the identity yields the state and the transition of any part of the run.

Mamba-1's rule has no argument for the first state. Within `continuing`, this module adds the first state's contribution
to the rule's results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from ashlar.model import Family, StateOrder
from ashlar.transformers import caches

_MAX_HEAD_DIM = 256  # largest d_v of the kernels
_PART = 256  # tokens of a continued scan whose states are in memory at once

_here = threading.local()  # tape: the one that records calls of this thread, or None
_lock = threading.Lock()
_wrapped: dict[str, tuple[int, dict[str, Any]]] = {}  # by module: number of blocks, its own rules


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a rule, with its arguments by name. Tensors are [1, tokens, heads, dim]; Mamba-1: [1, dim, tokens]."""

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
            name: value.narrow(self.rule.token_dim, begin, end - begin)
            if name in self.rule.by_token and value is not None
            else value
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
    decay: Callable[[dict[str, Any]], torch.Tensor] | None = None  # Linear.decay_table, in any shape
    token_dim: int = 1  # dimension of the tokens in the arguments `by_token`


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


def mamba1_heads(state: torch.Tensor) -> torch.Tensor:
    """Cuts channels, [1, channels, …], into heads that the kernels take: [heads, channels of a head, …]."""
    channels = state.shape[1]
    width = next(width for width in range(min(channels, _MAX_HEAD_DIM), 0, -1) if channels % width == 0)
    return state.reshape(channels // width, width, *state.shape[2:])


def _mamba1_steps(arguments: dict[str, Any]) -> torch.Tensor:
    dt: torch.Tensor = arguments["dt"]
    if arguments.get("delta_bias") is not None:
        dt = dt + arguments["delta_bias"].to(dt.dtype)[:, None]
    return torch.nn.functional.softplus(dt) if arguments.get("delta_softplus") else dt


def _mamba1_rows(arguments: dict[str, Any], key_heads: int) -> dict[str, torch.Tensor]:
    rows = {"q": arguments["C"], "k": arguments["B"], "v": arguments["hidden_states"], "beta": _mamba1_steps(arguments)}
    return {name: row.transpose(1, 2) for name, row in rows.items()}  # [1, tokens, channels]: the heads are adjacent


def _mamba1_identity(function: Callable[..., Any], part: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    options = {name: value for name, value in part.items() if name not in (*_SCAN, "initial_state")}
    # mamba-ssm's function has other names for these.
    _, state = function(*(part[name] for name in _SCAN), **{**options, "return_last_state": True})
    return mamba1_heads(state), mamba1_heads(_mamba1_steps(part).float().sum(2))


def _mamba1_decay(arguments: dict[str, Any]) -> torch.Tensor:
    return mamba1_heads(arguments["A"].unsqueeze(0)).transpose(1, 2)  # [heads, d_k, d_v] in either order of the state


def _continue_scan(result: Any, arguments: dict[str, Any]) -> Any:
    """Adds what the first state contributes to the outputs and the last state of a scan from zero."""
    with_last = bool(arguments.get("return_last_state"))
    outputs, last = result if with_last else (result, None)
    gate, sums = arguments.get("z"), _mamba1_steps(arguments).float().cumsum(2)
    table, state = arguments["A"].float()[None, :, None], arguments["initial_state"].float()[:, :, None]
    added = []
    for steps, read in zip(sums.split(_PART, 2), arguments["C"].float().split(_PART, 2), strict=True):
        decayed = (table * steps[..., None]).exp() * state  # [1, channels, tokens, d_state]
        added.append((decayed * read.transpose(1, 2)[:, None]).sum(-1))
    more = torch.cat(added, 2)
    if gate is not None:
        more = more * torch.nn.functional.silu(gate.float())
    outputs = (outputs + more).to(outputs.dtype)
    if last is None:
        return outputs
    return outputs, (last + decayed[:, :, -1]).to(last.dtype)


def _lightning_rows(arguments: dict[str, Any], key_heads: int) -> dict[str, torch.Tensor]:
    attention = arguments["attention"]
    qkv = attention.act_fn(arguments["qkv"]).unflatten(-1, (key_heads, -1))
    return dict(zip("qkv", qkv.chunk(3, -1), strict=True))


class _OneState:
    """A cache for one run of one layer of lightning attention, from zero."""

    state: torch.Tensor

    def get_linear_cache(self, layer_idx: int) -> None:
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.state = linear_cache


@torch.no_grad()
def _lightning_identity(function: Callable[..., Any], part: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    found, hidden = _OneState(), part["hidden_states"]
    function(hidden, None, None, found)  # without rotation and mask
    return found.state[0], hidden.shape[1] * _lightning_decay(part)


def _lightning_decay(arguments: dict[str, Any]) -> torch.Tensor:
    slopes: torch.Tensor = arguments["attention"].slope_rate.detach().float()
    return -slopes.flatten()


_SCAN = ("hidden_states", "dt", "A", "B", "C")
_DELTA = ("query", "key", "value", "g", "beta")
RULES = {
    rule.function: rule
    for rule in (
        Rule("torch_chunk_gated_delta_rule", Family.GDN, StateOrder.KEY_FIRST, _DELTA, frozenset(_DELTA),
             "initial_state", _delta_rows, _delta_identity),
        Rule("chunk_kimi_delta_attention", Family.KDA, StateOrder.KEY_FIRST, _DELTA, frozenset(_DELTA),
             "initial_state", _delta_rows, _delta_identity),
        Rule("mamba2_chunk_scan", Family.MAMBA2, StateOrder.VALUE_FIRST, _SCAN,
             frozenset(("hidden_states", "dt", "B", "C")), "initial_states", _mamba2_rows, _mamba2_identity,
             lambda arguments: arguments["A"]),
        Rule("mamba_selective_scan", Family.MAMBA1, StateOrder.VALUE_FIRST, (*_SCAN, "D", "z", "delta_bias"),
             frozenset(("hidden_states", "dt", "B", "C", "z")), "initial_state", _mamba1_rows, _mamba1_identity,
             _mamba1_decay, 2),
    )
}  # fmt: skip
LIGHTNING = Rule("", Family.LIGHTNING, StateOrder.KEY_FIRST, (), frozenset(("hidden_states",)), "initial_state",
                 _lightning_rows, _lightning_identity, _lightning_decay)  # fmt: skip


@contextlib.contextmanager
def _wrapping(model: Any) -> Iterator[None]:
    """Wraps the rules in the model's module until the last block ends. Models and threads may share a module."""
    name = type(model).__module__
    module = sys.modules[name]
    with _lock:
        blocks, own = _wrapped.get(name, (0, {}))
        if blocks == 0:
            own = {rule: getattr(module, rule) for rule in RULES if hasattr(module, rule)}
            for rule, function in own.items():
                setattr(module, rule, _wrap(RULES[rule], function))
        _wrapped[name] = blocks + 1, own
    try:
        yield
    finally:
        caches.drop_continued()
        with _lock:
            blocks, own = _wrapped.pop(name)
            if blocks > 1:
                _wrapped[name] = blocks - 1, own
            else:
                for rule, function in own.items():
                    setattr(module, rule, function)


def continuing(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within the block, Mamba-1 scans on a cache of `caches.cache_class` continue from the cache's state."""
    scans = hasattr(sys.modules[type(model).__module__], "mamba_selective_scan")
    return _wrapping(model) if scans else contextlib.nullcontext()


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
        """Records runs of `model` in this thread within the block."""
        attention = getattr(sys.modules[type(model).__module__], "MiniMaxLightningAttention", ())
        layers = [module for module in model.modules() if isinstance(module, attention)]
        outer = getattr(_here, "tape", None)
        with _wrapping(model), contextlib.ExitStack() as hooks:
            for layer in layers:
                hook = layer.qkv_proj.register_forward_hook(functools.partial(self._take_projected, layer))
                hooks.callback(hook.remove)
            _here.tape = self
            try:
                yield
            finally:
                _here.tape = outer

    def _take_projected(self, layer: Any, projection: Any, inputs: tuple[torch.Tensor, ...], qkv: torch.Tensor) -> None:
        if getattr(_here, "tape", None) is self:
            before = self.get_linear_cache(layer.layer_idx)  # type: ignore[attr-defined]
            arguments = {"hidden_states": inputs[0], "qkv": qkv, "attention": layer, LIGHTNING.initial: before}
            self.calls[layer.layer_idx] = Call(LIGHTNING, layer, arguments)


def _wrap(rule: Rule, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(rule.positional, args, strict=False)), **kwargs}
        continued = caches.take_continued(arguments["hidden_states"]) if rule.family is Family.MAMBA1 else None
        if continued is not None:
            arguments[rule.initial] = continued
        tape: Tape | None = getattr(_here, "tape", None)
        if tape is not None:
            tape.take(Call(rule, function, arguments))
        result = function(*args, **kwargs)
        return result if continued is None else _continue_scan(result, arguments)

    return call
