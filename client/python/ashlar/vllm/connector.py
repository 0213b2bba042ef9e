# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads. It forwards each call to the scheduler half or the worker half of the connector. Errors
are logged, and do not fail requests, except those that leave the engine itself in an undefined state."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from ashlar.vllm import stops
from ashlar.vllm.boundaries import find_boundaries
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.messages import StepMetadata, WorkerReport
from ashlar.vllm.model import Described, describe
from ashlar.vllm.options import Options
from ashlar.vllm.ranks import Ranks, RanksApart
from ashlar.vllm.scheduler import Scheduler
from ashlar.vllm.segments import refused
from ashlar.vllm.serving import find_wake
from ashlar.vllm.state import State
from ashlar.vllm.stats import STATE, AshlarPromMetrics, AshlarStats
from ashlar.vllm.template import rewritten_by, template_of
from ashlar.vllm.worker import Worker

logger = init_logger("vllm.ashlar")

Call = TypeVar("Call", bound=Callable[..., Any])


def _or(fallback: Callable[[], Any]) -> Callable[[Call], Call]:
    """Logs a call that fails, and returns what a connector without a cache would return."""

    def wrap(call: Call) -> Call:
        @functools.wraps(call)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except RanksApart:  # an error of the engine's own
                raise
            except Exception:
                logger.exception("Ashlar: %s failed; the engine continues without the cache", call.__name__)
                return fallback()

        return guarded  # type: ignore[return-value]

    return wrap


def _configurations_around(connector: KVConnectorBase_V1) -> list[Any]:
    """Returns the transfer configurations of connectors that create this one, such as MultiConnector; the engine reads
    theirs."""
    found: list[Any] = []
    frame = sys._getframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1) and maker is not connector and maker._kv_transfer_config not in found:
            found.append(maker._kv_transfer_config)
        frame = frame.f_back  # type: ignore[assignment]
    return found


class AshlarConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector: see docs/vllm.md. vLLM creates one in the scheduler's process and one in each worker.

    ValueError: an option is wrong; the message begins with its name. If the engine is not supported, the cache is off.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = given = Options.read(transfer.kv_connector_extra_config)
        self._template = template_of(self._options)
        if self._options.segments and (reason := refused(vllm_config, self._options)):
            logger.warning("Ashlar: segments are off: %s; prompts with segments are computed", reason)
            self._options = dataclasses.replace(self._options, segments=False)
        if role == KVConnectorRole.SCHEDULER:
            self._drop_unused_options(given, vllm_config)
        boundaries = None
        if self._options.segments and role == KVConnectorRole.SCHEDULER:
            boundaries = find_boundaries(self._options, vllm_config.model_config)
        # A failed load is recomputed. The engine's default would fail the request.
        for each in (transfer, *_configurations_around(self)):
            each.kv_load_failure_policy = "recompute"
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._state = State("scheduler" if role == KVConnectorRole.SCHEDULER else "worker")
        self._told_state = ""
        try:
            if role == KVConnectorRole.SCHEDULER:
                described = self._describe(vllm_config, kv_cache_config, rank=0)
                events = vllm_config.kv_events_config
                event_tokens = 0
                if events is not None and events.enable_kv_cache_events:
                    event_tokens = kv_cache_config.hash_block_size or described.block
                stops_for_states = bool(described.linear) and (
                    self._options.checkpoint_tokens > 0 or described.drafts > 0
                )
                if stops_for_states or self._options.segments:
                    stops.install()
                limits = vllm_config.scheduler_config
                self._scheduler = Scheduler(
                    described,
                    self._options,
                    ranks=vllm_config.parallel_config.tensor_parallel_size,
                    loads=transfer.is_kv_consumer,
                    saves=transfer.is_kv_producer,
                    event_tokens=event_tokens,
                    hash_tokens=kv_cache_config.hash_block_size or described.block,
                    step_tokens=limits.max_num_scheduled_tokens or limits.max_num_batched_tokens,
                    model_tokens=vllm_config.model_config.max_model_len,
                    state=self._state,
                    boundaries=boundaries,
                    wake=self._find_wake(),
                )
            else:
                from vllm.distributed import get_tensor_model_parallel_rank

                rank = get_tensor_model_parallel_rank()
                self._worker = Worker(self._describe(vllm_config, kv_cache_config, rank), self._options)
        except Unsupported as error:
            self._state.set("unsupported", str(error))
        except Exception:
            logger.exception("Ashlar: the cache is off in this engine")
            self._state.set("error")

    def _drop_unused_options(self, given: Options, vllm_config: Any) -> None:
        """Logs the options of segments that have no effect. `given`: before segments were refused."""
        if not given.segments and given.declared:
            names = " and ".join(given.declared)
            logger.warning("Ashlar: %s: no effect, because segments is false; remove segments: false", names)
        if given.cold_parallel and (reason := self._no_sharing(vllm_config)):
            logger.warning("Ashlar: cold_parallel is off: %s", reason)
            self._options = dataclasses.replace(self._options, cold_parallel=False)

    def _no_sharing(self, vllm_config: Any) -> str:
        """Returns why this engine and others do not compute segments for each other; empty if they may."""
        if not self._options.segments:
            return "segments are off; set segments, segment_separator or segment_boundaries"
        if not self._kv_transfer_config.is_kv_producer:
            return "kv_role kv_consumer stores no segments; set kv_role to kv_both"
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return "tensor_parallel_size above 1 is not supported" if ranks > 1 else ""

    def _find_wake(self) -> Callable[[], None] | None:
        """Returns None, and logs the reason, if the engine cannot serve prefill."""
        if not self._options.serve_prefill:
            return None
        wake, reason = find_wake(), self._no_sharing(self._vllm_config)
        if not reason and wake is None:
            reason = "the engine runs in the caller's process; set VLLM_ENABLE_V1_MULTIPROCESSING to 1"
        if reason:
            logger.warning("Ashlar: serve_prefill is off: %s", reason)
        return None if reason else wake

    def _describe(self, vllm_config: Any, kv_cache_config: Any, rank: int) -> Described:
        described = describe(vllm_config, kv_cache_config, self._options, rank)
        if described.linear and self._options.checkpoint_tokens == 0:
            tokens = rewritten_by(vllm_config.model_config, self._template)
            self._options = dataclasses.replace(self._options, checkpoint_tokens=tokens)
        return described

    # ---- workers

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return None if self._worker is None else self._worker.allocation()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        registered = self._worker is not None and self._register(self._worker, kv_caches)
        if not self._options.segments:
            return
        ranks = Ranks(self._vllm_config.parallel_config.tensor_parallel_size)
        if ranks.all(registered) and self._worker is not None:  # all ranks run the model for it, or none
            self._worker.serve_segments(self._vllm_config, self._kv_cache_config)

    def _register(self, worker: Worker, kv_caches: dict[str, Any]) -> bool:
        try:
            worker.register(kv_caches, self._vllm_config.compilation_config.static_forward_context)
            worker.watch_weights(self._vllm_config)
            return True
        except Unsupported as error:
            self._state.set("unsupported", str(error))
        except Exception:
            logger.exception("Ashlar: the cache is off in this worker")
            self._state.set("error")
        worker.refuse()
        return False

    @_or(lambda: None)
    def unregister_kv_caches(self) -> None:
        """Called before the engine sleeps (vLLM 0.33)."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Called after the engine wakes up. An engine cannot continue without memory for its caches, so only this call
        may raise."""
        if self._worker is not None:
            self._worker.restore()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    @_or(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before each step. The scheduler holds blocks that are being saved, including those of preempted
        requests."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.jump(self._step())  # this does not catch errors: an error here is the engine's own
            self._start_loads()

    @_or(lambda: None)
    def _start_loads(self) -> None:
        assert self._worker is not None
        self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: `wait_for_save` saves a text's blocks and states together."""

    @_or(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step())

    @_or(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:  # the scheduler half may not have received this yet
            asked = self._step().asked()
            return KVConnectorTransferResults(finished_recving=asked, failed_recving=set(asked))
        # Failures are reported by request, even if one group has all blocks: a request that kept its blocks would be
        # computed in blocks that the daemon may still write to.
        ended, failed = self._worker.poll_loads(self._step())
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    @_or(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._step().refusal() if self._worker is None else self._worker.report()

    @_or(lambda: None)
    def get_kv_connector_stats(self) -> AshlarStats | None:
        half = self._worker or self._scheduler
        stats = None if half is None else half.stats.take()
        state = f"{self._state.name}|{self._state.reason}"
        if self._role == KVConnectorRole.SCHEDULER and state != self._told_state and self._state.reason:
            stats = stats or AshlarStats()
            stats.data[STATE] = self._told_state = state
        return stats

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            try:
                if half is not None:
                    half.close()
            except Exception:  # the engine's shutdown continues
                logger.exception("Ashlar: cannot close the cache")
        self._worker = self._scheduler = None

    # ---- the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @_or(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @_or(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if self._scheduler is None else self._scheduler.match(request, num_computed_tokens)

    def prefill_end(self, request: Any, start: int, end: int) -> int:
        """Returns where a prefill step that begins at `start` ends, at most `end`. Called by stops.py."""
        try:
            return end if self._scheduler is None else self._scheduler.prefill_end(request, start, end)
        except Exception:
            logger.exception("Ashlar: prefill_end failed; the step ends where vLLM ends it")
            return end

    @property
    def jumps(self) -> bool:
        """Returns whether requests may jump. Called by stops.py."""
        return self._scheduler is not None and self._options.segments

    @_or(lambda: 0)
    def reserved_tokens(self) -> int:
        """Returns the number of the next step's tokens that are left for a segment. Called by stops.py before each
        step."""
        return self._scheduler.reserved_tokens() if self._scheduler is not None and self._options.segments else 0

    @_or(lambda: False)
    def yield_blocks(self) -> bool:
        """Abandons a segment's run whose blocks the engine needs. Returns whether blocks are free now. Called by
        stops.py."""
        return self._scheduler is not None and self._options.segments and self._scheduler.yield_blocks()

    @_or(lambda: None)
    def leap(self, request: Any, tokens: int, managers: Any) -> int | None:
        """Moves a request over an interior if it has reached the interior's start. Returns the number of tokens of its
        step, or None if the step is not limited. Called by stops.py."""
        return None if self._scheduler is None else self._scheduler.leap(request, tokens, managers)

    @_or(lambda: None)
    def next_stop(self, request: Any, start: int) -> int | None:
        """Returns where the step that begins at `start` must end because a jump follows, or None. Called by
        stops.py."""
        return None if self._scheduler is None else self._scheduler.next_stop(request, start)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        if num_external_tokens == 0:
            self._not_loaded(request)
            return
        try:
            self._scheduler.allocated(request, blocks, num_external_tokens)
        except Exception:
            logger.exception("Ashlar: update_state_after_alloc failed; the request is computed")
            self._scheduler.fail_load(request)

    @_or(lambda: None)
    def _not_loaded(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.not_loaded(request)

    @_or(tuple)
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns the groups whose new blocks the engine need not zero. If a load ends inside a block, the block's rest
        must hold finite numbers."""
        if self._scheduler is not None and self._scheduler.ends_within_block(request):
            return ()
        groups: tuple[int, ...] = super().get_loaded_kv_cache_group_ids(request)
        return groups

    @_or(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        return self._scheduler.sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata([], [], scheduler_output.total_num_scheduled_tokens)
        return self._build_step(scheduler_output) or self._scheduler.bare_step(scheduler_output)

    @_or(lambda: None)
    def _build_step(self, scheduler_output: Any) -> StepMetadata | None:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    @_or(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    @_or(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.awaits_reports()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_or(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    @_or(tuple)
    def take_events(self) -> Iterable[Any]:
        return () if self._scheduler is None else self._scheduler.take_events()

    @_or(lambda: False)
    def reset_cache(self) -> bool | None:
        """Called when weights may have changed in place. Entries stay for other engines, but this engine no longer
        finds them."""
        return True if self._scheduler is None else self._scheduler.reset()

    # ---- statistics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AshlarStats:
        return AshlarStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> AshlarPromMetrics:
        return AshlarPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
