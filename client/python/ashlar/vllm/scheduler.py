# SPDX-License-Identifier: Apache-2.0
"""The connector's half in the scheduler: looks prompts up, hands plans to the workers, decides what is saved."""

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
from ashlar.vllm.events import stored_events
from ashlar.vllm.identity import differences
from ashlar.vllm.media import MediaNames, Unnamed
from ashlar.vllm.messages import Compose, Load, Save, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.segments import ADAPTERS, declared, name_alone, name_apart, named_apart, salt_of, unsupported
from ashlar.vllm.state import State
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_POLL = 0.0001  # seconds
_PAUSE = 1.0  # seconds without lookups after one that was late
_WARN_EVERY = 60.0  # seconds
_MOST_DEPTHS = 64  # of one commit
_MOST_SAID = 16  # reasons that are logged
_MOST_WANTED = 4  # depths inside a prompt that the cache asks for
_REWRITTEN = 8  # last tokens of a prompt that a chat template writes in another way in the next turn
_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)
_SOURCES = {"dram": CacheHitSource.HOST, "ssd": CacheHitSource.DISK, "remote": CacheHitSource.P2P}


def _adapter_name(followed: _Followed) -> str | None:
    adapter = followed.request.lora_request
    return None if adapter is None else str(adapter.lora_name)


@dataclasses.dataclass
class _Name:
    """What a request's keys take beside its tokens."""

    salt: str
    media: list[tuple[int, bytes]]  # position and digest
    adapter: AdapterLoad | None

    def within(self, tokens: int) -> list[tuple[int, bytes]]:
        return [medium for medium in self.media if medium[0] < tokens]


@dataclasses.dataclass
class _Lookup:
    handle: ashlar.Request
    name: _Name
    tokens: int
    since: float
    plan: ashlar.Plan | None = None


@dataclasses.dataclass
class _Followed:
    """One of the engine's requests, as far as it is known."""

    request: Any
    salt: str  # the caller's
    lookup: _Lookup | None = None
    loading: int = 0  # tokens of the prefix that is being loaded
    missed: tuple[int, int] = (0, 0)  # tokens of the request, and computed ones, for which nothing was found
    refused: bool = False  # nothing is looked up any more: a load has failed
    wanted: list[int] = dataclasses.field(default_factory=list)  # depths at which prompts part, as the cache knows
    saved: int = 0  # tokens that were offered, or came from the cache
    present: int | None = None  # tokens that the engine had before its first step
    ended: bool = False
    mixed: bool = False  # the engine was reset within it: its keys may be of two sets of weights
    segments: list[int] = dataclasses.field(default_factory=list)  # declared: nothing of it is exact
    media: list[Future[bytes]] = dataclasses.field(default_factory=list)  # digests, in the order of its mm_features
    first_step: int = 0  # that computed or loaded a part of it
    nameless: bool = False  # no key can name it
    asked: float | None = None  # when its name was asked for


class Scheduler:
    def __init__(
        self,
        described: Described,
        options: Options,
        ranks: int,
        loads: bool,
        saves: bool,
        event_tokens: int,
        state: State,
    ) -> None:
        self.stats = AshlarStats()
        self._described, self._options, self._ranks = described, options, ranks
        self._loads, self._saves, self._event_tokens = loads, saves, event_tokens
        self._least = max(1, options.min_tokens)
        self._segments = options.segments
        if self._segments and (reason := unsupported(described)):
            logger.warning("Ashlar: segments are off: %s; prompts with segments are treated as plain prompts", reason)
            self._segments = False
        if not described.identity.plain:
            logger.warning(
                "Ashlar: enable_lora on a CPU: prompts without an adapter are computed without the cache, as vLLM may apply "
                "an adapter to them"
            )
        self._followed: dict[str, _Followed] = {}
        self._new_loads: list[Load] = []
        self._new_composes: list[Compose] = []
        self._new_saves: list[Save] = []  # of requests that have ended
        self._number = 0
        self._under_way: dict[int, tuple[list[Any], Save, Any]] = {}  # blocks held, of a request
        self._left: dict[int, int] = {}  # ranks that have not ended a save
        self._kept: Counter[int] = Counter()
        self._doubtful: dict[str, tuple[list[Any], int]] = {}  # blocks held, and for how many ranks
        self._reports_until = 0.0  # workers are waited for that long, where blocks are held
        self._loaded_blocks: dict[str, list[int]] = {}
        self._paused_until = self._warn_again = 0.0
        self._tokens_per_second = (
            options.tokens_per_second
        )  # of prefill; where it is not declared, as workers measure it
        self._renewing = False
        self._generation = ""  # of the engine's weights; unique from the first reset on
        self._pool: Any = None
        self._happened: list[Any] = []
        self._state = state
        self._steps = 0
        self._media = MediaNames(described.identity.encoders)
        self._adapters = KnownAdapters(ranks)
        self._said: set[str] = set()  # why requests have no name
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
        self._opening.close()

    def reset(self) -> bool:
        """After this nothing is found that was stored before: the engine may have other weights, whose digest is unknown.

        False: some of the engine's requests go on with keys or states of before.
        """
        self._generation = uuid.uuid4().hex
        self._begin_anew(lambda followed: True)
        return not any(followed.mixed for followed in self._followed.values())

    def _begin_anew(self, concerns: Callable[[_Followed], bool]) -> None:
        """Requests that have keys or states are not saved any more, and the engine finds nothing in its own cache."""
        for followed in filter(concerns, self._followed.values()):
            if not followed.mixed and (followed.loading > 0 or followed.request.num_computed_tokens > 0):
                followed.mixed = True
                name_alone(followed.request)
            elif not followed.mixed:
                self._drop(followed)
                followed.saved, followed.missed = 0, (0, 0)
        # Of the engine's own prefix cache, too: a prompt resumed from there would be saved by the new weights' name.
        if self._pool is not None:
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks if block.block_hash is not None})

    def _salt(self, followed: _Followed) -> str:
        return self._generation + followed.salt

    def _name(self, followed: _Followed) -> _Name | None:
        """None: it has none, or it is not known yet."""
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
        """Whether the request waits for its name. It is not scheduled meanwhile; others are."""
        now = time.monotonic()
        if followed.asked is None:
            followed.asked = now
        adapter = followed.request.lora_request
        if followed.nameless or (adapter is not None and not self._adapters.may_come(adapter.lora_int_id)):
            return False
        return now - followed.asked < self._options.lookup_ms / 1000

    # ---- looking up

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that the cache has, loaded between steps; None: ask again."""
        known = self._followed.get(request.request_id)
        if known is not None and known.segments:
            return self._match_segments(known, computed)
        if not self._loads or request.num_tokens - 1 - computed < self._least or not self._serves(request):
            return 0, False
        followed = self._followed.setdefault(request.request_id, _Followed(request, salt_of(request)))
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
        lookup = self._look_up(followed, name)
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

    def _match_segments(self, followed: _Followed, computed: int) -> tuple[int, bool]:
        """All declared segments, looked up or not: the worker computes those that the cache lacks."""
        tokens = sum(followed.segments)
        # Blocks of such a request are found again behind the same segments alone, and then stand for all of them.
        if followed.refused or computed > 0 or tokens < self._least:
            return 0, False
        return tokens, True

    def ends_within_block(self, request: Any) -> bool:
        """Whether what is loaded for a request may end inside a block. Segments may."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            return True
        return followed.lookup.plan.prefix_tokens % self._described.block != 0

    def _serves(self, request: Any) -> bool:
        """Prompts whose tokens, media and adapter say what their states are, and whose states are exact."""
        identity, adapter = self._described.identity, request.lora_request
        if request.prompt_embeds is not None or named_apart(request) or request.pooling_params:
            return False
        if adapter is None:
            return identity.plain
        # Not those whose adapter is loaded again in each step, nor those whose encoders it changes: the engine reuses
        # outputs of encoders by the adapter's name.
        return not adapter.load_inplace and not (request.mm_features and identity.adapted_encoders)

    def _look_up(self, followed: _Followed, name: _Name) -> _Lookup | None:
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
            handle = cache.start_begin(tokens, media=name.within(len(tokens)), salt=name.salt)
            lookup = followed.lookup = _Lookup(handle, name, request.num_tokens, now)
        if lookup.plan is not None:
            return lookup
        deadline = lookup.since + self._options.lookup_wait_ms / 1000
        while (verdict := lookup.handle.poll_plan()) == ashlar.Verdict.PENDING and time.monotonic() < deadline:
            time.sleep(_POLL)
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
        """A daemon that answers late would delay the prompts to come, too."""
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
        """The request waits for `external` tokens. Where this raises, `fail_load` ends its wait."""
        followed = self._followed.get(request.request_id)
        if followed is not None and followed.segments:
            followed.loading = external
            text: npt.NDArray[np.int32] = np.array(request.all_token_ids[: external + 1], np.int32)
            ids = blocks.get_block_ids()
            self._new_composes.append(Compose(request.request_id, text, followed.segments, ids, self._salt(followed)))
            return
        if followed is None or followed.lookup is None or followed.lookup.plan is None:
            raise RuntimeError(f"{request.request_id}: no match is known for the request")
        plan, ids = followed.lookup.plan, blocks.get_block_ids()
        tokens = plan.prefix_tokens
        self._loaded_blocks[request.request_id] = [
            page for table in self._described.pages(ids, tokens) for page in table
        ]
        followed.loading = tokens
        followed.first_step = followed.first_step or self._steps + 1
        tier = plan.prefix_tier or "dram"
        table = self._described.count(request.num_tokens)
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
            )
        )

    def fail_load(self, request: Any) -> None:
        name = request.request_id
        self._new_composes = [each for each in self._new_composes if each.request != name]
        self._new_loads = [each for each in self._new_loads if each.request != name]
        self._new_loads.append(Load(name, b"", 0, 0, tuple([] for _ in range(self._described.groups)), 0, "dram"))
        self._loaded_blocks.pop(name, None)
        if name in self._followed:
            self._followed[name].loading = 1  # ends with the load, whatever becomes of the request meanwhile

    def sources(self, request: Any, tokens: int) -> dict[Any, int]:
        followed = self._followed.get(request.request_id)
        plan = followed.lookup.plan if followed is not None and followed.lookup is not None else None
        tier = plan.prefix_tier if plan is not None else None
        return {_SOURCES.get(tier or "", CacheHitSource.EXTERNAL_UNSPECIFIED): tokens}

    def _loaded(self, name: str, failed: bool) -> None:
        followed = self._followed.get(name)
        self._loaded_blocks.pop(name, None)
        if followed is None:
            return
        self._drop(followed)
        followed.refused |= failed
        if not failed:
            followed.saved = max(followed.saved, followed.loading)
        followed.loading = 0
        if followed.ended:
            self._erase(followed)

    # ---- saving

    def step(self, output: Any) -> StepMetadata:
        loads, self._new_loads = self._new_loads, []
        composes, self._new_composes = self._new_composes, []
        saves, self._new_saves = self._new_saves, []
        self._steps += 1
        try:
            for name in output.num_scheduled_tokens:
                if (followed := self._followed.get(name)) is not None:
                    followed.first_step = followed.first_step or self._steps
            self._renew()
            self._offer_all(output, saves)
        except Exception:  # the loads must go out: their requests wait for them
            logger.exception("Ashlar: the rest of this step is not saved")
        tokens, asked = output.total_num_scheduled_tokens, self._adapters.take_asked()
        return StepMetadata(loads, saves, tokens, composes, self._generation, self._steps, asked)

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
        with contextlib.suppress(Unnamed):  # as `_name` says
            self._media.begin(request, media)
        if not self._serves(request):
            return
        segments, salt = self._declared(request), salt_of(request)
        if segments:
            name_apart(request, segments)
        followed = _Followed(request, salt, segments=segments, media=media)
        self._name(self._followed.setdefault(request.request_id, followed))  # begins to find it out

    def _declared(self, request: Any) -> list[int]:
        if not self._segments or not self._loads or request.lora_request or request.mm_features:
            return []
        try:
            return declared(request)
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s", request.request_id, error)
            return []

    def _offer(self, output: Any, name: str, computed: int, saves: list[Save]) -> None:
        followed = self._followed.get(name)
        if followed is None or followed.segments or followed.mixed:
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
        # A step may be scheduled before its tokens are known.
        depths = [depth for depth in depths if depth <= request.num_tokens]
        if not depths:
            return
        ids = output.kv_connector_block_state.get_block_ids(name)
        if ids is not None and (save := self._hold(followed, depths, ids)) is not None:
            save.running = save.depths[-1] % self._described.block != 0
            saves.append(save)

    def prefill_end(self, request: Any, start: int, end: int) -> int:
        """Where a prefill step of a hybrid ends at the latest, so that the cache gets the states that it wants."""
        followed, tail = self._followed.get(request.request_id), self._options.checkpoint_tokens
        if tail == 0 or not self._saves or followed is None or followed.segments or followed.mixed:
            return end
        stops = [*followed.wanted, request.num_prompt_tokens - tail]
        stop = min((each for each in stops if start + self._least <= each < end), default=end)
        # The last block's end before that has a state, too: the engine's own cache knows no other.
        whole = stop // self._described.block * self._described.block
        return whole if stop < end and start < whole else stop

    def _hold(self, followed: _Followed, depths: list[int], ids: Sequence[list[int]]) -> Save | None:
        """A save of those depths whose blocks are there. They are held until it has ended."""
        named = self._name(followed)
        if named is None or (named.adapter is not None and followed.first_step < named.adapter.step):
            return None
        if len(self._under_way) >= self._options.saves_in_flight:
            self.stats.add(1, "stores", "busy")
            return None
        request, block = followed.request, self._described.block
        spare: list[Any] = []
        if self._described.packed and any(depth % block for depth in depths):
            if self._pool.get_num_free_blocks() < len(self._described.attention_groups):
                depths = [depth for depth in depths if depth % block == 0]
            else:
                spare = self._pool.get_new_blocks(len(self._described.attention_groups))
        needed: dict[int, None] = {}
        kept = []
        for depth in depths:
            held = self._described.resumes_from(ids, depth)
            if held:
                kept.append(depth)
                needed.update(dict.fromkeys(held))
        if not kept:
            self._pool.free_blocks(spare)
            return None
        text = kept[-1]
        self._number += 1
        tokens: npt.NDArray[np.int32] = np.array(request.all_token_ids[:text], np.int32)
        blocks = tuple(table[: self._described.count(text)] for table in ids)
        prompt, media = request.num_prompt_tokens, named.within(text)
        save = Save(self._number, tokens, kept, blocks, prompt, named.salt, media, named.adapter)
        touched = [self._pool.blocks[i] for i in needed]
        self._pool.touch(touched)
        save.spare = [each.block_id for each in spare]
        self._under_way[save.number] = (touched + spare, save, request)
        self._await_reports()
        followed.saved = text
        return save

    def _ends(self, computed: int, end: int, saved: int, prompt: int) -> list[int]:
        """Of a text with linear layers: where the step ends, and its last block's end before that, if the state is kept."""
        block = self._described.block
        within = (end - 1) // block * block
        depths = []
        # Behind the step's first block: a block of its own has the state, or the null block stands for it.
        if self._described.keeps_within and computed % block == 0 and saved < within >= computed + block:
            depths, saved = [within], within
        if end > saved and (end % block == 0 or saved + self._least <= end <= prompt):
            depths.append(end)
        return depths

    def _depths(self, end: int, saved: int, wanted: list[int]) -> list[int]:
        """Of a text without linear layers: multiples of the grain, and what is wanted beside them."""
        grain = self._described.grain
        found = set(range(saved // grain * grain + grain, end + 1, grain))
        depths = sorted(found.union(depth for depth in wanted if saved + self._least <= depth <= end))
        while len(depths) > _MOST_DEPTHS:
            depths = depths[-1::-2][::-1]
        return depths

    # ---- what workers report

    def awaits_reports(self) -> bool:
        """Whether blocks are held until workers report: an engine without requests has to step for that.

        A daemon that hangs may write to blocks for as long as it likes; an idle engine then stops to ask.
        """
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
        if any(name != self._described.identity.text for name in report.names):
            self._refuse(report.names)
        if self._generation in report.outdated:
            self.reset()
        changed = self._adapters.hear(report.adapters)
        if changed:
            self._begin_anew(lambda followed: _adapter_name(followed) in changed)
        if report.without_segments:
            self._segments = False
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

    def _refuse(self, names: Iterable[str]) -> None:
        """A worker calls the engine's model by another name: what it saves would never be found."""
        for name in names:
            differing = ", ".join(differences(self._described.identity.text, name))
            if differing and (self._loads or self._saves):
                self._state.set("disagreement", f"scheduler and worker differ in {differing}")
        self._loads = self._saves = False

    def _renew(self) -> None:
        """Tells the daemon how fast the engine computes, which opening the cache alone does."""
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
        if followed is None:
            return
        if followed.loading:
            followed.ended = True
            return
        try:
            self._offer_end(followed, ids)
        finally:
            self._erase(followed)

    def _offer_end(self, followed: _Followed, ids: Sequence[list[int]]) -> None:
        """What a request has decoded, up to its last computed token. No step overwrites its states any more."""
        request, end = followed.request, followed.request.num_computed_tokens
        if not self._saves or self._opening.cache is None or followed.segments or followed.mixed:
            return
        # A step that was scheduled ahead may still go on from these states.
        if request.status not in _WHOLE or request.num_in_flight_tokens > 0:
            return
        if not request.num_prompt_tokens < end <= request.num_tokens:
            return
        if end - followed.saved >= self._least and (save := self._hold(followed, [end], ids)) is not None:
            self._new_saves.append(save)
