# SPDX-License-Identifier: Apache-2.0
"""The connector's half in the scheduler: looks prompts up, sends plans to the workers, and decides what is saved."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import ashlar
from ashlar.vllm.adapters import AdapterLoad, KnownAdapters
from ashlar.vllm.boundaries import Boundaries
from ashlar.vllm.drafts import Place, Step
from ashlar.vllm.events import stored_events
from ashlar.vllm.handoffs import Handoff, handed_depths, node_of
from ashlar.vllm.identity import differences
from ashlar.vllm.jumps import Jumps
from ashlar.vllm.lookups import await_plan, lookup_wait
from ashlar.vllm.media import MediaNames, Unnamed
from ashlar.vllm.messages import Load, Save, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.segments import ADAPTERS, declared, name_alone, named_apart, salt_of, unsupported
from ashlar.vllm.state import State
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_PAUSE = 1.0  # seconds without lookups after a late one
_WARN_EVERY = 60.0  # seconds
_MOST_DEPTHS = 64  # depths per commit
_MOST_SAID = 16  # number of reasons that are logged
_MOST_WANTED = 4  # depths inside a prompt that the cache may request
_REWRITTEN = 8  # last tokens of a prompt that a chat template writes differently in the next turn
_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)
_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_SOURCES = {"dram": CacheHitSource.HOST, "ssd": CacheHitSource.DISK, "remote": CacheHitSource.P2P}


def _adapter_name(followed: _Followed) -> str | None:
    adapter = followed.request.lora_request
    return None if adapter is None else str(adapter.lora_name)


@dataclasses.dataclass
class _Name:
    """Everything besides tokens on which a request's keys depend."""

    salt: str
    media: list[tuple[int, bytes]]  # position and digest
    adapter: AdapterLoad | None

    def within(self, tokens: int) -> list[tuple[int, bytes]]:
        return [medium for medium in self.media if medium[0] < tokens]


@dataclasses.dataclass
class _Lookup:
    handle: ashlar.Request
    name: _Name
    tokens: int  # tokens of the request
    looked_up: int  # tokens that were looked up, from the first one on
    since: float
    plan: ashlar.Plan | None = None


@dataclasses.dataclass
class _Followed:
    """The connector's record of one of the engine's requests."""

    request: Any
    salt: str  # the caller's salt
    lookup: _Lookup | None = None
    loading: int = 0  # tokens of the prefix that is being loaded
    missed: tuple[int, int] = (0, 0)  # numbers of tokens and of computed tokens for which the last lookup found nothing
    refused: bool = False  # a load has failed: nothing more is looked up
    wanted: list[int] = dataclasses.field(default_factory=list)  # depths at which known prompts diverge
    saved: int = 0  # tokens that were offered to the cache or came from it
    present: int | None = None  # tokens that the engine had before its first step
    ended: bool = False
    mixed: bool = False  # the engine was reset during the request: its keys may be of two sets of weights
    media: list[Future[bytes]] = dataclasses.field(default_factory=list)  # digests, in the order of its mm_features
    step: Step | None = None  # its last step, if that leaves states of drafts
    first_step: int = 0  # step that first computed or loaded a part of it
    nameless: bool = False  # it has no name, so it is not cached
    asked: float | None = None  # time at which its name was requested
    node: str = ""  # node of the decode engine that continues the request
    depths: list[int] = dataclasses.field(default_factory=list)  # depths whose states were offered or loaded


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
        state: State,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.stats = AshlarStats()
        self._described, self._options, self._ranks = described, options, ranks
        self._loads, self._saves, self._event_tokens = loads, saves, event_tokens
        self._least = max(1, options.min_tokens)
        self._segments = options.segments
        if self._segments and (reason := unsupported(described)):
            logger.warning("Ashlar: segments are off: %s; prompts with segments are treated as plain prompts", reason)
            self._segments = False
        self._boundaries = boundaries
        self._jumps = Jumps(described, options, hash_tokens, saves, self.stats, ranks)
        if not described.identity.plain:
            logger.warning(
                "Ashlar: enable_lora on a CPU: prompts without an adapter are computed without the cache, as vLLM may apply "
                "an adapter to them"
            )
        self._followed: dict[str, _Followed] = {}
        self._new_loads: list[Load] = []
        self._new_saves: list[Save] = []  # saves of ended requests
        self._new_handoffs: list[Handoff] = []
        self._number = 0
        self._under_way: dict[int, tuple[list[Any], Save, Any]] = {}  # saves in flight, with the blocks held for them
        self._left: dict[int, int] = {}  # number of ranks that have not ended a save
        self._kept: Counter[int] = Counter()
        # Blocks held for unresolved loads, and the number of ranks.
        self._doubtful: dict[str, tuple[list[Any], int]] = {}
        self._reports_until = 0.0  # limit of the wait for workers' reports while blocks are held
        self._loaded_blocks: dict[str, list[int]] = {}
        self._spare: dict[str, list[Any]] = {}  # spare blocks of loads
        self._paused_until = self._warn_again = 0.0
        self._tokens_per_second = (
            options.tokens_per_second
        )  # rate of prefill; if it is not declared, as measured by workers
        self._renewing = False
        self._generation = ""  # generation of the engine's weights; unique after the first reset
        self._pool: Any = None
        self._happened: list[Any] = []
        self._state = state
        self._steps = 0
        self._media = MediaNames(described.identity.encoders)
        self._adapters = KnownAdapters(ranks)
        self._said: set[str] = set()  # logged reasons for requests without a name
        self._opening = Opening(self._open, described.identity.weights, options, "scheduler", state)

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

    def close(self) -> None:
        for followed in list(self._followed.values()):
            self._erase(followed)
        self._media.close()
        self._jumps.close()
        self._opening.close()

    def reset(self) -> bool:
        """Afterwards objects that were stored before are not found: the engine may have other weights, whose digest is
        unknown.

        Returns False if some of the engine's requests continue with earlier keys or states.
        """
        self._generation = uuid.uuid4().hex
        self._begin_anew(lambda followed: True)
        return not any(followed.mixed for followed in self._followed.values())

    def _begin_anew(self, concerns: Callable[[_Followed], bool]) -> None:
        """Requests that have keys or states are no longer saved, and the engine's own cache is emptied."""
        for followed in filter(concerns, self._followed.values()):
            if not followed.mixed and (followed.loading > 0 or followed.request.num_computed_tokens > 0):
                followed.mixed = True
                name_alone(followed.request)
            elif not followed.mixed:
                self._drop(followed)
                followed.saved, followed.missed = 0, (0, 0)
        self._jumps.reset(self._pool, self._generation)
        # Also empties the engine's own prefix cache: a prompt resumed from it would be saved under the new weights'
        # name.
        if self._pool is not None:
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks if block.block_hash is not None})

    def _salt(self, followed: _Followed) -> str:
        return self._generation + followed.salt

    def _name(self, followed: _Followed) -> _Name | None:
        """Returns None if the request has no name, or its name is not known yet."""
        if followed.nameless:
            return None
        request, salt, load = followed.request, self._salt(followed), None
        try:
            media = self._media.names(request, followed.media) if request.mm_features else []
        except Unnamed as error:
            followed.nameless = True
            if len(self._said) < _MOST_SAID and str(error) not in self._said:
                self._said.add(str(error))
                logger.warning("Ashlar: requests are computed without the cache: %s", error)
            return None
        adapter = request.lora_request
        if adapter is not None:
            found = self._adapters.find(adapter.lora_int_id)
            if found is None:
                return None
            load, digest = found
            named = [adapter.lora_name, digest, self._described.identity.adapters, followed.salt]
            salt = self._generation + ADAPTERS + hashlib.sha256(json.dumps(named).encode()).hexdigest()
        return None if media is None else _Name(salt, media, load)

    def _awaits_name(self, followed: _Followed) -> bool:
        """Returns whether the request waits for its name. Meanwhile other requests are scheduled."""
        now = time.monotonic()
        if followed.asked is None:
            followed.asked = now
        adapter = followed.request.lora_request
        if followed.nameless or (adapter is not None and not self._adapters.may_come(adapter.lora_int_id)):
            return False
        return now - followed.asked < self._options.lookup_ms / 1000

    # ---- looking up

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Returns the number of tokens beyond `computed` that the cache has, and whether they are loaded between steps;
        None: ask again."""
        known = self._followed.get(request.request_id)
        jumps = self._loads and known is not None
        if jumps:
            self._jumps.start(request, computed, self._pool)  # both lookups run at the same time
        found, between = self._match_prefix(request, computed)
        waits = jumps and self._jumps.waits(request, computed, self._pool)
        if waits and found is not None:
            decided = self._jumps.decide(request, computed + found, self._pool)
            waits = not decided or self._jumps.refuses_prefix(request) or self._jumps.may_have_more(request, self._pool)
        if waits or found is None:
            return None, False
        first = self._jumps.external(request, computed, self._pool)
        return (found, between) if first == 0 else (first, False)

    def _match_prefix(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if not self._loads or request.num_tokens - 1 - computed < self._least or not self._serves(request):
            return 0, False
        followed = self._followed.setdefault(request.request_id, _Followed(request, salt_of(request)))
        if self._jumps.refuses_prefix(request):
            self._drop(followed)
            return 0, False
        asked = (request.num_tokens, computed)
        if followed.refused or followed.missed == asked or request.skip_reading_prefix_cache:
            return 0, False
        name = self._name(followed)
        if name is None:
            if self._awaits_name(followed):
                return None, False
            self.stats.add(1, "lookups", "unnamed")
            followed.missed = asked
            return 0, False
        lookup = self._look_up(followed, name, computed)
        if lookup is None:
            return 0, False
        if lookup.plan is None:
            return None, False
        found = lookup.plan.prefix_tokens
        inside = [step.end for step in lookup.plan.steps if step.capture and step.end < request.num_tokens]
        followed.wanted = inside[-_MOST_WANTED:]
        if found - computed < self._least:
            self.stats.add(1, "lookups", "no_gain" if found > 0 else "miss")
            self._drop(followed)
            followed.missed = asked
            return 0, False
        return found - computed, True

    def ends_within_block(self, request: Any) -> bool:
        """Returns whether a load for the request may end inside a block, as segments may."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            return True
        return followed.lookup.plan.prefix_tokens % self._described.block != 0

    def _serves(self, request: Any) -> bool:
        """Returns whether the prompt's tokens, media and adapter determine its states, and its states are exact."""
        identity, adapter = self._described.identity, request.lora_request
        if request.prompt_embeds is not None or named_apart(request) or request.pooling_params:
            return False
        if adapter is None:
            return identity.plain
        # Not if its adapter is loaded again in each step, or changes encoders: the engine reuses outputs of encoders by
        # the adapter's name.
        return not adapter.load_inplace and not (request.mm_features and identity.adapted_encoders)

    def _look_up(self, followed: _Followed, name: _Name, computed: int) -> _Lookup | None:
        request, lookup = followed.request, followed.lookup
        now = time.monotonic()
        if lookup is not None and lookup.tokens != request.num_tokens:
            self._drop(followed)
            lookup = None
        if lookup is None:
            cache = self._opening.cache
            if cache is None:
                return None
            if now < self._paused_until:
                self.stats.add(1, "lookups", "paused")
                return None
            tokens = np.array(request.all_token_ids, np.int32)
            if (most := self._described.most_tokens) is not None:
                # A lookup finds only prefixes that are shorter than the given tokens.
                tokens = tokens[: computed // self._described.prefix_block * self._described.prefix_block + most + 1]
            handle = cache.start_begin(tokens, media=name.within(len(tokens)), salt=name.salt)
            lookup = followed.lookup = _Lookup(handle, name, request.num_tokens, len(tokens), now)
        if lookup.plan is not None:
            return lookup
        wait = lookup_wait(self._options, request.num_tokens - computed, self._tokens_per_second)
        verdict = await_plan(lookup.handle, lookup.since + wait)
        if verdict != ashlar.Verdict.PENDING:
            lookup.plan = lookup.handle.plan
        elif now - lookup.since > self._options.lookup_ms / 1000:
            self.stats.add(1, "lookups", "timed_out")
            self._pause(now)
            self._drop(followed)
            followed.refused = True
            return None
        return lookup

    def _pause(self, now: float) -> None:
        """A late daemon would delay the next prompts as well."""
        self._paused_until = now + _PAUSE
        if now >= self._warn_again:
            self._warn_again = now + _WARN_EVERY
            logger.warning(
                "Ashlar: a lookup took longer than lookup_ms (%d ms): prompts of the next %g s are computed without the "
                "cache; vllm:ashlar_lookups_total counts them as paused", self._options.lookup_ms, _PAUSE,
            )  # fmt: skip

    def _drop(self, followed: _Followed) -> None:
        if followed.lookup is not None:
            followed.lookup.handle.end()
            followed.lookup = None

    def _erase(self, followed: _Followed) -> None:
        self._drop(followed)
        self._followed.pop(followed.request.request_id, None)

    # ---- loading

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request waits for `external` tokens. If this raises, `fail_load` ends its wait."""
        followed = self._followed.get(request.request_id)
        if self._jumps.allocated(request, external):
            return
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            raise RuntimeError(f"{request.request_id}: no match is known for the request")
        plan, ids = followed.lookup.plan, blocks.get_block_ids()
        tokens = plan.prefix_tokens
        spare = self._spare_blocks(request.request_id, tokens - external)
        self._loaded_blocks[request.request_id] = [
            page for table in self._described.pages(ids, tokens) + spare for page in table
        ]
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

    def _spare_blocks(self, name: str, present: int) -> list[list[int]]:
        """Returns blocks that replace the present ones of an object. The object lands because its later tokens are
        missing.

        Running requests share the present blocks. The null block could replace one of them, but a landing must not
        write a block twice.
        """
        described = self._described
        count = (present % described.prefix_block) // described.block
        groups = len(described.attention_groups)
        if described.staged or count * groups < 2:
            return []
        taken = self._pool.get_new_blocks(count * groups)  # ValueError: too few blocks are free
        self._spare[name] = taken
        ids = [block.block_id for block in taken]
        return [ids[group * count : (group + 1) * count] for group in range(groups)]

    def fail_load(self, request: Any) -> None:
        name = request.request_id
        self._new_loads = [each for each in self._new_loads if each.request != name]
        self._new_loads.append(Load(name, b"", 0, 0, tuple([] for _ in range(self._described.groups)), 0, "dram"))
        self._loaded_blocks.pop(name, None)
        if name in self._followed:
            self._followed[name].loading = 1  # ends with the load, even if the request ends earlier

    def sources(self, request: Any, tokens: int) -> dict[Any, int]:
        followed = self._followed.get(request.request_id)
        plan = followed.lookup.plan if followed is not None and followed.lookup is not None else None
        tier = plan.prefix_tier if plan is not None else None
        return {_SOURCES.get(tier or "", CacheHitSource.EXTERNAL_UNSPECIFIED): tokens}

    def _loaded(self, name: str, failed: bool) -> None:
        followed = self._followed.get(name)
        self._loaded_blocks.pop(name, None)
        if spare := self._spare.pop(name, None):
            self._pool.free_blocks(spare)
        if followed is None:
            return
        self._drop(followed)
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
        handoffs, self._new_handoffs = self._new_handoffs, []
        self._steps += 1
        fetches, jumps, released = self._jumps.step(output, self._pool)
        alone = None
        try:
            for name in output.num_scheduled_tokens:
                if (followed := self._followed.get(name)) is not None:
                    followed.first_step = followed.first_step or self._steps
            self._note_drafts(output)
            self._renew()
            self._offer_all(output, saves)
            alone = self._jumps.next_alone(self._is_idle(output), self._pool)
        except Exception:  # the loads must still be sent, because their requests wait for them
            logger.exception("Ashlar: the rest of this step is not saved")
        tokens, asked = output.total_num_scheduled_tokens, self._adapters.take_asked()
        return StepMetadata(
            loads,
            saves,
            tokens,
            fetches=fetches,
            jumps=jumps,
            released=released,
            alone=alone,
            handoffs=handoffs,
            generation=self._generation,
            number=self._steps,
            adapters=asked,
        )

    def _note_drafts(self, output: Any) -> None:
        """Notes where this step leaves its states, which is needed when a request ends."""
        if not self._described.drafts:
            return
        for name, tokens in output.num_scheduled_tokens.items():
            if (followed := self._followed.get(name)) is not None:
                request, drafts = followed.request, output.scheduled_spec_decode_tokens.get(name, ())
                # A step in flight may end with rejected drafts, which `update` learns.
                start = None if request.num_in_flight_tokens > 0 else request.num_computed_tokens
                followed.step = Step(start, tokens, len(drafts))

    def _note_accepted(self) -> None:
        """Call it after the engine has processed a step's tokens."""
        for followed in self._followed.values() if self._described.drafts else ():
            request, step = followed.request, followed.step
            if step is not None and step.start is None and request.num_in_flight_tokens == step.tokens:
                step.start = request.num_computed_tokens - step.tokens

    def bare_step(self, output: Any) -> StepMetadata:
        """Call it after an error in `step`: requests that have jumped would be wrong without their jumps."""
        fetches, jumps, released = self._jumps.step(output, self._pool)
        return StepMetadata([], [], output.total_num_scheduled_tokens, fetches=fetches, jumps=jumps, released=released)

    def _is_idle(self, output: Any) -> bool:
        return not self._followed and output.total_num_scheduled_tokens == 0

    def _offer_all(self, output: Any, saves: list[Save]) -> None:
        if not self._saves or self._opening.cache is None:
            return
        for data in output.scheduled_new_reqs:
            self._offer(output, data.req_id, data.num_computed_tokens, saves)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens):
            self._offer(output, name, computed, saves)

    def new_request(self, request: Any) -> None:
        adapter = request.lora_request
        if adapter is not None and self._adapters.arrive(adapter):
            self._begin_anew(lambda each: _adapter_name(each) == adapter.lora_name)
        media: list[Future[bytes]] = []
        with contextlib.suppress(Unnamed):  # for the reason that `_name` logs
            self._media.begin(request, media)
        if not self._serves(request):
            return
        if segments := self._declared(request):
            self._jumps.add(request, segments, salt_of(request))
        followed = self._followed.setdefault(request.request_id, _Followed(request, salt_of(request), media=media))
        self._name(followed)  # starts the computation of its name
        try:
            followed.node = node_of(request)
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s", request.request_id, error)

    def _declared(self, request: Any) -> list[int]:
        if not self._segments or not self._loads or request.lora_request or request.mm_features:
            return []
        if request.skip_reading_prefix_cache:  # log-probabilities of the prompt need all of its tokens
            return []
        try:
            given = declared(request)
            if given is None and self._boundaries is not None:
                return self._boundaries.lengths(request.all_token_ids)
            return given or []
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s", request.request_id, error)
            return []

    def _offer(self, output: Any, name: str, computed: int, saves: list[Save]) -> None:
        followed = self._followed.get(name)
        if followed is None or followed.mixed:
            return
        request = followed.request
        end = computed + output.num_scheduled_tokens[name]
        if followed.present is None:
            followed.present = computed
        saved = max(followed.saved, followed.present)
        if self._described.linear:
            depths = self._ends(computed, end, saved, request.num_prompt_tokens)
        else:
            wanted = [*followed.wanted, request.num_prompt_tokens - _REWRITTEN]
            depths = self._depths(end, saved, wanted)
        # A step may be scheduled before its tokens are known. Tokens after a jump are not exact, and a prompt that
        # resumes where a jump begins could not jump there.
        exact = self._jumps.exact_tokens(request)
        most = request.num_tokens if exact is None else min(request.num_tokens, exact - 1)
        depths = [depth for depth in depths if depth <= most]
        if not depths:
            return
        ids = output.kv_connector_block_state.get_block_ids(name)
        if ids is not None and (save := self._hold(followed, depths, ids)) is not None:
            save.running = save.depths[-1] % self._described.block != 0
            saves.append(save)

    def prefill_end(self, request: Any, start: int, end: int) -> int:
        """Returns the latest end of a hybrid's prefill step, so that the cache gets the states that it requested."""
        followed, tail = self._followed.get(request.request_id), self._options.checkpoint_tokens
        if not self._saves or followed is None or followed.mixed:
            return end
        exact = self._jumps.exact_tokens(request)
        if exact is not None and start >= exact:  # none of its states is saved
            return end
        if self._described.drafts:  # vLLM's own stop is a block earlier if EAGLE or MTP drafts, and none with Mamba-2
            last = (request.num_tokens - 1) // self._described.block * self._described.block
            end = last if start < last < end else end
        if tail == 0:
            return end
        stops = [*followed.wanted, request.num_prompt_tokens - tail]
        stop = min((each for each in stops if start + self._least <= each < end), default=end)
        # The end of the last block before that also has a state: the engine's own cache only uses states at block ends.
        whole = stop // self._described.block * self._described.block
        return whole if stop < end and start < whole else stop

    def leap(self, request: Any, tokens: int, managers: Sequence[Any]) -> int | None:
        """Moves a request over an interior if it has reached the interior's start. Returns the number of tokens of its
        step, if it is limited."""
        return self._jumps.leap(request, tokens, managers, self._pool)

    def next_stop(self, request: Any, start: int) -> int | None:
        """Returns where a step must end because a jump follows."""
        return self._jumps.next_stop(request, start)

    def _hold(
        self, followed: _Followed, depths: list[int], ids: Sequence[list[int]], place: Place | None = None
    ) -> Save | None:
        """Returns a save of the depths whose blocks exist, and holds these blocks until it has ended.

        `place`: the place of the states at a single depth, by default the block of the last token.
        """
        named = self._name(followed)
        if named is None or (named.adapter is not None and followed.first_step < named.adapter.step):
            return None
        if len(self._under_way) >= self._options.saves_in_flight:
            self.stats.add(1, "stores", "busy")
            return None
        request, block, most = followed.request, self._described.block, self._described.most_tokens
        if most is not None and depths[-1] > most:
            self.stats.add(1, "stores", "too_long")
            depths = [depth for depth in depths if depth <= most]
        spare: list[Any] = []
        if self._described.packed and any(depth % block for depth in depths):
            if self._pool.get_num_free_blocks() < len(self._described.attention_groups):
                depths = [depth for depth in depths if depth % block == 0]
            else:
                spare = self._pool.get_new_blocks(len(self._described.attention_groups))
        needed: dict[int, None] = {}
        kept = []
        for depth in depths:
            held = self._described.resumes_from(ids, depth, place)
            if held:
                kept.append(depth)
                needed.update(dict.fromkeys(held))
        if not kept:
            self._pool.free_blocks(spare)
            return None
        text = kept[-1]
        self._number += 1
        tokens: npt.NDArray[np.int32] = np.array(request.all_token_ids[:text], np.int32)
        count = self._described.count(text)
        if place is not None:
            count = max(count, place.column + place.accepted + 1)
        blocks = tuple(table[:count] for table in ids)
        prompt, media = request.num_prompt_tokens, named.within(text)
        save = Save(self._number, tokens, kept, blocks, prompt, named.salt, media, named.adapter)
        save.place = place
        touched = [self._pool.blocks[i] for i in needed]
        self._pool.touch(touched)
        save.spare = [each.block_id for each in spare]
        self._under_way[save.number] = (touched + spare, save, request)
        self._await_reports()
        followed.saved = text
        followed.depths += kept
        return save

    def _ends(self, computed: int, end: int, saved: int, prompt: int) -> list[int]:
        """Returns the depths of a text with linear layers: the step's end, and the end of the last block before it if
        that state is kept."""
        block = self._described.block
        within = (end - 1) // block * block
        depths = []
        # After the step's first block, either a block has the state, or the null block takes its place.
        if self._described.keeps_within and computed % block == 0 and saved < within >= computed + block:
            depths, saved = [within], within
        if end > saved and (end % block == 0 or saved + self._least <= end <= prompt):
            depths.append(end)
        return depths

    def _depths(self, end: int, saved: int, wanted: list[int]) -> list[int]:
        """Returns the depths of a text without linear layers: multiples of the grain, and the requested depths."""
        grain = self._described.grain
        found = set(range(saved // grain * grain + grain, end + 1, grain))
        depths = sorted(found.union(depth for depth in wanted if saved + self._least <= depth <= end))
        while len(depths) > _MOST_DEPTHS:
            depths = depths[-1::-2][::-1]
        return depths

    # ---- what workers report

    def awaits_reports(self) -> bool:
        """Returns whether blocks are held until workers report, for which an engine without requests must continue to
        step.

        A hung daemon may write to blocks at any time; an idle engine then stops asking.
        """
        cold = self._jumps.has_cold and not self._followed and self._opening.cache is not None
        if cold or self._new_handoffs:
            return True
        return bool(self._under_way or self._doubtful) and time.monotonic() < self._reports_until

    def _await_reports(self) -> None:
        options = self._options
        longest = 2 * options.call_ms + options.land_ms + options.quiet_ms
        self._reports_until = time.monotonic() + longest / 1000

    def update(self, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport()
        if report.refusing:
            self._loads = self._saves = False
            self._state.set("unsupported", "a worker cannot use the cache; its log line has the reason")
        if report.pace[0] > 0 and not self._options.tokens_per_second:
            self._tokens_per_second, self._renewing = 1e9 / report.pace[0], True
            self._jumps.tokens_per_second = self._tokens_per_second
        if any(name != self._described.identity.text for name in report.names):
            self._refuse(report.names)
        if self._generation in report.outdated:
            self.reset()
        changed = self._adapters.hear(report.adapters)
        if changed:
            self._begin_anew(lambda followed: _adapter_name(followed) in changed)
        if self._segments and 0 in report.layouts:
            self._jumps.lookups.open(report.layouts[0])
        if report.without_segments:
            self._segments = False
            self._jumps.reset(self._pool, self._generation)
        self._jumps.hear(report.fetched, self._pool)
        self._jumps.ran(report.ran, self._pool)
        self._decide(number for number, _ in report.fetched)
        if report:
            self._await_reports()
        for name, ranks in report.doubtful.items():
            held = [self._pool.blocks[i] for i in self._loaded_blocks.get(name, [])]
            self._pool.touch(held)
            before, waiting = self._doubtful.get(name, ([], 0))
            self._doubtful[name] = (before + held, waiting + ranks)
        failed = set(report.failed) | set(output.failed_recving or ())
        for name in output.finished_recving or ():
            self._loaded(name, name in failed or self._has_failed(name))
        for name in failed - set(output.finished_recving or ()):
            if name in self._followed:
                self._followed[name].refused = True
        for name, ranks in report.quiet.items():
            held, waiting = self._doubtful.pop(name, ([], 0))
            if waiting > ranks:
                self._doubtful[name] = (held, waiting - ranks)
            else:
                self._pool.free_blocks(reversed(held))
        for number, ranks in report.saved.items():
            self._saved(number, ranks, report.kept[number])
        self._note_accepted()

    def _decide(self, fetched: Iterable[int]) -> None:
        """Call it before the engine looks these prompts up in its own cache again: by then their blocks have names."""
        for request in self._jumps.requests_of(fetched):
            followed = self._followed.get(request.request_id)
            lookup = None if followed is None else followed.lookup
            if lookup is None or lookup.plan is not None:
                found = 0 if lookup is None or lookup.plan is None else lookup.plan.prefix_tokens
                self._jumps.decide(request, found, self._pool)

    def _refuse(self, names: Iterable[str]) -> None:
        """A worker has another name for the engine's model, so its saves would never be found."""
        for name in names:
            differing = ", ".join(differences(self._described.identity.text, name))
            if differing and (self._loads or self._saves):
                self._state.set("disagreement", f"scheduler and worker differ in {differing}")
        self._loads = self._saves = False

    def _renew(self) -> None:
        """Reports the engine's rate of prefill to the daemon, which is only possible by opening the cache again."""
        if self._renewing:
            self._renewing = not self._opening.renew()
        if self._opening.renewed and not any(followed.lookup for followed in self._followed.values()):
            self._opening.exchange()

    def _has_failed(self, name: str) -> bool:
        followed = self._followed.get(name)
        return followed is not None and followed.refused

    def _saved(self, number: int, ranks: int, kept: int) -> None:
        if number not in self._under_way:
            return
        left = self._left.pop(number, self._ranks) - ranks
        self._kept[number] += kept
        if left > 0:
            self._left[number] = left
            return
        held, save, request = self._under_way.pop(number)
        self._pool.free_blocks(reversed(held))
        if self._kept.pop(number, 0) == self._ranks and self._event_tokens:
            self._happened += stored_events(request, save.depths[-1], self._event_tokens)

    def take_events(self) -> list[Any]:
        happened, self._happened = self._happened, []
        return happened

    def finished(self, request: Any, ids: Sequence[list[int]]) -> None:
        followed = self._followed.get(request.request_id)
        try:
            if followed is not None and not followed.loading:
                self._offer_end(followed, ids)
                self._hand_off(followed)
        finally:
            self._jumps.forget(request, self._pool)
            if followed is not None and followed.loading:
                followed.ended = True
            elif followed is not None:
                self._erase(followed)

    def _offer_end(self, followed: _Followed, ids: Sequence[list[int]]) -> None:
        """Offers the decoded tokens of a request, up to its last computed one. No step overwrites its states again."""
        request, end = followed.request, followed.request.num_computed_tokens
        if (
            not self._saves
            or self._opening.cache is None
            or followed.mixed
            or self._jumps.exact_tokens(request) is not None
        ):
            return
        # A step that was scheduled ahead may still continue from these states.
        if request.status not in _WHOLE or request.num_in_flight_tokens > 0:
            return
        place = None
        if self._described.drafts:
            depth = min(end, request.num_tokens)  # fewer than `end` if a draft before the last one is a stop token
            place = followed.step.place(depth, end, self._described.block) if followed.step is not None else None
            end = 0 if place is None else depth
        if not request.num_prompt_tokens < end <= request.num_tokens:
            return
        if end - followed.saved >= self._least and (save := self._hold(followed, [end], ids, place)) is not None:
            self._new_saves.append(save)

    def _hand_off(self, followed: _Followed) -> None:
        """Sends the prompt of an ended request to the node that it names. Workers hand it off after its saves."""
        request = followed.request
        if not followed.node or followed.mixed or request.status not in _COMPLETE or self._opening.cache is None:
            return
        exact = self._jumps.exact_tokens(request)
        own = [] if followed.present is None else [followed.present]  # from the engine's own cache
        known = [
            depth for depth in followed.depths + own if 0 < depth <= (request.num_tokens if exact is None else exact)
        ]
        depths = handed_depths(known, request.num_prompt_tokens)
        name = self._name(followed)
        if name is None or not depths:
            return
        tokens: npt.NDArray[np.int32] = np.array(request.all_token_ids[: depths[-1]], np.int32)
        self._new_handoffs.append(Handoff(followed.node, tokens, depths, name.salt, name.within(depths[-1])))
