# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, named by what was loaded.

vLLM loads an adapter's files when it likes, and again after it has evicted the adapter or was told to reload it. The
worker therefore hashes the weights that it finds loaded, and names each load by the step that saw it first. A request's
keys take the digest and the adapter's name. Where they do not belong to one load, the request is not saved.

vLLM's own prefix cache names blocks by the adapter's name alone, and gives them to requests after the content has
changed. `KnownAdapters` says when that may be, so that these blocks are evicted.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.logger import init_logger

from ashlar.vllm.content import content_digest

logger = init_logger("vllm.ashlar")

# What a worker tells of an adapter: (number, step, what), where what is one of these or the digest of the load.
Told = tuple[int, int, str]
LOADED, ABSENT, UNNAMED = "loaded", "absent", "unnamed"
_ORDER = {ABSENT: 0, LOADED: 1}  # of one step; digests follow
_UNSURE = "unsure"  # in place of a digest: that of the engine's own blocks by a name


@dataclasses.dataclass(frozen=True)
class AdapterLoad:
    """One load of an adapter in the workers."""

    adapter: int  # lora_int_id
    step: int  # that saw it first


@dataclasses.dataclass
class _Found:
    model: weakref.ref[Any]
    load: AdapterLoad
    digest: Future[bytes] | None = None  # None: not asked for
    told: bool = False


class LoadedAdapters:
    """In a worker: the adapters that its model has."""

    def __init__(self, model: Any) -> None:
        self._manager = getattr(model, "lora_manager", None)
        self._found: dict[int, _Found] = {}  # by lora_int_id
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ashlar-adapters")

    def look(self, step: int, asked: Collection[int], told: Counter[Told]) -> None:
        """At a step, once its adapters are active. `asked`: those whose digest is wanted."""
        if self._manager is None:
            return
        present = self._manager.list_adapters()
        for number in self._found.keys() - present.keys():
            del self._found[number]
            told[number, step, ABSENT] += 1
        for number, model in present.items():
            found = self._found.get(number)
            if found is None or found.model() is not model:
                self._found[number] = _Found(weakref.ref(model), AdapterLoad(number, step))
                told[number, step, LOADED] += 1
        for number in asked:
            found = self._found.get(number)
            if found is None:
                told[number, step, ABSENT] += 1
            elif found.digest is None:
                parts = {name: value for name, value in vars(present[number]).items() if name != "id"}
                found.digest = self._hasher.submit(content_digest, parts)
        for number, found in self._found.items():
            if found.digest is not None and found.digest.done() and not found.told:
                found.told = True
                told[number, found.load.step, self._outcome(found.digest)] += 1

    def _outcome(self, digest: Future[bytes]) -> str:
        try:
            return digest.result().hex()
        except Exception as error:
            logger.warning("Ashlar: cannot hash an adapter; its requests are computed without the cache: %s", error)
            return UNNAMED

    def has(self, load: AdapterLoad) -> bool:
        """Whether the weights of this load are there."""
        found = self._found.get(load.adapter)
        return found is not None and found.load == load

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass
class _Known:
    load: AdapterLoad
    absent: bool
    digests: Counter[str] = dataclasses.field(default_factory=Counter)  # ranks that told of each

    def digest(self, ranks: int) -> str | None:
        """None: not all ranks have told of it, or they differ."""
        found = [digest for digest, count in self.digests.items() if count == ranks and digest != UNNAMED]
        return found[0] if found and len(self.digests) == 1 else None


class KnownAdapters:
    """In the scheduler: what the workers have told of their adapters."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[int, _Known] = {}  # by lora_int_id
        self._blocks: dict[str, tuple[int, str | None]] = {}  # by name: number and digest of the engine's own blocks
        self._asked: set[int] = set()

    def arrive(self, adapter: Any) -> bool:
        """A request of this adapter begins. Whether the engine's own blocks by its name may be of other content."""
        name, number = adapter.lora_name, adapter.lora_int_id
        known = self._known.get(number)
        before = self._blocks.get(name)
        if before is None or before[0] != number:
            self._blocks[name] = (number, None if known is None else known.digest(self._ranks))
        return before is not None and before[0] != number

    def find(self, number: int) -> tuple[AdapterLoad, str] | None:
        """The load and its digest; None: not known yet, and asked for where it can be."""
        known = self._known.get(number)
        digest = None if known is None else known.digest(self._ranks)
        if known is not None and digest is not None and not known.absent:
            return known.load, digest
        self._asked.add(number)
        return None

    def may_come(self, number: int) -> bool:
        """Whether workers may tell of the digest soon."""
        known = self._known.get(number)
        return known is None or (not known.absent and not known.digests[UNNAMED])

    def take_asked(self) -> set[int]:
        asked, self._asked = self._asked, set()
        return asked

    def hear(self, told: Counter[Told]) -> set[str]:
        """Returns names by which the engine's own blocks may be of other content than the adapter's."""
        changed: set[str] = set()
        for (number, step, what), ranks in sorted(
            told.items(), key=lambda each: (*each[0][:2], _ORDER.get(each[0][2], 2))
        ):
            known = self._known.get(number)
            if what in (LOADED, ABSENT):
                if known is not None and (step < known.load.step or (step == known.load.step and known.absent)):
                    continue
                if known is not None and step == known.load.step and what == LOADED:
                    continue
                if known is not None and not known.absent:
                    if known.digest(self._ranks) is None:
                        self._note(number, _UNSURE)
                    elif what == LOADED:
                        self._asked.add(number)  # so that blocks of other content are evicted soon
                self._known[number] = _Known(AdapterLoad(number, step), what == ABSENT)
            elif known is not None and not known.absent and step == known.load.step:
                known.digests[what] += ranks
                digest = known.digest(self._ranks)
                if digest is not None:
                    changed |= self._note(number, digest)
        return changed

    def _note(self, number: int, digest: str) -> set[str]:
        changed = set()
        for name, (bound, before) in self._blocks.items():
            if bound == number and before != digest:
                self._blocks[name] = (number, digest)
                if before is not None:
                    changed.add(name)
        return changed
