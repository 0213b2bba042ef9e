# SPDX-License-Identifier: Apache-2.0
"""Transformers with Ashlar: a model's `generate` and `forward` reuse exact prefixes, and segments at any position.

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
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ashlar._ashlar import real, text, whole
from ashlar.boundaries import Boundaries, declared_boundaries
from ashlar.daemon import Daemon
from ashlar.model import Linear
from ashlar.prompt import Prompt
from ashlar.tensors import EPSILON, SEGMENT_TYPES
from ashlar.transformers import branches, calls, shared_attention, shared_cache
from ashlar.transformers.assembly import Assembler, PromptRun, planned_part
from ashlar.transformers.caches import cache_class
from ashlar.transformers.model import check_type, describe
from ashlar.transformers.model_cache import Fault, ModelCache
from ashlar.transformers.rules import continuing
from ashlar.transformers.shared_assembly import SharedAssembler
from ashlar.transformers.shared_cache import SharedCache
from ashlar.transformers.weights import Weights

_log = logging.getLogger("ashlar.transformers")


@dataclasses.dataclass(frozen=True)
class Served:
    """How one prompt ran: with the cache, or why not. `attach` publishes the last one as `Reuse.last`."""

    tokens: int  # length of the prompt
    cached_tokens: int  # tokens of the prompt that were taken from the cache
    published: int  # segments that were computed and published for this prompt
    exact: bool  # whether the states are those of full prefill; False: composed
    misses: dict[int, str]  # reasons by index of each computed segment
    commits: list[str]  # outcome of each offered state, in ascending order of depth
    fault: str | None  # failure for which the prompt ran without the cache
    tiers: dict[str, int] = dataclasses.field(default_factory=dict)  # cached tokens by tier
    seconds_saved: float = 0.0  # prefill time of these tokens at the recent rate, minus the time that the cache took
    # Why the prompt ran without the cache although the cache works: the argument, option or mode.
    skip_reason: str | None = None
    shared_tokens: int = 0  # tokens of the prompt whose keys and values are read in place
    not_shared: str | None = None  # why segments were copied although the cache has `shared_tokens`


class Reuse:
    """Results and totals of one `with ashlar.attach(...) as reuse` block. It remains readable after the block."""

    def __init__(self, assembler: Assembler) -> None:
        self.assembler = assembler
        self.last: Served | None = None  # of the last prompt of any thread; None: no prompt ran
        self.faults = 0  # prompts that a failure of the cache affected
        self.tokens_saved: Counter[tuple[str, str]] = Counter()  # tokens by (tier, "exact" or "composed")
        self.seconds_saved = 0.0  # sum of Served.seconds_saved
        self.lock = threading.RLock()  # a model and its pages serve one prompt at a time


def cache_for(
    model: Any,
    daemon: Daemon | tuple[Any, Any],
    *,
    tokens: int = 16384,
    head: int = 8,
    tail: int = 8,
    page_tokens: int = 16,
    shared_tokens: int = 0,
    weights_digest: str | None = None,
    capture_tokens: int = 64,
    segment_dtype: str = "float32",
    epsilon: float | None = None,
    tokens_per_second: float = 0.0,
    **options: Any,
) -> ModelCache:
    """Opens a cache for a model of Transformers, for `attach`. Close it, or use it in a `with` block.

    `daemon`: the result of `ashlar.daemon.start`, or (rpc socket, session socket). `tokens`: capacity for keys and
    values of the prompt being served, including its answer. `head`, `tail`: the seams' widths in tokens. `page_tokens`:
    tokens per page. `shared_tokens`: capacity for segments that prompts read in place, so that all running prompts
    share one copy (MEPIC); 0: prompts copy them. `weights_digest`: names the weights; by default all weights are
    hashed. `capture_tokens`: interval of depths at which states inside a prompt are stored. `tokens_per_second`: rate
    of prefill; the daemon declines what loads slower than it computes; 0: it declines nothing. `segment_dtype`: type of
    stored tuples, and of the states of exact prefixes; "float16" halves their bytes, and a resumed prefix is then
    rounded; "float32" rounds nothing. `epsilon`: as in `ashlar.Cache`; None: 1e-6, with float16 3e-4. `options`: as in
    `ashlar.Cache`.

    ValueError: the model is not supported. ImportError: the version of transformers is not supported. TypeError: an
    argument has the wrong type. ConnectionError: no daemon answers.
    """
    check_type(model)
    if isinstance(daemon, Daemon):
        sockets: tuple[Any, Any] = (daemon.rpc_socket, daemon.session_socket)
    elif isinstance(daemon, tuple) and len(daemon) == 2:
        sockets = daemon
    else:
        given = type(daemon).__name__
        raise TypeError(
            f"daemon: {given} was given; expected a daemon from ashlar.daemon.start, or (rpc socket, session socket)"
        )
    tokens, page_tokens = whole("tokens", tokens, 1), whole("page_tokens", page_tokens, 1)
    capture_tokens, shared_tokens = whole("capture_tokens", capture_tokens, 1), whole("shared_tokens", shared_tokens)
    head, tail = whole("head", head), whole("tail", tail)
    if text("segment_dtype", segment_dtype) not in SEGMENT_TYPES:
        raise ValueError(f"segment_dtype: {segment_dtype!r} was given; expected one of {', '.join(SEGMENT_TYPES)}")
    if weights_digest is not None:
        text("weights_digest", weights_digest)
    weights = Weights(model)  # taken before the weights are hashed, so that later changes are detected
    if shared_tokens > 0:
        shared_attention.check_implementation(model)
    described, shape = describe(model, weights_digest, head, tail, page_tokens)
    if shared_tokens > 0:
        shared_cache.check(model, described, shape)
    rate = real("tokens_per_second", tokens_per_second)
    if not 0 <= rate < float("inf"):
        raise ValueError(f"tokens_per_second: {rate}; expected 0 or more")
    stored = SEGMENT_TYPES[segment_dtype]
    layers = [
        dataclasses.replace(layer, state_dtype=stored) if isinstance(layer, Linear) else layer
        for layer in described.layers
    ]
    described = dataclasses.replace(described, layers=layers, tokens_per_second=rate)
    epsilon = EPSILON[segment_dtype] if epsilon is None else epsilon
    return ModelCache(
        described, shape, weights, *sockets, pages=-(-tokens // page_tokens), name="transformers",
        shared_pages=-(-shared_tokens // page_tokens), capture_tokens=capture_tokens, epsilon=epsilon, **options,
    )  # fmt: skip


class _Patches:
    def __init__(self, model: Any, reuse: Reuse, boundaries: Boundaries | None) -> None:
        self.model, self.reuse, self.boundaries = model, reuse, boundaries
        self.shared = None if reuse.assembler.cache.shared is None else SharedAssembler(reuse.assembler)
        self.own_forward: Any = model.forward
        self.own_generate: Any = getattr(model, "generate", None)
        self.within = threading.local()
        self.process = os.getpid()
        self.weights_change_logged = False  # whether the change of weights was logged

    def assemble(self, prompt: Prompt, upto: int, keep: int, reserved: int) -> PromptRun | None:
        """Returns None if the prompt must be computed without the cache."""
        not_shared = None
        try:
            with torch.no_grad():
                if self.shared is not None and planned_part(prompt, keep)[1]:
                    try:
                        if len(prompt.conversation) == 0:
                            return self.shared.assemble(prompt, upto, keep)
                        not_shared = "conversation"  # its next turn resumes from this prompt's keys
                    except Fault as fault:
                        not_shared = str(fault)
                        _log.info("Ashlar: the segments of a prompt were copied: %s", fault)
                assembled = self.reuse.assembler.assemble(prompt, upto, keep, reserved)
                assembled.not_shared = not_shared
                return assembled
        except Fault as fault:
            self.fault(prompt, fault)
            return None

    def end(self, assembled: PromptRun) -> None:
        if not isinstance(assembled.cache, SharedCache):  # a SharedCache holds its pages while it exists
            self.reuse.assembler.end(assembled)

    def fault(self, prompt: Prompt, fault: Fault) -> None:
        self.reuse.faults += 1
        self.reuse.last = Served(len(prompt.tokens), 0, 0, True, {}, [], str(fault))
        _log.warning("Ashlar: a prompt of %d tokens was computed without the cache: %s", len(prompt.tokens), fault)

    def commit(self, prompt: Prompt, assembled: PromptRun, text: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        if isinstance(assembled.cache, SharedCache):
            return self.serve(prompt, assembled, [])
        commits = []
        try:
            why = self.of_model()
            if why is not None:
                raise Fault(f"{why} changed during the prefill")
            with torch.no_grad():
                commits = self.reuse.assembler.commit(assembled, text, prompt.conversation, prompt.salt)
        except Fault as fault:
            self.reuse.faults += 1
            _log.warning("Ashlar: the states of %d tokens were not stored: %s", len(text), fault)
        return self.serve(prompt, assembled, commits)

    def serve(self, prompt: Prompt, assembled: PromptRun, commits: list[str]) -> None:
        plan = assembled.plan
        misses = {i: segment.miss for i, segment in enumerate(plan.segments) if segment.miss is not None}
        tiers = dict(assembled.tiers)
        for tier, count in tiers.items():
            self.reuse.tokens_saved[tier, "exact" if plan.exact else "composed"] += count
        self.reuse.seconds_saved += assembled.seconds_saved
        self.reuse.last = Served(
            len(prompt.tokens), plan.cached_tokens, assembled.published, plan.exact, misses, commits, None, tiers,
            assembled.seconds_saved, None, assembled.shared_tokens, assembled.not_shared,
        )  # fmt: skip

    def tokens(self, given: Any) -> tuple[Prompt | None, Any]:
        """Returns the given prompt and its tokens in the form that the model takes."""
        if not isinstance(given, Prompt):
            return None, given
        return given, torch.from_numpy(given.tokens.astype(np.int64)).unsqueeze(0).to(self.model.device)

    def plain(self, ids: Any) -> Prompt:
        """Returns a prompt that is given as tokens alone."""
        row = ids[0].cpu()
        if self.boundaries is None:
            return Prompt([], row)
        lengths = self.boundaries.lengths(row.numpy())
        *segments, query = row.split([*lengths, len(row) - sum(lengths)])
        return Prompt(segments, query)

    def of_model(self) -> str | None:
        cache = self.reuse.assembler.cache
        return calls.of_model(self.model, cache.shape.adapters, cache.weights)

    def skip_reason(self, ids: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> str | None:
        # A forked child shares the parent's pages, which it must not touch, and its locks, which may be held forever.
        if os.getpid() != self.process:
            return "a forked process"
        why = calls.of_prompt(ids, args, arguments)
        return why if why is not None else self.of_model()

    def skip(self, ids: Any, why: str) -> None:
        count = ids.numel() if isinstance(ids, torch.Tensor) else 0
        if why == "weights" and not self.weights_change_logged:
            self.weights_change_logged = True
            _log.warning(
                "Ashlar: the model's weights have changed since the cache was opened; the cache is off; open a new one"
            )
        self.reuse.last = Served(count, 0, 0, True, {}, [], None, skip_reason=why)
        _log.debug("Ashlar: the model computes %d tokens: %s", count, why)

    def check_shared(self, arguments: dict[str, Any]) -> None:
        """ValueError: the arguments change which tokens of a SharedCache are attended."""
        if not isinstance(arguments.get("past_key_values"), SharedCache):
            return
        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask == 1).all())):
            raise ValueError(
                "attention_mask: hides tokens; past_key_values has shared segments, which are attended whole"
            )

    @contextlib.contextmanager
    def generating(self) -> Iterator[list[torch.Tensor]]:
        """Within the block, `forward` is the model's own in this thread, because `generate` calls it for parts of its
        prompt.

        Yields the tokens that were run. An engine's own functions may change the tokens that `generate` returns.
        """
        before, self.within.run = getattr(self.within, "run", None), []
        try:
            yield self.within.run
        finally:
            self.within.run = before

    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompt, ids = self.tokens(input_ids)
        self.check_shared(kwargs)
        keep = kwargs.get("logits_to_keep", 0)
        if prompt is not None and isinstance(keep, int) and keep == 0:
            kwargs["logits_to_keep"] = max(1, len(prompt.tokens) - sum(prompt.lengths))
        run: list[torch.Tensor] | None = getattr(self.within, "run", None)
        if run is not None:
            if isinstance(ids, torch.Tensor):
                run.append(ids[0].clone())
            return self.own_forward(ids, *args, **kwargs)
        why = self.skip_reason(ids, args, kwargs) or calls.of_forward(self.model, ids, kwargs)
        if why is not None:
            # A single token after past keys is not a prompt.
            if kwargs.get("past_key_values") is None or ids is None or ids.shape[1] > 1:
                self.skip(ids, why)
            return self.own_forward(ids, *args, **kwargs)
        prompt, keep = prompt or self.plain(ids), kwargs["logits_to_keep"]
        with self.reuse.lock:
            assembled = self.assemble(prompt, len(prompt.tokens), keep, 0)
            if assembled is None:
                return self.own_forward(ids, **kwargs)
            try:
                self.commit(prompt, assembled, prompt.tokens)
            finally:
                self.end(assembled)
            return assembled.output

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompt, ids = self.tokens(kwargs.pop("input_ids", None) if inputs is None else inputs)
        why, options = self.skip_reason(ids, args, kwargs), None
        if why is None:
            why, options = calls.of_generate(self.model, ids, kwargs)
        if why is not None:
            self.skip(ids, why)
            with self.generating():
                return self.own_generate(ids, *args, **kwargs)
        prompt = prompt or self.plain(ids)
        count = len(prompt.tokens)
        with contextlib.ExitStack() as serving, self.generating() as run:
            serving.enter_context(self.reuse.lock)
            # The rest of the prompt is `generate`'s, which runs one token or more in any case.
            upto = max(0, count - branches.REWRITTEN_TOKENS)
            assembled = self.assemble(
                prompt, upto, 0, self._reserved(count, calls.new_tokens(self.model, options, count, kwargs))
            )
            if assembled is None:
                cache = cache_class(self.model)(config=self.reuse.assembler.config)
            else:
                cache = assembled.cache
            if assembled is not None and isinstance(assembled.cache, SharedCache):
                self.serve(prompt, assembled, [])
                serving.close()  # no page of `reuse.assembler` is used: other threads may assemble their prompts
                return self.own_generate(ids, **{**kwargs, "past_key_values": cache})
            try:
                # Without hits, run the model's own prefill on the same kind of cache, as without Ashlar.
                output = self.own_generate(ids, **{**kwargs, "past_key_values": cache})
                if assembled is not None:
                    ran = torch.cat(run).cpu().numpy().astype(np.int32)
                    self.commit(prompt, assembled, np.concatenate([prompt.tokens[: assembled.reached], ran]))
            finally:
                if assembled is not None:
                    self.reuse.assembler.end(assembled)
            return output

    def _reserved(self, count: int, most: int) -> int:
        cache = self.reuse.assembler.cache
        page = cache.model.page_tokens
        return max(0, min(most, len(cache.free) * page - count - page))


def _in_place_of(model: Any, own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `ours` with the name and the signature of `own`, which Transformers inspects."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        with continuing(model):
            return ours(*args, **kwargs)

    return call


@contextlib.contextmanager
def attach(
    model: Any,
    cache: ModelCache,
    *,
    tuple_method: str = "kernels",
    assembler: type[Assembler] = Assembler,
    segment_separator: Any = (),
    segment_boundaries: str = "",
    tokenizer: Any = None,
) -> Iterator[Reuse]:
    """Lets `model.generate` and `model.forward` use the cache within the `with` block; both are restored after it.

    `cache`: opened by `cache_for` for this model; it must remain open in the block. `segment_separator`: tokens or text
    that end a segment in plain `input_ids`. `segment_boundaries`: with "messages", each message of the tokenizer's chat
    template is one; the template needs special tokens between messages. With neither, `input_ids` have no segments.
    `tokenizer`: the model's, for text and messages.
    `tuple_method`: what computes the tuples of new segments: "kernels", or "identity", the model's own rule.
    `assembler`: a class that derives from `Assembler`.

    Yields a `Reuse`. TypeError, ValueError: an argument is wrong. A failure of the cache raises nothing: the prompt
    runs without it.
    """
    check_type(model)
    if not isinstance(cache, ModelCache):
        raise TypeError(
            f"cache: {type(cache).__name__} was given; expected a cache from ashlar.cache_for(model, daemon)"
        )
    if not isinstance(assembler, type) or not issubclass(assembler, Assembler):
        raise TypeError(
            f"assembler: {type(assembler).__name__} was given; expected a class that derives from Assembler"
        )
    reuse = Reuse(assembler(model, cache, model.forward, tuple_method))
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    shared_attention_name = shared_attention.implementation(model) if cache.shared is not None else None
    patches = _Patches(model, reuse, declared_boundaries(segment_separator, segment_boundaries, tokenizer))
    before = {name: model.__dict__[name] for name in ("forward", "generate") if name in model.__dict__}
    model.forward = _in_place_of(model, patches.own_forward, patches.forward)
    if patches.own_generate is not None:
        model.generate = _in_place_of(model, patches.own_generate, patches.generate)
    if shared_attention_name is not None:
        model.set_attn_implementation(shared_attention_name)
    try:
        yield reuse
    finally:
        if shared_attention_name is not None:
            model.set_attn_implementation(attention)
        for name in ("forward", "generate"):
            model.__dict__.pop(name, None)
        model.__dict__.update(before)
