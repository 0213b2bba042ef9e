"""Transformers with Ashlar: `generate` and `forward` of a model reuse exact prefixes, and segments at any position.

    cache = ashlar.cache_for(model, daemon)
    with ashlar.attach(model, cache):
        model.generate(ashlar.Prompt([instructions, document, another], question))

Within `attach` the model's `generate` and `forward` also take an `ashlar.Prompt`; its segments are published when they
are first seen, and reused in any order afterwards. Plain `input_ids` reuse exact prefixes. A cache fault is a miss: the
prompt is then computed as without Ashlar, and `Reuse.last` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ashlar.daemon import Daemon
from ashlar.prompt import Prompt
from ashlar.transformers.model import describe
from ashlar.transformers.setting import Fault, ModelCache, Setter, Setting

_log = logging.getLogger("ashlar.transformers")


@dataclasses.dataclass(frozen=True)
class Served:
    """How the last prompt was set."""

    tokens: int
    cached_tokens: int  # of them taken from the cache
    published: int  # segments computed alone and published first
    exact: bool  # the same states as without the cache; False: composed
    misses: dict[int, str]  # segments that were computed, and why
    commits: list[str]  # what became of the states that were offered
    fault: str | None  # the prompt was computed without the cache, because of this
    tiers: dict[str, int] = dataclasses.field(default_factory=dict)  # the cached tokens, by the tier that they lay in
    seconds_saved: float = 0.0  # prefill time of these tokens at the recent rate, less what the cache took


class Reuse:
    """The object that `with ashlar.attach(...) as reuse` gives."""

    def __init__(self, setter: Setter) -> None:
        self.setter = setter
        self.last: Served | None = None
        self.faults = 0
        self.tokens_saved: Counter[tuple[str, str]] = Counter()  # by tier and kind: exact, composed
        self.seconds_saved = 0.0
        self.lock = threading.RLock()  # a model, and its pages, serve one prompt at a time


def cache_for(
    model: Any,
    daemon: Daemon | tuple[str, str],
    *,
    tokens: int = 16384,
    head: int = 8,
    tail: int = 8,
    page_tokens: int = 16,
    weights_digest: str | None = None,
    capture_tokens: int = 64,
    epsilon: float = 1e-6,
    **options: Any,
) -> ModelCache:
    """Opens a cache for a model of Transformers.

    `daemon`: of `ashlar.daemon.start`, or its (rpc socket, session socket). `tokens`: room for keys and values of the
    prompt that is served, with its answer. `head`, `tail`: the seams' widths. `weights_digest`: names the weights;
    without it they are hashed, all of them. ValueError: the model, or the version of transformers, cannot be served.
    """
    rpc_socket, session_socket = daemon if isinstance(daemon, tuple) else (daemon.rpc_socket, daemon.session_socket)
    described, shape = describe(model, weights_digest, head, tail, page_tokens)
    return ModelCache(
        described, shape, rpc_socket, session_socket, pages=-(-tokens // page_tokens), name="transformers",
        capture_tokens=capture_tokens, epsilon=epsilon, **options,
    )  # fmt: skip


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KNOWN = {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "inputs_embeds", "return_dict", "use_cache"}


def _plain(ids: Any, arguments: dict[str, Any]) -> bool:
    """Whether these are arguments of one whole prompt, and nothing else that decides its states."""
    mask = arguments.get("attention_mask")
    return (
        isinstance(ids, torch.Tensor)
        and ids.ndim == 2
        and ids.shape[0] == 1
        and ids.shape[1] > 1
        and (mask is None or (mask.ndim == 2 and bool((mask == 1).all())))
        and all(arguments.get(name) is None for name in ("past_key_values", "inputs_embeds", "position_ids"))
        and arguments.get("use_cache") is not False
    )


def _alone(arguments: dict[str, Any], config: Any) -> bool:
    """Whether `generate` decodes one sequence, token by token."""
    def value(name: str) -> Any:
        return arguments.get(name, getattr(arguments.get("generation_config") or config, name, None))

    if value("use_cache") is False:
        return False
    only = all(value(name) in (None, 1) for name in ("num_beams", "num_return_sequences", "num_beam_groups"))
    helpers = ("assistant_model", "prompt_lookup_num_tokens", "guidance_scale", "cache_implementation")
    return only and all(value(name) is None for name in helpers)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _decided_by_tokens(ids: torch.Tensor, arguments: dict[str, Any], config: Any) -> bool:
    """Whether nothing that `generate` is given decides states beside the tokens: images do, and padding that it infers."""
    if any(_holds_tensors(value) for name, value in arguments.items() if name not in ("attention_mask", *_TOKENS)):
        return False
    if arguments.get("attention_mask") is not None:
        return True

    def numbers(name: str) -> set[int]:
        places = (arguments, vars(arguments.get("generation_config") or config), vars(config))
        found: Any = next((place[name] for place in places if place.get(name) is not None), [])
        return set(torch.as_tensor(found).flatten().tolist())

    # Without a mask `generate` hides the padding token, where it does not end texts, too.
    pads, ends = numbers("pad_token_id"), numbers("eos_token_id")
    return bool(pads & ends) or not pads & set(ids.flatten().tolist())


class _Patches:
    def __init__(self, model: Any, reuse: Reuse) -> None:
        self.model, self.reuse = model, reuse
        self.own_forward, self.own_generate = model.forward, getattr(model, "generate", None)

    def set(self, prompt: Prompt, upto: int, keep: int, room: int) -> Setting | None:
        """None: compute it without the cache."""
        try:
            with torch.no_grad():
                return self.reuse.setter.set(prompt, upto, keep, room)
        except Fault as fault:
            self.fault(prompt, fault)
            return None

    def fault(self, prompt: Prompt, fault: Fault) -> None:
        self.reuse.faults += 1
        self.reuse.last = Served(len(prompt.tokens), 0, 0, True, {}, [], str(fault))
        _log.warning("a prompt of %d tokens was computed without the cache: %s", len(prompt.tokens), fault)

    def commit(self, prompt: Prompt, setting: Setting, text: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        commits = []
        try:
            with torch.no_grad():
                commits = self.reuse.setter.commit(setting, text, prompt.conversation, prompt.salt)
        except Fault as fault:
            self.reuse.faults += 1
            _log.warning("the states of %d tokens were not offered: %s", len(text), fault)
        plan = setting.plan
        misses = {i: segment.miss for i, segment in enumerate(plan.segments) if segment.miss is not None}
        tiers = dict(setting.tiers)
        for tier, count in tiers.items():
            self.reuse.tokens_saved[tier, "exact" if plan.exact else "composed"] += count
        self.reuse.seconds_saved += setting.seconds_saved
        self.reuse.last = Served(
            len(prompt.tokens), plan.cached_tokens, setting.published, plan.exact, misses, commits, None, tiers,
            setting.seconds_saved,
        )  # fmt: skip

    def ids(self, prompt: Prompt) -> torch.Tensor:
        return torch.from_numpy(prompt.tokens.astype(np.int64)).unsqueeze(0).to(self.model.device)

    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        segmented = isinstance(input_ids, Prompt)
        keep = kwargs.get("logits_to_keep", 0)
        if segmented:
            prompt: Prompt = input_ids
            input_ids = self.ids(prompt)
            if keep == 0:
                keep = max(1, len(prompt.tokens) - sum(prompt.lengths))
            kwargs["logits_to_keep"] = keep
        served = not args and isinstance(keep, int) and keep > 0 and _plain(input_ids, kwargs)
        # Other arguments (labels, hidden states, …) ask for what only the whole run gives.
        others = any(kwargs[name] is not None and kwargs[name] is not False for name in set(kwargs) - _KNOWN)
        served = served and not others and kwargs.get("return_dict") is not False and not torch.is_grad_enabled()
        if not served:
            return self.own_forward(input_ids, *args, **kwargs)
        if not segmented:
            prompt = Prompt([], input_ids[0].cpu())
        with self.reuse.lock:
            # Logits are there of what is computed: of the tokens behind the last segment.
            always = max(1, len(prompt.tokens) - sum(prompt.lengths)) if segmented else 1
            setting = None if keep > always else self.set(prompt, len(prompt.tokens), keep, 0)
            if setting is None:
                return self.own_forward(input_ids, **kwargs)
            try:
                self.commit(prompt, setting, prompt.tokens)
            finally:
                self.reuse.setter.end(setting)
            return setting.output

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        segmented = isinstance(ids, Prompt)
        if segmented:
            prompt: Prompt = ids
            ids = self.ids(prompt)
        config = self.model.generation_config
        served = not args and _plain(ids, kwargs) and _alone(kwargs, config) and _decided_by_tokens(ids, kwargs, config)
        if not served or self.own_generate is None:
            return self.own_generate(ids, *args, **kwargs)  # type: ignore[misc]
        if not segmented:
            prompt = Prompt([], ids[0].cpu())
        count = len(prompt.tokens)
        with self.reuse.lock:
            setting = self.set(prompt, count - 1, 0, self._room(count, kwargs))
            cache = DynamicCache(config=self.reuse.setter.config) if setting is None else setting.cache
            try:
                # Without hits as without Ashlar: the model's own prefill, on the same kind of cache.
                output = self.own_generate(ids, **{**kwargs, "past_key_values": cache})
                if setting is not None:
                    sequence = output if isinstance(output, torch.Tensor) else output.sequences
                    # The last token has been chosen, and not run.
                    self.commit(prompt, setting, sequence[0, :-1].cpu().numpy().astype(np.int32))
            finally:
                if setting is not None:
                    self.reuse.setter.end(setting)
            return output

    def _room(self, count: int, arguments: dict[str, Any]) -> int:
        config = arguments.get("generation_config") or self.model.generation_config
        most = arguments.get("max_new_tokens", getattr(config, "max_new_tokens", None))
        if most is None:
            length = arguments.get("max_length", getattr(config, "max_length", None))
            most = 20 if length is None else max(0, length - count)
        pages = len(self.reuse.setter.cache.free) * self.reuse.setter.cache.model.page_tokens
        return max(0, min(int(most), pages - count - self.reuse.setter.cache.model.page_tokens))


def _in_place_of(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` with the name and the signature of `own`, which Transformers looks at."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


@contextlib.contextmanager
def attach(model: Any, cache: ModelCache, *, way: str = "kernels", setter: type[Setter] = Setter) -> Iterator[Reuse]:
    """Lets `model.generate` and `model.forward` use the cache within the `with` block; both are restored behind it.

    `way`: of computing a segment's tuple: "kernels", or "identity" by the model's own rule.
    """
    if not isinstance(cache, ModelCache):
        raise ValueError("cache: of ashlar.cache_for(model, daemon)")
    reuse = Reuse(setter(model, cache, model.forward, way))
    patches = _Patches(model, reuse)
    before = {name: model.__dict__[name] for name in ("forward", "generate") if name in model.__dict__}
    model.forward = _in_place_of(patches.own_forward, patches.forward)
    if patches.own_generate is not None:
        model.generate = _in_place_of(patches.own_generate, patches.generate)
    try:
        yield reuse
    finally:
        for name in ("forward", "generate"):
            model.__dict__.pop(name, None)
        model.__dict__.update(before)
