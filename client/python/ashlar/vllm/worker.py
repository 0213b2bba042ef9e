# SPDX-License-Identifier: Apache-2.0
"""The connector's half in a worker: lands plans in the engine's blocks, and commits what the step has computed."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from vllm.logger import init_logger

import ashlar
from ashlar.vllm.adapters import AdapterLoad, LoadedAdapters
from ashlar.vllm.composing import Composed, Composer
from ashlar.vllm.cuda import CudaMemory
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.memory import Allocator, BlockWindow, Keys, States, Window, pages, places
from ashlar.vllm.messages import Load, Save, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.order import Mark, Order, ProcessorOrder
from ashlar.vllm.pace import Pace
from ashlar.vllm.reloads import EngineWeights, Seen, model_of
from ashlar.vllm.rows import RowOrder, measure
from ashlar.vllm.segments import unsupported
from ashlar.vllm.state import State
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_NULL_BLOCK = 0
_IDLE_WAIT = 0.002  # seconds: of a step that computes nothing, for a landing
_POLL = 0.0002
_SHUTDOWN = 3.0  # seconds for saves under way
_LEAST_PATIENCE, _USUAL_PATIENCE = 2.0, 5.0  # seconds for a load: at least, and where the engine's pace is not known
_TOLD = 2.0  # the scheduler is told of a pace that is so many times another one
_RUNNING = 4  # copies of running states at a time
_COPIED = 64 << 20  # bytes of windows that one call of a save may copy, where they are of more than one depth
_KEPT = ("kept", "already_present", "kept_as_span")


def _tables(pages: list[list[int]]) -> Any:
    """A page table for each group of layers, or the one of all layers; None where no layer has pages."""
    return pages if len(pages) > 1 else pages[0] if pages else None


@dataclasses.dataclass
class _Landing:
    load: Load
    since: float
    mark: Mark | None  # the engine's work before it, which may still be in its blocks; None: it has ended
    seen: Seen | None
    begun: bool = False
    handle: ashlar.Request | None = None  # None: it has not begun, or could not


@dataclasses.dataclass
class _Saving:
    save: Save
    mark: Mark | None  # the engine's work up to the step
    seen: Seen | None
    running: list[list[torch.Tensor]] | None = None  # copies of the states that the next step overwrites


class Worker:
    def __init__(self, described: Described, options: Options) -> None:
        self.stats = AshlarStats()
        self.allocator = Allocator()
        self._described, self._options = described, options
        self._first_rank = described.model.tensor_parallel_rank == 0
        self._opening: Opening | None = None
        self._open: Callable[[], Opening] | None = None  # once the caches are registered
        self._order: Order = ProcessorOrder()
        self._states: list[States] = []
        self._windows: list[Window | BlockWindow] = []
        self._keys: dict[int, Keys] = {}  # by layer, where a block's rows are not its tokens
        self._within_blocks = True  # a text's keys can be parted inside a block
        self._composer: Composer | None = None
        self._landings: list[_Landing] = []
        self._refused: list[Composed] = []
        self._doubtful: list[tuple[str, ashlar.Request]] = []
        self._report = WorkerReport(names=Counter([described.identity.text]))
        self._pace = Pace()
        self._told_pace = 0.0
        self._weights: EngineWeights | None = None
        self._adapters: LoadedAdapters | None = None  # None: the engine has none
        self._saves: queue.Queue[_Saving | None] = queue.Queue()
        self._ended: queue.Queue[tuple[Save, str]] = queue.Queue()
        self._running = threading.Semaphore(_RUNNING)
        self._outdated: queue.Queue[str] = queue.Queue()  # generations of weights that have changed
        self._saver = threading.Thread(target=self._save_all, name="ashlar-save", daemon=True)

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Raises Unsupported: the caches lie where the daemon cannot reach them. `refuse` is then to be called.

        `layers`: the engine's own, by name.
        """
        memory = self.allocator.memory
        if memory is None:
            raise Unsupported(
                f"the engine's caches are not in shared memory ({self.allocator.error or 'not requested'})"
            )
        found = places(self._described, caches, memory)
        described, options = self._described, self._options
        self._order = memory.order
        count = pages(described, caches)
        for place in described.linear:
            opaque = isinstance(described.model.layers[place.layer], ashlar.Opaque)
            self._states.append(States(place, opaque, caches[place.name], memory))
        fits = all(Window.fits(place, described.block, caches[place.name]) for place in described.windows)
        self._within_blocks = fits and not described.whole_blocks
        orders = self._row_orders(caches, layers) if self._within_blocks else {}
        for window in described.windows:
            tensor, order = caches[window.name], orders.get(window.name, RowOrder())
            by_token = Window.fits(window, described.block, tensor)
            self._windows.append(
                Window(window, described.block, tensor, order) if by_token else BlockWindow(window, tensor)
            )
        if described.packed:
            self._keys = {layer: Keys(caches[name], orders[name]) for layer, name in described.attention if orders}
        paged = dict(memory.options(), pages=count, places=found) if found else dict(memory_kind=ashlar.MemoryKind.NONE)

        def open_cache() -> ashlar.Cache:
            return ashlar.Cache(
                described.named(described.model),
                options.rpc_socket,
                options.session_socket,
                name=f"vllm-worker-{described.model.tensor_parallel_rank}",
                timeout_ms=options.call_ms,
                **paged,
                groups=described.layer_groups,
                common_pages=bool(described.layer_groups),
                capture_tokens=described.capture_tokens(options),
                land_ms=options.land_ms,
                quiet_ms=options.quiet_ms,
            )

        self._saver.start()
        self._open = lambda: Opening(open_cache, described.identity.weights, options, "worker", State("worker"))
        self._opening = self._open()

    def unregister(self) -> None:
        """Before the engine sleeps: the daemon unmaps the caches on a GPU, and their memory is given back.

        Until `restore` there is no cache. Where the caches are in a CPU's memory, the engine does not sleep.
        """
        memory, opening = self.allocator.memory, self._opening
        if opening is None or not isinstance(memory, CudaMemory):
            return
        self._wait_for_saves(_SHUTDOWN)
        for landing in self._landings:  # none, once the engine has drained
            landing.begun = True
            if landing.handle is not None:
                landing.handle.end()
                landing.handle = None
        for name, handle in self._doubtful:  # its blocks get other memory
            handle.end()
            self._report.quiet[name] += 1
        self._doubtful = []
        self._opening = None
        opening.suspend()
        memory.release()

    def restore(self) -> None:
        """After `unregister`. Raises OSError: the GPU has no memory for the engine's caches."""
        memory = self.allocator.memory
        if self._open is None or self._opening is not None or not isinstance(memory, CudaMemory):
            return
        memory.restore()
        self._opening = self._open()

    def _row_orders(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> dict[str, RowOrder]:
        """By layer; none where that of one is unknown."""
        described, found = self._described, {}
        values = {place.name: place.row // 2 for place in described.windows}
        for layer, name in described.attention:
            values[name] = getattr(described.model.layers[layer], "value_dim", 0)
        measured: dict[Any, RowOrder] = {}
        try:
            for name, value_dim in values.items():
                tensor = caches[name]
                kind = (tuple(tensor.shape[1:]), tensor.dtype, value_dim)
                if kind not in measured:
                    measured[kind] = measure(layers[name], tensor, value_dim)
                found[name] = measured[kind]
        except Exception as error:  # whatever it is, whole blocks are moved as they are
            logger.warning("Ashlar: prompts are resumed at the ends of vLLM's blocks alone: %s", error)
            self._within_blocks = False
            return {}
        return found

    def refuse(self) -> None:
        """Nothing can be served: what the scheduler asks for ends at once, and it is told to ask no more."""
        self._report.refusing[self._described.model.tensor_parallel_rank] += 1
        self._described.identity.weights.close()

    def watch_weights(self, vllm_config: Any) -> None:
        """Raises Unsupported: a change of the model's weights would go unseen."""
        layer = vllm_config.compilation_config.static_forward_context[self._described.a_layer]
        model = model_of(layer)
        self._weights = EngineWeights(vllm_config, model)
        if vllm_config.lora_config is not None:
            self._adapters = LoadedAdapters(model)

    def serve_segments(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Behind `register`. Where it cannot, prompts that declare segments are like any others."""
        if unsupported(self._described):  # as the scheduler has seen and said
            return
        try:
            engine = EngineModel(vllm_config, kv_cache_config, self._described)
            most = vllm_config.scheduler_config.max_num_batched_tokens
            publishes = vllm_config.kv_transfer_config.is_kv_producer
            self._composer = Composer(engine, self._described, self._options, self._states, most, publishes)
        except Unsupported as error:
            logger.warning("Ashlar: segments are off in this worker: %s", error)
        except Exception:
            logger.exception("Ashlar: segments are off in this worker")
        if self._composer is None:
            self._report.without_segments[self._described.model.tensor_parallel_rank] += 1

    def _cache(self) -> ashlar.Cache | None:
        return None if self._opening is None else self._opening.cache

    # ---- loading

    def begin_step(self) -> None:
        self._pace.begin(self._order)

    def _look(self, step: StepMetadata) -> Seen | None:
        """At the model's weights. None: nothing watches them."""
        if self._weights is None or step.generation is None:
            return None
        try:
            return self._weights.look(step.generation)
        except Exception:  # whatever it is, loads and saves of the step end
            logger.exception("Ashlar: cannot check the model's weights")
            self._weights.outdate(step.generation)
            return Seen(self._weights, step.generation, None)

    def _are_current(self, seen: Seen | None) -> bool:
        """Whether the weights are those that the scheduler has a name for. Where they are not, it is told."""
        if seen is None:
            return True
        with self._order.copies():  # not on the engine's stream, whose next step is queued already
            current = seen.current()
        if not current:
            self._outdated.put(seen.generation)
        return current

    def start_loads(self, step: StepMetadata) -> None:
        composing = self._composer is not None and (self._composer.busy or bool(step.composes))
        if self._adapters is not None and step.generation is not None:
            self._adapters.look(step.number, step.adapters, self._report.adapters)
        if self._weights is not None and step.generation is not None:
            try:
                self._weights.begin(step.generation)
            except Exception:  # whatever it is, the step's loads end
                logger.exception("Ashlar: cannot check the model's weights")
                self._weights.outdate(step.generation)
        seen = self._look(step) if step.loads or composing else None
        if self._composer is not None and step.generation is not None:
            self._composer.begin_generation(step.generation)
        outdated = composing and not self._are_current(seen)
        if outdated and self._composer is not None:
            self._composer.abandon_all()
        if step.loads:
            mark = self._order.mark()
            self._landings += [_Landing(load, time.monotonic(), mark, seen) for load in step.loads]
            self._begin_loads()
        for compose in step.composes:
            if self._composer is None or outdated:
                self._refused.append(Composed(compose.request, 0.0, False))
            else:
                self._composer.start(compose)

    def _has_adapter(self, load: AdapterLoad | None) -> bool:
        return load is None or (self._adapters is not None and self._adapters.has(load))

    def _begin_loads(self) -> None:
        """Of those whose blocks the engine works in no more."""
        for landing in self._landings:
            if landing.begun:
                continue
            load = landing.load
            try:
                if landing.mark is not None and not landing.mark.query():
                    continue
                landing.begun = True
                cache = self._cache() if load.plan else None
                if cache is None or not self._has_adapter(load.adapter) or not self._are_current(landing.seen):
                    continue
                tables = self._described.pages(load.blocks, load.tokens)
                held = load.present // self._described.block
                for table in tables:
                    # Shared with running requests: what is landed there goes to the block that the engine never reads.
                    table[:held] = [_NULL_BLOCK] * held
                    table += [table[-1]] * (load.table - len(table))  # behind the prefix, where nothing lands
                plan, present = load.plan, load.present
                landing.handle = cache.land(plan, _tables(tables), present_tokens=present, wait=False)
            except Exception as error:  # whatever it is, the request is computed instead
                landing.begun = True
                logger.warning("Ashlar: cannot start a load: %s", error)

    def poll_loads(self, step: StepMetadata, over: Collection[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those among them that failed. `over`: requests that have ended themselves."""
        self._collect_quiet()
        deadline = time.monotonic() + (_IDLE_WAIT if step.scheduled_tokens == 0 else 0)
        ended = set() if self._composer is None else self._composer.abandon(over)
        failed: set[str] = set()
        while self._landings or self._refused or (self._composer is not None and self._composer.busy):
            self._poll_composer(ended, failed)
            self._begin_loads()
            for landing in list(self._landings):
                done = self._poll(landing)
                if done is None:
                    continue
                self._landings.remove(landing)
                ended.add(landing.load.request)
                if not done:
                    failed.add(landing.load.request)
                self._count(landing, done)
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        return ended, failed

    def _poll_composer(self, ended: set[str], failed: set[str]) -> None:
        over, self._refused = self._refused, []
        if self._composer is not None:
            over += self._composer.poll()
        for composed in over:
            ended.add(composed.request)
            if not composed.done:
                failed.add(composed.request)
                self._report.failed[composed.request] += 1
                self.stats.add(1, "load_failures")
                continue
            self.stats.add(composed.seconds, "load_seconds")
            self.stats.add(1, "hits", composed.tier, "composed")
            self.stats.add(composed.cached, "saved_tokens", composed.tier, "composed")
            self.stats.add(composed.published, "published_segments")
            self.stats.add(self._pace.saved(composed.cached, composed.seconds), "saved_seconds")

    def _poll(self, landing: _Landing) -> bool | None:
        """Whether the load is complete; None: not yet."""
        try:
            return self._advance(landing)
        except Exception as error:
            logger.warning("Ashlar: a load failed: %s", error)
            return self._leave(landing)

    def _advance(self, landing: _Landing) -> bool | None:
        handle, load = landing.handle, landing.load
        verdict = ashlar.Verdict.PENDING
        if landing.begun:
            if handle is None:
                return self._leave(landing)
            verdict = handle.poll_plan()
            if verdict == ashlar.Verdict.OK:
                verdict = handle.poll_finish()
        if verdict == ashlar.Verdict.PENDING:
            late = time.monotonic() - landing.since > self._patience(load)
            return self._leave(landing) if late else None
        assert handle is not None
        if (
            verdict == ashlar.Verdict.OK
            and handle.plan.prefix_tokens == load.tokens
            and self._fill_states(handle, load)
        ):
            handle.end()
            return True
        return self._leave(landing)

    def _patience(self, load: Load) -> float:
        """Seconds after which a load is computed instead: as long as computing it would take."""
        options, computing = self._options, (load.tokens - load.present) * self._pace.seconds_a_token
        longest = (2 * options.call_ms + options.land_ms + options.quiet_ms) / 1000
        return min(longest, max(_LEAST_PATIENCE, computing or _USUAL_PATIENCE))

    def _fill_states(self, handle: ashlar.Request, load: Load) -> bool:
        """Copies the prefix's states into the engine's blocks; then asks whether the lease still held meanwhile."""
        within = load.tokens % self._described.block
        if within and not self._within_blocks:
            return False
        if not self._states and not self._windows and not (within and self._keys):
            return True
        with self._order.copies():
            for group, layers in self._described.attention_groups.items() if within and self._keys else ():
                for layer in layers:
                    self._keys[layer].pack(load.blocks[group][self._described.count(load.tokens) - 1], within)
            filled = self._copy_states(handle, load)
        return filled and handle.finish() == ashlar.Verdict.OK

    def _copy_states(self, handle: ashlar.Request, load: Load) -> bool:
        last = self._described.count(load.tokens) - 1
        if not all(states.load(load.blocks[states.group][last], handle, load.tokens) for states in self._states):
            return False
        for window in self._windows:
            held = window.empty()
            if handle.advance(window.place.layer, 0, load.tokens, window.state(held)) != ashlar.Verdict.OK:
                return False
            blocks = self._described.window(window.place, load.blocks, load.tokens)
            # Blocks that the engine had already are those of running requests, too.
            own = last + 1 - max(last + 1 - len(blocks), load.present // self._described.block)
            window.fill(blocks[len(blocks) - own :], held, load.tokens)
        return True

    def _leave(self, landing: _Landing) -> bool:
        """Gives a landing up. Blocks that the daemon may still write to are kept from use until they are quiet."""
        handle, name = landing.handle, landing.load.request
        self._report.failed[name] += 1
        if handle is None:
            return False
        handle.cancel()
        if handle.poll_quiet() == ashlar.Verdict.OK:
            handle.end()
        else:
            self._report.doubtful[name] += 1
            self._doubtful.append((name, handle))
        return False

    def _collect_quiet(self) -> None:
        for name, handle in list(self._doubtful):
            if handle.poll_quiet() == ashlar.Verdict.PENDING:
                continue
            self._doubtful.remove((name, handle))
            self._report.quiet[name] += 1
            handle.end()

    def _count(self, landing: _Landing, done: bool) -> None:
        if not self._first_rank:
            return
        load, seconds = landing.load, time.monotonic() - landing.since
        self.stats.add(seconds, "load_seconds")
        if not done:
            self.stats.add(1, "load_failures")
            return
        kind = "states_and_keys" if self._states else "keys"
        tokens = load.tokens - load.present
        self.stats.add(1, "hits", load.tier, kind)
        self.stats.add(tokens, "saved_tokens", load.tier, kind)
        self.stats.add(self._pace.saved(tokens, seconds), "saved_seconds")

    # ---- saving

    def save(self, step: StepMetadata) -> None:
        """Hands over what this step has computed. The scheduler holds the blocks until the save has ended."""
        self._pace.end(step.scheduled_tokens)
        if self._opening is None:  # nobody saves, and the scheduler holds the blocks until somebody says so
            for save in step.saves:
                self._ended.put((save, "unavailable"))
            return
        given = [_Saving(save, None, None) for save in step.saves]
        for saving in given:
            if self._has_adapter(saving.save.adapter):
                self._keep_within_blocks(saving)
                self._copy_running(saving)
        seen = self._look(step) if given else None
        mark = self._order.mark() if given else None  # behind the copies
        for saving in given:
            saving.seen, saving.mark = seen, mark
            if not self._has_adapter(saving.save.adapter):
                self._ended.put((saving.save, "weights_changed"))
            elif saving.save.depths:
                self._saves.put(saving)
            else:
                self._ended.put((saving.save, "busy"))
        if self._options.wait_for_saves and step.saves:
            self._wait_for_saves((self._options.call_ms + 100) / 1000)

    def _keep_within_blocks(self, saving: _Saving) -> None:
        """Leaves out depths inside of blocks where the engine's keys cannot be parted there."""
        if not self._within_blocks:
            depths = [depth for depth in saving.save.depths if depth % self._described.block == 0]
            saving.save = dataclasses.replace(saving.save, depths=depths, running=False)

    def _copy_running(self, saving: _Saving) -> None:
        """In the order of the engine's work: of states at a save's last depth that the next step overwrites.

        That depth is left out where too many copies are under way, or where there is no memory for one.
        """
        save = saving.save
        if not save.running or not self._states:
            return
        if self._running.acquire(blocking=False):
            try:
                saving.running = [[part.clone() for part in states.parts(block)] for states, block in self._at(save)]
                return
            except Exception as error:  # memory of the device, for one
                self._running.release()
                logger.warning("Ashlar: cannot copy states: %s", error)
        saving.save = dataclasses.replace(save, depths=save.depths[:-1], running=False)

    def _at(self, save: Save, depth: int | None = None) -> Iterator[tuple[States, int]]:
        """Each linear layer, and the block with its state at a depth, the save's last where none is given."""
        last = self._described.count(save.depths[-1] if depth is None else depth) - 1
        return ((states, save.blocks[states.group][last]) for states in self._states)

    def _wait_for_saves(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._saves.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _save_all(self) -> None:
        unavailable_until = 0.0
        while (given := self._saves.get()) is not None:
            save, outcome = given.save, "unavailable"
            try:
                cache = self._cache()
                if cache is not None and time.monotonic() >= unavailable_until:
                    if given.mark is not None:
                        given.mark.synchronize()  # the daemon reads blocks without asking the engine's streams
                    current = self._are_current(given.seen)
                    outcome = self._commit(cache, given) if current else "weights_changed"
                    if outcome == "unavailable":  # a daemon that hangs would hold the next ones, too
                        unavailable_until = time.monotonic() + self._options.call_ms / 1000
            except Exception as error:
                logger.warning("Ashlar: a save failed: %s", error)
            if given.running is not None:
                given.running = None
                self._running.release()
            self._ended.put((save, outcome))
            self._saves.task_done()

    def _commit(self, cache: ashlar.Cache, saving: _Saving) -> str:
        save = saving.save
        size = sum(window.bytes for window in self._windows)
        together = max(1, _COPIED // size) if size > 0 else len(save.depths)
        outcome = "unavailable"
        depths: list[int] = []
        for depth in save.depths:
            depths.append(depth)
            # A depth inside a block has rows of its own there, which later depths would not read.
            if len(depths) < together and depth % self._described.block == 0 and depth != save.depths[-1]:
                continue
            outcome, depths = self._commit_depths(cache, saving, depths), []
            if outcome == "unavailable":
                break
        return outcome

    def _commit_depths(self, cache: ashlar.Cache, saving: _Saving, depths: list[int]) -> str:
        save = saving.save
        tables, tokens = self._described.pages(save.blocks, depths[-1]), save.tokens[: depths[-1]]
        with self._order.copies():
            checkpoints = [(depth, self._linear(saving, depth)) for depth in depths]
            if self._keys and (within := depths[-1] % self._described.block):
                self._unpack(save, tables, within)
        media = [medium for medium in save.media if medium[0] < len(tokens)]
        return cache.commit(
            tokens, checkpoints, prompt_tokens=save.prompt, page_table=_tables(tables), media=media, salt=save.salt
        )[-1]

    def _unpack(self, save: Save, tables: list[list[int]], tokens: int) -> None:
        """The rows of a text's last tokens stand in spare blocks, which take the place of its last ones."""
        for table, layers, spare in zip(tables, self._described.attention_groups.values(), save.spare, strict=True):
            for layer in layers:
                self._keys[layer].unpack(table[-1], spare, tokens)
            table[-1] = spare

    def _linear(self, saving: _Saving, depth: int) -> list[ashlar.LinearTensors]:
        """States and windows behind a text's first tokens, by layer."""
        save, described = saving.save, self._described
        if saving.running is not None and depth == save.depths[-1]:
            linear = [states.tensors(parts) for states, parts in zip(self._states, saving.running)]
        else:
            linear = [states.tensors(states.parts(block)) for states, block in self._at(save, depth)]
        for window in self._windows:
            linear.append(window.tensors(described.window(window.place, save.blocks, depth), depth))
        return sorted(linear, key=lambda tensors: tensors.layer)

    def report(self) -> WorkerReport | None:
        while True:
            try:
                save, outcome = self._ended.get_nowait()
            except queue.Empty:
                break
            self._report.saved[save.number] += 1
            if outcome in _KEPT:
                self._report.kept[save.number] += 1
            if self._first_rank:
                self.stats.add(1, "stores", outcome)
        while not self._outdated.empty():
            self._report.outdated[self._outdated.get_nowait()] += 1
        pace = self._pace.seconds_a_token
        if self._first_rank and not self._told_pace / _TOLD <= pace <= self._told_pace * _TOLD:
            self._told_pace = pace
            self._report.pace[0] = round(pace * 1e9)
        report, self._report = self._report, WorkerReport()
        return report or None

    def close(self) -> None:
        self._described.identity.weights.close()
        if self._composer is not None:
            self._composer.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._saver.is_alive():
            self._wait_for_saves(_SHUTDOWN)
            self._saves.put(None)
            self._saver.join(timeout=_SHUTDOWN)
        for landing in self._landings:
            if landing.handle is not None:
                landing.handle.end()
        for _, handle in self._doubtful:
            handle.end()
        self._landings, self._doubtful = [], []
        if self._opening is not None:
            self._opening.close()
        if self.allocator.memory is not None:
            self.allocator.memory.close()
