# SPDX-License-Identifier: Apache-2.0
"""Assembles one prompt for a Transformers model: looks it up, computes what is missing, and takes the rest from the
cache.

Each computed step of the plan is one run of the model over the step's tokens, on a DynamicCache. Cached steps are added
to that cache: their keys and values are appended, and their states composed in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ashlar._ashlar import Verdict
from ashlar.model import DType
from ashlar.prompt import Prompt
from ashlar.request import LinearTensors, Plan, Request, Run, Step, StepKind
from ashlar.tensors import scaled_half
from ashlar.transformers import branches
from ashlar.transformers.caches import cache_class
from ashlar.transformers.model import LinearPlace
from ashlar.transformers.model_cache import TORCH, Fault, ModelCache, calling
from ashlar.transformers.rules import Tape, continuing

_RATE_TOKENS = 64  # runs of fewer tokens do not count for the rate of prefill
_RATE_MEMORY = 0.8


class Restart(Exception):
    """A hit of the plan failed to land."""


@dataclasses.dataclass
class PromptRun:
    """One prompt that an Assembler has run: its Transformers cache, and what a commit of it needs."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]  # the whole prompt
    table: np.ndarray[Any, np.dtype[np.int32]]  # its pages, in the order of its tokens
    request: Request
    plan: Plan
    cache: DynamicCache
    output: Any  # output of the last run
    captured: list[tuple[int, list[LinearTensors]]]  # depths inside the prompt, and the states there
    published: int  # number of segments that were computed and published
    seconds_saved: float  # prefill time of the cached tokens at the recent rate, minus the time that the cache took
    reached: int  # tokens of the prompt that the cache holds
    shared_tokens: int = 0  # tokens whose keys and values are read in place
    not_shared: str | None = None  # why a prompt's segments were copied although the cache shares segments

    @property
    def tiers(self) -> Counter[str]:
        """Tokens taken from the cache, by tier."""
        found: Counter[str] = Counter()
        for step in self.plan.steps:
            if step.kind is not StepKind.COMPUTE:
                of_prefix = step.segment is None
                tier = self.plan.prefix_tier if of_prefix else self.plan.segments[step.segment or 0].tier
                found[tier or "dram"] += step.end - step.begin
        return found


def planned_part(prompt: Prompt, keep: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[int]]:
    """Returns the tokens to plan, and the lengths of their segments, if `keep` last tokens run through the head.

    A plan's last token is always computed. The plan ends at the first token whose logits are wanted, so it takes none
    of these tokens from the cache, and its last run continues to the prompt's end.
    """
    planned = prompt.tokens[: len(prompt.tokens) - max(keep, 1) + 1]
    lengths = prompt.lengths
    while sum(lengths) >= len(planned):
        lengths.pop()
    return planned, lengths


class Assembler:
    """Runs prompts of one model through one cache, one prompt at a time. `ashlar.attach` creates one per `with` block.

    `forward`: the model's own `forward`. `tuple_method`: what computes the tuples of new segments: "kernels", the
    engine API's kernels; "identity", the model's own rule. A derived class may override the methods without an
    underscore.
    """

    captures = True  # whether states inside the prompt are captured for a commit

    def __init__(
        self, model: Any, cache: ModelCache, forward: Callable[..., Any], tuple_method: str = "kernels"
    ) -> None:
        if tuple_method not in ("kernels", "identity"):
            raise ValueError(f"tuple_method: {tuple_method!r} was given; expected 'kernels' or 'identity'")
        self.model, self.cache, self.forward, self.tuple_method = model, cache, forward, tuple_method
        self.config = model.config.get_text_config(decoder=True)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.ends_of_messages = set() if ends is None else set(np.ravel(ends).tolist())
        self.seconds_per_token = 0.0  # seconds of prefill per token, from recent runs
        self.model_seconds = 0.0  # time in runs of the model since the current prompt's start

    def run(self, cache: DynamicCache, tokens: np.ndarray[Any, Any], first: int, keep: int = 0) -> Any:
        """Runs tokens, [tokens], from position `first` through the model, and the last `keep` tokens through its head
        too. Returns the model's output."""
        ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0).to(self.model.device)
        # Positions are passed explicitly. Most models derive them from the cache, but Bamba begins at 0 again.
        positions = torch.arange(first, first + len(tokens), device=self.model.device).unsqueeze(0)
        options = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        began = time.perf_counter()
        with continuing(self.model):
            output = self.forward(**options, logits_to_keep=keep) if keep > 0 else self.model.base_model(**options)
        took = time.perf_counter() - began
        self.model_seconds += took
        if len(tokens) >= _RATE_TOKENS:
            now = took / len(tokens)
            self.seconds_per_token = _RATE_MEMORY * (self.seconds_per_token or now) + (1 - _RATE_MEMORY) * now
        return output

    def assemble(self, prompt: Prompt, upto: int, keep: int, reserved: int) -> PromptRun:
        """Runs the prompt's first `upto` tokens, or the tokens that the plan takes from the cache if they are more.

        `keep`: the number of last tokens that also run through the model's head, in one run. `reserved`: the number of
        tokens for which pages are reserved after the prompt. Call `end` with the result.

        Fault: the cache failed, and the prompt's pages are released; compute the prompt without the cache.
        """
        tokens, began, self.model_seconds = prompt.tokens, time.perf_counter(), 0.0
        planned, lengths = planned_part(prompt, keep)
        table = self.cache.take(len(tokens) + reserved)
        if table is None:
            raise Fault(f"pages: too few free pages for {len(tokens)} tokens")
        request = None
        try:
            request = calling(
                self.cache.begin,
                planned,
                lengths,
                table,
                fill=True,
                conversation=prompt.conversation,
                salt=prompt.salt,
            )
            published = self._fill(request, table)
            for _ in range(16):  # each restart takes less from the cache
                plan, followed = request.plan, None
                with contextlib.suppress(Restart):
                    followed = self._follow(request, plan, table, tokens, upto, keep)
                verdict = calling(request.finish)
                if verdict == Verdict.OK and followed is not None:
                    reached = max(upto, plan.steps[-1].begin)
                    saved = self.seconds_saved(plan, began)
                    return PromptRun(tokens, table, request, plan, *followed, published, saved, reached)
                if verdict == Verdict.OTHER_PAGES:
                    others = self.cache.take(len(tokens) + reserved)  # take_quiesced_pages returns the old pages
                    if others is None:
                        raise Fault("pages: all remaining pages are unresolved after a failed landing")
                    table = others
                    calling(request.move, table)
            raise Fault("the plan was restarted 16 times")
        except BaseException:
            if request is None or self._cancel(request):
                self.cache.free += table.tolist()
            raise

    def seconds_saved(self, plan: Plan, began: float) -> float:
        spent = time.perf_counter() - began - self.model_seconds
        return max(0.0, plan.cached_tokens * self.seconds_per_token - spent)

    def _cancel(self, request: Request) -> bool:
        """Cancels and ends a request. Returns whether its pages are free. Otherwise the daemon may still write them,
        and `take_quiesced_pages` returns them later."""
        quiesced = False
        with contextlib.suppress(ConnectionError, RuntimeError):
            request.cancel()
            quiesced = request.poll_quiesced() == Verdict.OK
        request.end()
        return quiesced

    def end(self, assembled: PromptRun) -> None:
        """Releases the lease and the pages of an assembled prompt."""
        assembled.request.end()
        self.cache.free += assembled.table.tolist()

    # ------------------------------------------------------------------------------------------------ publishing

    def publish_missing(self, prompt: Prompt, keep: int) -> int:
        """Computes and publishes the segments that the cache lacks. Returns their number. Fault: as `assemble`."""
        planned, lengths = planned_part(prompt, keep)
        table = self.cache.take(len(planned))
        if table is None:
            raise Fault(f"pages: too few free pages for {len(planned)} tokens")
        request = None
        try:
            request = calling(
                self.cache.begin, planned, lengths, table, fill=True, store_only=True, salt=prompt.salt
            )  # fmt: skip
            return self._publish(request, table)
        finally:
            if request is None or self._cancel(request):
                self.cache.free += table.tolist()

    def _fill(self, request: Request, table: np.ndarray[Any, Any]) -> int:
        missing = calling(lambda: request.missing)
        published = self._publish(request, table)
        if missing:
            calling(request.look_again, table)
        return published

    def _publish(self, request: Request, table: np.ndarray[Any, Any]) -> int:
        published = 0
        for i, run in enumerate(calling(lambda: request.missing)):
            tape = cache_class(self.model, Tape)(self.config)
            with tape.recording(self.model):
                self.run(tape, run.tokens, 0)
            self._write(tape, table, 0, 0, run.capture_end)
            linear = [self._tuple(request, i, run, tape, place) for place in self.cache.shape.linear]
            published += calling(request.publish, i, linear, table) == "published"
        return published

    def _tuple(self, request: Request, missing: int, run: Run, tape: Tape, place: LinearPlace) -> LinearTensors:
        begin, end = run.capture_begin, run.capture_end
        tail = _bytes(tape.tail(place.layer, end, place.kernel).cpu()) if place.kernel > 0 else None
        if not run.transition:
            if end != len(run.tokens):
                raise Fault(f"a run of {len(run.tokens)} tokens must be captured at {end} without a transition")
            state = tape.layers[place.layer].recurrent_states[0].float().cpu().contiguous().view(place.state)
            return self._tensors(place, state, tail)
        call = tape.calls[place.layer]
        if self.tuple_method == "identity":
            state, transition = (part.float().cpu().contiguous() for part in call.tuple_by_identity(begin, end))
            return self._tensors(place, state, tail, transition)
        halves = self._stores_halves(place)
        state = torch.empty(place.state, dtype=torch.float16 if halves else torch.float32)
        made = {
            "transition": torch.empty(place.transition),
            "exponents": torch.empty(place.state[0], dtype=torch.int32) if halves else None,
        }
        calling(self.cache.compute_alone, request, missing, place.index, state, **made, **call.rows(place.key_heads))
        return LinearTensors(place.index, state, conv_tail=tail, **made)

    def _stores_halves(self, place: LinearPlace) -> bool:
        return self.cache.model.layers[place.index].state_dtype is DType.F16  # type: ignore[union-attr, index]

    def _tensors(
        self, place: LinearPlace, state: torch.Tensor, tail: Any, transition: torch.Tensor | None = None
    ) -> LinearTensors:
        """Returns a state in float32, [heads, …], in the type in which the cache stores it."""
        exponents = None
        if self._stores_halves(place):
            state, exponents = scaled_half(state)
        return LinearTensors(place.index, state, conv_tail=tail, transition=transition, exponents=exponents)

    def _write(self, cache: DynamicCache, table: np.ndarray[Any, Any], first: int, begin: int, end: int) -> None:
        """Writes the keys and values of positions [begin, end) to the pages. Row 0 of the cache has position
        `first`."""
        pages, slots = self.cache.slots(table, begin, end)
        for place in self.cache.shape.attention:
            layer = cache.layers[place.layer]
            for rows, there in zip(self.cache.rows[place.index], (layer.keys, layer.values), strict=True):
                rows[pages, slots] = there[0, :, begin - first : end - first].transpose(0, 1).cpu()

    # ------------------------------------------------------------------------------------------------ the plan

    def _follow(
        self,
        request: Request,
        plan: Plan,
        table: np.ndarray[Any, Any],
        tokens: np.ndarray[Any, Any],
        upto: int,
        keep: int,
    ) -> tuple[DynamicCache, Any, list[tuple[int, list[LinearTensors]]]]:
        cache = self.new_cache(request)
        output, captured = None, []
        branch = None
        if self.captures:
            branch = branches.branch(
                self.cache.model,
                plan,
                tokens,
                min(upto, len(tokens) - keep),
                self.cache.capture_tokens,
                self.ends_of_messages,
            )
        for number, step in enumerate(plan.steps):
            if step.kind is not StepKind.COMPUTE:
                self._take(request, number, step, table, cache)
                continue
            last = number == len(plan.steps) - 1
            begin, end = step.begin, upto if last else step.end
            if branch is not None and begin < branch < end:
                self.run(cache, tokens[begin:branch], begin)
                captured.append((branch, self.states(cache)))
                begin = branch
            if begin < end:
                output = self.run(cache, tokens[begin:end], begin, keep if last else 0)
            if step.capture and step.end == end:
                captured.append((end, self.states(cache)))
            if self.captures and last and begin < end < len(tokens) and end not in (at for at, _ in captured):
                captured.append((end, self.states(cache)))  # the next turn, or a repeat of the prompt, resumes there
        return cache, output, captured

    def _take(
        self, request: Request, number: int, step: Step, table: np.ndarray[Any, Any], cache: DynamicCache
    ) -> None:
        for place in self.cache.shape.linear:
            layer = cache.layers[place.layer]
            there = layer.recurrent_states[0]
            state = torch.zeros(place.state)
            if there is not None:
                state = there.detach().float().cpu().contiguous().view(place.state)
            self.compose(request, place, step, state)
            if place.kernel > 0:
                tail = calling(request.conv_tail, number, place.index)
                if tail is None:
                    raise Restart
                self._put_tail(layer, place, tail)
            if not layer.is_recurrent_states_initialized[0]:
                started = torch.zeros(place.cached, dtype=place.dtype, device=self.model.device)
                layer.lazy_initialization(recurrent_states=started)
            layer.recurrent_states[0].copy_(state.view(place.cached))
            layer.has_previous_state[0] = True
        self.take_rows(request, step, table, cache)

    def new_cache(self, request: Request) -> DynamicCache:
        cache: DynamicCache = cache_class(self.model)(config=self.config)
        return cache

    def take_rows(self, request: Request, step: Step, table: np.ndarray[Any, Any], cache: DynamicCache) -> None:
        """Appends the keys and values of a cached step."""
        pages, slots = self.cache.slots(table, step.begin, step.end)
        for attention in self.cache.shape.attention:
            self.must(calling(request.wait_layer, attention.index))
            rows = (rows[pages, slots].transpose(0, 1).unsqueeze(0) for rows in self.cache.rows[attention.index])
            cache.layers[attention.layer].update(*(part.to(self.model.device) for part in rows))

    def compose(self, request: Request, place: LinearPlace, step: Step, state: torch.Tensor) -> None:
        """Advances a layer's state, [heads, …] in float32, across a cached step."""
        self.must(calling(request.advance, place.index, step.begin, step.end, state))

    def must(self, verdict: Verdict) -> None:
        if verdict != Verdict.OK:
            raise Restart

    def _put_tail(self, layer: Any, place: LinearPlace, tail: bytes) -> None:
        conv_type = TORCH[self.cache.model.layers[place.index].conv_dtype]  # type: ignore[union-attr, index]
        inputs = torch.frombuffer(bytearray(tail), dtype=conv_type).view(1, place.channels, place.kernel - 1)
        if not layer.is_conv_states_initialized[0]:
            whole = torch.zeros(1, place.channels, place.kernel, dtype=conv_type, device=self.model.device)
            layer.lazy_initialization(conv_states=whole)
        layer.conv_states[0][..., 1:].copy_(inputs)
        layer.conv_states[0][..., 0].zero_()  # older than the convolution's window

    # ------------------------------------------------------------------------------------------------ committing

    def states(self, cache: DynamicCache) -> list[LinearTensors]:
        """Returns copies of the current states and tails of all linear layers."""
        all_states = []
        for place in self.cache.shape.linear:
            layer = cache.layers[place.layer]
            state = layer.recurrent_states[0].detach().float().cpu().clone().contiguous().view(place.state)
            tail = None
            if place.kernel > 0:
                tail = _bytes(layer.conv_states[0][0, :, 1:].detach().cpu().clone())
            all_states.append(self._tensors(place, state, tail))
        return all_states

    def commit(
        self,
        assembled: PromptRun,
        text: np.ndarray[Any, np.dtype[np.int32]],
        conversation: bytes,
        salt: str | bytes = b"",
    ) -> list[str]:
        """Offers the states after `text`, all of which the model has run on the prompt's cache, and the captured
        states. `text` is the prompt and its answer, [tokens]. Returns the outcome of each offer, in ascending order of
        depth.

        Fault: the cache holds a different number of tokens, or `text` does not begin with the prompt.
        """
        count = min(len(assembled.tokens), len(text))
        held = {assembled.cache.layers[place.layer].keys.shape[-2] for place in self.cache.shape.attention}
        if held - {len(text)} or not np.array_equal(assembled.tokens[:count], text[:count]):
            raise Fault(f"the model computed different tokens than the text has: cache lengths {sorted(held)}")
        if len(text) > len(assembled.table) * self.cache.model.page_tokens:
            return []  # more tokens were decoded than there is space for
        if not assembled.plan.exact and not conversation:
            return []  # composed states are stored only for a conversation
        computed = [*assembled.plan.computed(), (assembled.plan.steps[-1].end, len(text))]
        for begin, end in computed:
            if begin < min(end, len(text)):
                self._write(assembled.cache, assembled.table, 0, begin, min(end, len(text)))
        offers = {depth: states for depth, states in assembled.captured if depth < len(text)}
        if assembled.plan.exact:
            for depth in branches.whole_blocks(self.cache.model, branches.computed_from(assembled.plan), len(text)):
                offers.setdefault(depth, [])
        offers[len(text)] = self.states(assembled.cache)
        return calling(
            self.cache.commit, text, sorted(offers.items(), key=lambda offer: offer[0]), request=assembled.request, prompt_tokens=count, page_table=assembled.table,
            conversation=conversation, salt=salt,
        )  # fmt: skip


def _bytes(tail: torch.Tensor) -> np.ndarray[Any, Any]:
    return tail.contiguous().flatten().view(torch.uint8).numpy()
