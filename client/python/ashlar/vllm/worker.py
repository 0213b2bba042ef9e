# SPDX-License-Identifier: Apache-2.0
"""The worker half of the connector: registers the engine's caches, and passes each step to loads, saves and
segments."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from vllm.logger import init_logger

import ashlar
from ashlar.vllm import device_counts
from ashlar.vllm.caches import EngineCaches
from ashlar.vllm.composing import Composer
from ashlar.vllm.cuda import CudaMemory
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.loads import Loads
from ashlar.vllm.memory import Allocator
from ashlar.vllm.messages import UNAVAILABLE, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.pace import Pace
from ashlar.vllm.ranks import Ranks, RanksApart
from ashlar.vllm.reloads import StepWeights
from ashlar.vllm.saves import Saves
from ashlar.vllm.segments import unsupported
from ashlar.vllm.state import State
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

Made = TypeVar("Made")
_IDLE_WAIT = 0.002  # seconds of an idle step's wait for a landing
_POLL = 0.0002
_TOLD = 2.0  # the scheduler and the composer get a new pace if it differs by this factor


class Worker:
    def __init__(self, described: Described, options: Options) -> None:
        self.stats = AshlarStats()
        self.allocator = Allocator()
        self._described, self._options = described, options
        self._rank = described.model.tensor_parallel_rank
        self._ranks = Ranks(described.model.tensor_parallel_size)
        self._opening: Opening | None = None
        self._open: Callable[[], Opening] | None = None  # set once the caches are registered
        self._caches, self._weights, self._pace = EngineCaches(described), StepWeights(), Pace()
        self._told_pace = 0.0
        given = described, options, self._caches, self._weights, self._cache
        counts = self.stats if self._rank == 0 else None
        self._loads, self._saves = Loads(*given, self._pace, counts), Saves(*given, counts)
        self._composer: Composer | None = None
        self._report = WorkerReport(names=Counter([described.identity.text]))

    def allocation(self) -> contextlib.AbstractContextManager[None] | None:
        """Returns the context in which the engine allocates its caches; None: the engine's default."""
        return None if self._described.staged else self.allocator.context()

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Raises Unsupported if the daemon cannot reach the caches. Then call `refuse`.

        `layers`: the engine's layers by name.
        """
        described, options = self._described, self._options
        self._caches.register(self.allocator, caches, layers)

        def open_cache() -> ashlar.Cache:
            return ashlar.Cache(
                described.named(described.model),
                options.rpc_socket,
                options.session_socket,
                name=f"vllm-worker-{self._rank}",
                timeout_ms=options.call_ms,
                **self._caches.region,
                groups=described.layer_groups,
                common_pages=bool(described.layer_groups) and not described.staged,
                capture_tokens=described.capture_tokens(options),
                land_ms=options.land_ms,
                quiet_ms=options.quiet_ms,
            )

        self._open = lambda: Opening(open_cache, described.identity.weights, options, "worker", State("worker"))
        self._opening = self._open()
        self._saves.start()

    def unregister(self) -> None:
        """Call it before the engine sleeps. Until `restore` nothing uses the engine's caches, and requests miss.

        Frees GPU memory that the daemon maps. An engine whose caches are in CPU memory does not sleep.
        """
        memory, opening = self.allocator.memory, self._opening
        if opening is None or not (isinstance(memory, CudaMemory) or self._caches.staging is not None):
            return
        self._saves.suspend()
        self._loads.suspend()
        if self._composer is not None:
            self._composer.keep_run(0)
        self._opening = None
        opening.suspend()
        if isinstance(memory, CudaMemory):
            memory.release()

    def restore(self) -> None:
        """Call it after `unregister`. OSError: the GPU has no memory for the engine's caches."""
        memory = self.allocator.memory
        if self._open is None or self._opening is not None:
            return
        if isinstance(memory, CudaMemory):
            memory.restore()
        self._opening = self._open()
        self._saves.start()

    def refuse(self) -> None:
        """Reports that this worker serves nothing: loads and saves end at once, and the scheduler sends no more."""
        self._report.refusing[self._rank] += 1
        self._described.identity.weights.close()

    def watch_weights(self, vllm_config: Any) -> None:
        """Raises Unsupported if changes of the model's weights cannot be detected."""
        layer = vllm_config.compilation_config.static_forward_context[self._described.a_layer]
        self._weights.watch(vllm_config, layer)

    def serve_segments(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Call it after `register`, on all ranks or on none. If it fails, prompts with segments are treated like any
        other. RanksApart: it failed while the ranks ran the model."""
        if unsupported(self._described):  # the scheduler has detected and logged the same
            return
        engine = self._made(lambda: self._engine_model(vllm_config, kv_cache_config))
        if self._ranks.all(engine is not None) and engine is not None:
            composer = self._made(lambda: self._make_composer(engine, vllm_config))
            if self._ranks.all(composer is not None):
                self._composer = composer
            elif composer is not None:
                logger.warning("Ashlar: segments are off in this worker: another rank cannot serve them")
                self._made(composer.close)
        if self._composer is None:
            self._report.without_segments[self._rank] += 1
        else:
            self._report.layouts[self._rank] = self._composer.model

    def _made(self, make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except RanksApart:
            raise
        except Unsupported as error:
            logger.warning("Ashlar: segments are off in this worker: %s", error)
        except Exception:
            logger.exception("Ashlar: segments are off in this worker")
        return None

    def _engine_model(self, vllm_config: Any, kv_cache_config: Any) -> EngineModel:
        if vllm_config.use_v2_model_runner:
            device_counts.install()
        return EngineModel(vllm_config, kv_cache_config, self._described)

    def _make_composer(self, engine: EngineModel, vllm_config: Any) -> Composer:
        most = vllm_config.model_config.max_model_len  # positions after it may have no rotary frequencies
        publishes = vllm_config.kv_transfer_config.is_kv_producer
        states, order = self._caches.states, self._caches.order
        return Composer(engine, self._described, self._options, states, most, publishes, self._pace, order)

    def _cache(self) -> ashlar.Cache | None:
        return None if self._opening is None else self._opening.cache

    # ---- a step

    def begin_step(self, step: StepMetadata) -> None:
        """Call it before the step's forward, during which segments are fetched."""
        self._pace.begin(self._caches.order)
        self._weights.begin(step)
        if self._composer is not None:
            for fetch in step.fetches:
                self._composer.fetch(
                    fetch, lambda: self._weights.are_current(self._weights.look(step), self._caches.order)
                )

    def jump(self, step: StepMetadata) -> None:
        """Call it before the forward of a step with jumps."""
        for jump in step.jumps:
            assert self._composer is not None
            self._composer.apply(jump)

    def start_loads(self, step: StepMetadata) -> None:
        self._weights.look_at_adapters(step, self._report.adapters)
        self._weights.begin(step)
        self._loads.start(step)
        if self._composer is not None:
            self._composer.release(step.released)

    def poll_loads(self, step: StepMetadata) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads have ended, and those among them that failed."""
        deadline = time.monotonic() + (_IDLE_WAIT if step.scheduled_tokens == 0 else 0)
        ended: dict[str, bool] = {}
        self._run_alone(step)  # first: whatever fails later on one rank, all ranks have run the model or none
        self._loads.collect_quiesced()
        while self._loads.busy or (self._composer is not None and self._composer.busy):
            ended = self._loads.poll()
            if ended or self._hear_composer() or time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        return set(ended), {name for name, done in ended.items() if not done}

    def _run_alone(self, step: StepMetadata) -> None:
        if self._composer is not None:
            self._composer.keep_run(step.run)
        if step.alone is None:
            return
        if self._composer is None or self._opening is None:  # the engine sleeps: its weights may be elsewhere
            self._report.ran[step.alone.number, self._rank] = UNAVAILABLE
            self._ranks.all(False)
            return
        seen = self._weights.look(step)  # the weights of this run: others may be accepted before it is published
        self._composer.run_alone(step.alone, lambda: self._weights.are_current(seen, self._caches.order))

    def _hear_composer(self) -> bool:
        """Returns whether there is something to report."""
        if self._composer is not None:
            rank = self._rank
            self._report.fetched |= {(number, rank): each for number, each in self._composer.take_fetched().items()}
            self._report.ran |= {(number, rank): each for number, each in self._composer.take_ran().items()}
        return bool(self._report.ran) or any(each.ended for each in self._report.fetched.values())

    def save(self, step: StepMetadata) -> None:
        """Passes the texts that this step has computed to the saves."""
        self._pace.end(step.scheduled_tokens)
        self._saves.give(step)

    def report(self) -> WorkerReport | None:
        self._saves.report(self._report)
        if (loaded := self._loads.take_report()) is not None:
            self._report.aggregate(loaded)
        self._report.outdated.update(self._weights.take_outdated())
        pace = self._pace.seconds_per_token
        if not self._told_pace / _TOLD <= pace <= self._told_pace * _TOLD:
            self._told_pace = pace
            if self._rank == 0:
                self._report.pace[0] = round(pace * 1e9)
            if self._composer is not None:
                self._composer.set_rate(1 / pace)
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        self._described.identity.weights.close()
        if self._composer is not None:
            self._composer.close()
        self._weights.close()
        self._saves.close()
        self._loads.close()
        if self._opening is not None:
            self._opening.close()
        self._caches.close()
        if self.allocator.memory is not None:
            self.allocator.memory.close()
