# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the connector: looks prompts up, sends plans to the workers, and decides what is saved."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ashlar
from ashlar.boundaries import Boundaries
from ashlar.vllm.finished_prompts import FinishedPrompts
from ashlar.vllm.handoffs import node_of
from ashlar.vllm.identity import differences
from ashlar.vllm.jumps import Jumps
from ashlar.vllm.load_blocks import LoadBlocks
from ashlar.vllm.messages import Load, Save, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.offers import Offers
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.prefix_lookups import PrefixLookups
from ashlar.vllm.prompt_segments import PromptSegments
from ashlar.vllm.requests import Followed, Names, adapter_name
from ashlar.vllm.segments import name_alone, salt_of, unsupported
from ashlar.vllm.serving import ServingStart
from ashlar.vllm.state import State
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_REST = 0.1  # seconds without a computed token after which the engine serves prefill
_SOURCES = {"dram": CacheHitSource.HOST, "ssd": CacheHitSource.DISK, "remote": CacheHitSource.P2P}


class Scheduler:
    def __init__(
        self,
        described: Described,
        options: Options,
        ranks: int,
        loads: bool,
        saves: bool,
        event_tokens: int,
        hash_tokens: int,
        step_tokens: int,
        model_tokens: int,
        state: State,
        boundaries: Boundaries | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`step_tokens`, `model_tokens`: the engine's limits of tokens per step and per prompt. `wake`: as
        `serving.find_wake`; None: the engine serves no prefill."""
        self.stats = AshlarStats()
        self._described, self._options = described, options
        self._loads, self._saves = loads, saves
        self._least = max(1, options.min_tokens)
        self._segments = PromptSegments(options.segments, boundaries)
        if options.segments and (reason := unsupported(described)):
            logger.warning("Ashlar: segments are off: %s; prompts with segments are treated as plain prompts", reason)
            self._segments.enabled = False
        self._serving_start = ServingStart(wake if self._segments.enabled and saves else None)
        self._worked = 0.0  # time of the last step that computed tokens
        self._jumps = Jumps(described, options, hash_tokens, saves, self.stats, ranks, step_tokens, model_tokens)
        if not described.identity.plain:
            logger.warning(
                "Ashlar: enable_lora on a CPU: prompts without an adapter are computed without the cache, as vLLM may apply "
                "an adapter to them"
            )
        self._followed: dict[str, Followed] = {}
        self._new_loads: list[Load] = []
        self._new_saves: list[Save] = []  # saves of ended requests
        self._blocks = LoadBlocks(described)
        self._reports_until = 0.0  # limit of the wait for workers' reports while blocks are held
        self._tokens_per_second = options.tokens_per_second  # if it is not declared, as measured by workers
        self._pool: Any = None
        self._state = state
        self._steps = 0
        self._names = Names(described, options, ranks)
        self._handoffs = FinishedPrompts(self._names)
        self._opening = Opening(self._open, described.identity.weights, options, "scheduler", state)
        self._lookups = PrefixLookups(described, options, self._names, self._opening, self.stats, self._least)
        self._offers = Offers(
            described, options, self._names, self._jumps, self.stats, ranks, self._least, event_tokens
        )

    def _open(self) -> ashlar.Cache:
        options = self._options
        model = dataclasses.replace(self._described.model, tokens_per_second=self._tokens_per_second)
        return ashlar.Cache(
            self._described.named(model),
            options.rpc_socket,
            options.session_socket,
            name="vllm-scheduler",
            timeout_ms=options.call_ms,
            memory_kind=ashlar.MemoryKind.NONE,
            capture_tokens=self._described.capture_tokens(options),
        )

    def bind(self, pool: Any) -> None:
        self._pool = pool
        self._blocks.bind(pool)
        self._offers.bind(pool)

    def close(self) -> None:
        for followed in list(self._followed.values()):
            self._erase(followed)
        self._names.close()
        self._jumps.close()
        self._opening.close()

    def reset(self) -> bool:
        """Begins a new generation of weights, whose digest is unknown: objects that were stored before are no longer
        found.

        Returns False if some of the engine's requests continue with earlier keys or states.
        """
        self._names.reset()
        self._exclude_computed(lambda followed: True)
        return not any(followed.mixed for followed in self._followed.values())

    def _exclude_computed(self, concerns: Callable[[Followed], bool]) -> None:
        """Excludes requests that have keys or states from saves, and empties the engine's own cache."""
        for followed in filter(concerns, self._followed.values()):
            if not followed.mixed and (followed.loading > 0 or followed.request.num_computed_tokens > 0):
                followed.mixed = True
                name_alone(followed.request)
            elif not followed.mixed:
                self._lookups.drop(followed)
                followed.saved, followed.missed = 0, (0, 0)
        self._jumps.reset(self._pool, self._names.generation)
        # Also empties the engine's own prefix cache: a prompt resumed from it would be saved under the new weights'
        # name.
        if self._pool is not None:
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks if block.block_hash is not None})

    # ---- looking up

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Returns the number of tokens beyond `computed` that the cache has, and whether they are loaded between steps;
        None: ask again."""
        known = self._followed.get(request.request_id)
        if known is not None:
            known.scheduled = False
        jumps = self._loads and known is not None
        if jumps and self._jumps.starts_over(request, self._pool):
            return None, False  # `computed` counts composed blocks
        if jumps:
            self._jumps.start(request, computed, self._pool)  # both lookups run at the same time
        found, between = self._match_prefix(request, computed)
        waits = jumps and self._jumps.waits(request, computed, self._pool, found)
        if waits and found is not None:
            decided = self._jumps.decide(request, computed + found, self._pool)
            waits = not decided or self._jumps.refuses_prefix(request) or self._jumps.may_have_more(request, self._pool)
        if waits or found is None:
            return None, False
        first = self._jumps.external(request, computed, self._pool)
        return (found, between) if first == 0 else (first, False)

    def _match_prefix(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if not self._loads or request.num_tokens - 1 - computed < self._least or not self._names.serves(request):
            return 0, False
        followed = self._followed.setdefault(request.request_id, Followed(request, salt_of(request)))
        if self._jumps.refuses_prefix(request):
            self._lookups.drop(followed)
            return 0, False
        return self._lookups.match(followed, computed)

    def ends_within_block(self, request: Any) -> bool:
        """Returns whether a load for the request may end inside a block, as segments may."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            return True
        return followed.lookup.plan.prefix_tokens % self._described.block != 0

    def _erase(self, followed: Followed) -> None:
        self._lookups.drop(followed)
        self._followed.pop(followed.request.request_id, None)

    # ---- loading

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Starts the load of `external` tokens, for which the request waits. If this raises, call `fail_load`."""
        followed = self._followed.get(request.request_id)
        if self._jumps.allocated(request, external):
            return
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            raise RuntimeError(f"{request.request_id}: no match is known for the request")
        plan, ids = followed.lookup.plan, blocks.get_block_ids()
        tokens = plan.prefix_tokens
        spare = self._blocks.begin(request.request_id, ids, tokens, tokens - external)
        followed.loading, followed.step = tokens, None
        followed.first_step = followed.first_step or self._steps + 1
        tier = plan.prefix_tier or "dram"
        table = self._described.count(followed.lookup.looked_up)
        self.stats.add(1, "lookups", "hit")
        self._new_loads.append(
            Load(
                request.request_id,
                followed.lookup.handle.plan_bytes(),
                tokens,
                tokens - external,
                ids,
                table,
                tier,
                followed.lookup.name.adapter,
                spare,
            )
        )

    def not_loaded(self, request: Any) -> None:
        """Call it if the engine begins a request without a load. It may refuse matched tokens, for example for routed
        experts, or load them by another connector; their leases end."""
        followed = self._followed.get(request.request_id)
        if followed is not None and not followed.loading:
            self._lookups.drop(followed)

    def fail_load(self, request: Any) -> None:
        name = request.request_id
        self._new_loads = [each for each in self._new_loads if each.request != name]
        self._new_loads.append(Load(name, b"", 0, 0, tuple([] for _ in range(self._described.groups)), 0, "dram"))
        self._blocks.fail(name)
        if name in self._followed:
            self._followed[name].loading = 1  # ends with the load, even if the request ends earlier

    def sources(self, request: Any, tokens: int) -> dict[Any, int]:
        followed = self._followed.get(request.request_id)
        plan = followed.lookup.plan if followed is not None and followed.lookup is not None else None
        tier = plan.prefix_tier if plan is not None else None
        return {_SOURCES.get(tier or "", CacheHitSource.EXTERNAL_UNSPECIFIED): tokens}

    def _loaded(self, name: str, failed: bool) -> None:
        followed = self._followed.get(name)
        self._blocks.end(name)
        if followed is None:
            return
        self._lookups.drop(followed)
        followed.refused |= failed
        if not failed:
            followed.saved = max(followed.saved, followed.loading)
            followed.depths.append(followed.loading)
        followed.loading = 0
        if followed.ended:
            self._erase(followed)

    # ---- saving

    def step(self, output: Any) -> StepMetadata:
        loads, self._new_loads = self._new_loads, []
        saves, self._new_saves = self._new_saves, []
        handoffs = self._handoffs.take()
        self._steps += 1
        if output.total_num_scheduled_tokens > 0:
            self._worked = time.monotonic()
        fetches, jumps, released = self._jumps.step(output, self._pool)
        alone = None
        idle = not self._followed and output.total_num_scheduled_tokens == 0
        try:
            for name, tokens in output.num_scheduled_tokens.items():
                if (followed := self._followed.get(name)) is not None:
                    followed.scheduled = True
                    if len(followed.media) < len(followed.request.mm_features):  # later input of a session adds media
                        self._names.begin(followed.request, followed.media)
                    followed.first_step = followed.first_step or self._steps
                    drafts = output.scheduled_spec_decode_tokens.get(name, ())
                    self._offers.note_drafts(followed, tokens, len(drafts))
            self._renew()
            self._offer_all(output, saves)
            alone = self._jumps.cold.next(idle, self._pool, output.total_num_scheduled_tokens)
        except Exception:  # the loads must still be sent, because their requests wait for them
            logger.exception("Ashlar: the rest of this step is not saved")
        if saves:
            self._await_reports()
        asked = self._names.adapters.take_asked()
        return StepMetadata(
            loads,
            saves,
            output.total_num_scheduled_tokens,
            fetches=fetches,
            jumps=jumps,
            released=released,
            alone=alone,
            run=self._jumps.cold.tell(),
            handoffs=handoffs,
            generation=self._names.generation,
            number=self._steps,
            adapters=asked,
        )

    def _may_serve(self) -> bool:
        """Returns whether the engine is idle, and has the weights of its namespace. Any thread."""
        ready = self._segments.enabled and self._saves and not self._names.generation
        return ready and not self._followed and time.monotonic() - self._worked > _REST

    def bare_step(self, output: Any) -> StepMetadata:
        """Call it after an error in `step`: requests that have jumped would be wrong without their jumps."""
        fetches, jumps, released = self._jumps.step(output, self._pool)
        return StepMetadata([], [], output.total_num_scheduled_tokens, fetches=fetches, jumps=jumps, released=released)

    def _offer_all(self, output: Any, saves: list[Save]) -> None:
        if not self._saves or self._opening.cache is None:
            return
        cached = output.scheduled_cached_reqs
        computed_tokens = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        computed_tokens.update(zip(cached.req_ids, cached.num_computed_tokens))
        for name, computed in computed_tokens.items():
            if (followed := self._followed.get(name)) is not None:
                end = computed + output.num_scheduled_tokens[name]
                block_ids = functools.partial(output.kv_connector_block_state.get_block_ids, name)
                if (save := self._offers.offer(followed, computed, end, block_ids)) is not None:
                    saves.append(save)

    def new_request(self, request: Any) -> None:
        adapter = request.lora_request
        if adapter is not None and self._names.adapters.arrive(adapter):
            self._exclude_computed(lambda each: adapter_name(each) == adapter.lora_name)
        media: list[Future[bytes]] = []
        self._names.begin(request, media)
        if not self._names.serves(request):
            return
        if self._loads and (segments := self._segments.lengths_of(request)):
            self._jumps.add(request, segments, salt_of(request))
        followed = self._followed.setdefault(request.request_id, Followed(request, salt_of(request), media=media))
        self._names.find(followed)  # starts the computation of its name
        try:
            followed.node = node_of(request)
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s; its states are not handed off", request.request_id, error)

    def prefill_end(self, request: Any, start: int, end: int) -> int:
        """As `Offers.prefill_end`."""
        followed = self._followed.get(request.request_id)
        return self._offers.prefill_end(followed, start, end) if self._saves and followed is not None else end

    def leap(self, request: Any, tokens: int, managers: Sequence[Any]) -> int | None:
        """Moves a request over an interior if it has reached the interior's start. Returns the number of tokens of its
        step, if it is limited."""
        return self._jumps.leap(request, tokens, managers, self._pool)

    def reserved_tokens(self) -> int:
        """Returns the number of the next step's tokens that are left for a segment. Call it before each step is
        scheduled."""
        return self._jumps.cold.reserve(self._pool)

    def yield_blocks(self) -> bool:
        """Abandons a segment's run whose blocks the engine needs. Returns whether blocks are free now."""
        return self._jumps.cold.abandon(self._pool)

    def next_stop(self, request: Any, start: int) -> int | None:
        """Returns where a step must end because a jump follows."""
        return self._jumps.next_stop(request, start)

    # ---- what workers report

    def awaits_reports(self) -> bool:
        """Returns whether blocks are held until workers report, for which an engine without requests must continue to
        step.

        A hung daemon may write to blocks at any time; an idle engine then stops asking.
        """
        cold = self._jumps.cold.pending and not self._followed and self._opening.cache is not None
        if cold or self._handoffs.waiting or self._serving_start.awaits_layout:
            return True
        return bool(self._offers.under_way or self._blocks.has_unresolved) and time.monotonic() < self._reports_until

    def _await_reports(self) -> None:
        options = self._options
        longest = 2 * options.call_ms + options.land_ms + options.quiet_ms
        self._reports_until = time.monotonic() + longest / 1000

    def update(self, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport()
        if (report.refusing or report.without_segments) and self._segments.enabled:
            self._serving_start.cancel()
            self._segments.enabled = False  # before a rank without segments would miss a forward of the others
            self._jumps.reset(self._pool, self._names.generation)
        if report.refusing:
            self._loads = self._saves = False
            self._state.set("unsupported", "a worker cannot use the cache; its log line has the reason")
        if report.pace[0] > 0 and not self._options.tokens_per_second:
            self._tokens_per_second = self._lookups.tokens_per_second = 1e9 / report.pace[0]
            self._opening.reopen()
            self._jumps.set_rate(self._tokens_per_second)
        if any(name != self._described.identity.text for name in report.names):
            self._refuse(report.names)
        if self._names.generation in report.outdated:
            self.reset()
        changed = self._names.adapters.hear(report.adapters)
        if changed:
            self._exclude_computed(lambda followed: adapter_name(followed) in changed)
        if self._segments.enabled and 0 in report.layouts:
            self._jumps.lookups.open(report.layouts[0])
            limit = (self._options.call_ms + self._options.land_ms) / 1000
            serving = self._serving_start.start(lambda: self._jumps.lookups.cache, self._may_serve, limit)
            if serving is not None:
                self._jumps.cold.serving = serving
        self._jumps.hear(report.fetched, self._pool)
        self._jumps.cold.ran(report.ran, self._pool)
        self._decide(number for number, _ in report.fetched)
        if report:
            self._await_reports()
        for name, ranks in report.unresolved.items():
            self._blocks.hold(name, ranks)
        failed = set(report.failed) | set(output.failed_recving or ())
        for name in output.finished_recving or ():
            followed = self._followed.get(name)
            self._loaded(name, name in failed or (followed is not None and followed.refused))
        for name in failed - set(output.finished_recving or ()):
            if name in self._followed:
                self._followed[name].refused = True
        for name, ranks in report.quiesced.items():
            self._blocks.quiesced(name, ranks)
        for number, ranks in report.saved.items():
            self._offers.saved(number, ranks, report.kept[number])
        self._offers.note_accepted(self._followed.values())

    def _decide(self, fetched: Iterable[int]) -> None:
        """Call it before the engine looks these prompts up in its own cache again: by then their blocks have names."""
        for request in self._jumps.requests_of(fetched):
            followed = self._followed.get(request.request_id)
            lookup = None if followed is None else followed.lookup
            if lookup is None or lookup.plan is not None:
                found = 0 if lookup is None or lookup.plan is None else lookup.plan.prefix_tokens
                self._jumps.decide(request, found, self._pool)

    def _refuse(self, names: Iterable[str]) -> None:
        """Turns the cache off: a worker's identity of the model differs, so its saves would never be found."""
        for name in names:
            differing = ", ".join(differences(self._described.identity.text, name))
            if differing and (self._loads or self._saves):
                self._state.set("disagreement", f"scheduler and worker differ in {differing}")
        self._loads = self._saves = False

    def _renew(self) -> None:
        """Reports the engine's rate of prefill to the daemon, which is only possible by opening the caches again."""
        self._opening.refresh(not any(followed.lookup for followed in self._followed.values()))
        self._jumps.refresh()

    def take_events(self) -> list[Any]:
        return self._offers.take_events()

    def finished(self, request: Any, ids: Sequence[list[int]]) -> None:
        followed = self._followed.get(request.request_id)
        try:
            if followed is not None and not followed.loading:
                self._offer_end(followed, ids)
                if self._opening.cache is not None:
                    self._handoffs.add(followed, self._jumps.exact_tokens(request))
        finally:
            self._jumps.drop(request, self._pool)
            if followed is not None and followed.loading:
                followed.ended = True
            elif followed is not None:
                self._erase(followed)

    def _offer_end(self, followed: Followed, ids: Sequence[list[int]]) -> None:
        # Before the request's first step, another connector (MultiConnector) may still be loading its tokens.
        if self._saves and self._opening.cache is not None and followed.scheduled:
            if (save := self._offers.offer_end(followed, ids)) is not None:
                self._new_saves.append(save)
                self._await_reports()
