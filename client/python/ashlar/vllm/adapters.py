# SPDX-License-Identifier: Apache-2.0
"""Names of LoRA adapters, by the weights that were loaded.

vLLM loads an adapter's files at any time, and again after an eviction or a request to reload. The worker therefore
hashes the loaded weights, and names each load by the step that saw it first. A request's keys include the digest and
the adapter's name. If they do not belong to one load, the request is not saved.

vLLM's own prefix cache names blocks only by the adapter's name, and reuses them after the content has changed.
`KnownAdapters` reports when that is possible, so that these blocks are evicted.
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

# A worker's report about an adapter: (number, step, what), where `what` is one of these constants or the digest of the
# load.
Report = tuple[int, int, str]
LOADED, ABSENT, UNNAMED = "loaded", "absent", "unnamed"
_ORDER = {ABSENT: 0, LOADED: 1}  # order of the reports of one step; digests follow
_UNSURE = "unsure"  # instead of a digest: the digest of the engine's own blocks under a name is unknown


@dataclasses.dataclass(frozen=True)
class AdapterLoad:
    """One load of an adapter in the workers."""

    adapter: int  # lora_int_id
    step: int  # step that first saw the load


@dataclasses.dataclass
class _Found:
    model: weakref.ref[Any]
    load: AdapterLoad
    digest: Future[bytes] | None = None  # None: not requested
    reported: bool = False


class LoadedAdapters:
    """The worker's half: the adapters that its model has loaded."""

    def __init__(self, model: Any) -> None:
        self._manager = getattr(model, "lora_manager", None)
        self._found: dict[int, _Found] = {}  # by lora_int_id
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ashlar-adapters")

    def look(self, step: int, asked: Collection[int], reports: Counter[Report]) -> None:
        """Call it in each step, once the step's adapters are active. `asked`: adapters whose digests are requested."""
        if self._manager is None:
            return
        present = self._manager.list_adapters()
        for number in self._found.keys() - present.keys():
            del self._found[number]
            reports[number, step, ABSENT] += 1
        for number, model in present.items():
            found = self._found.get(number)
            if found is None or found.model() is not model:
                self._found[number] = _Found(weakref.ref(model), AdapterLoad(number, step))
                reports[number, step, LOADED] += 1
        for number in asked:
            found = self._found.get(number)
            if found is None:
                reports[number, step, ABSENT] += 1
            elif found.digest is None:
                parts = {name: value for name, value in vars(present[number]).items() if name != "id"}
                found.digest = self._hasher.submit(content_digest, parts)
        for number, found in self._found.items():
            if found.digest is not None and found.digest.done() and not found.reported:
                found.reported = True
                reports[number, found.load.step, self._outcome(found.digest)] += 1

    def _outcome(self, digest: Future[bytes]) -> str:
        try:
            return digest.result().hex()
        except Exception as error:
            logger.warning("Ashlar: cannot hash an adapter; its requests are computed without the cache: %s", error)
            return UNNAMED

    def has(self, load: AdapterLoad) -> bool:
        """Returns whether the weights of this load are present."""
        found = self._found.get(load.adapter)
        return found is not None and found.load == load

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass
class _Known:
    load: AdapterLoad
    absent: bool
    digests: Counter[str] = dataclasses.field(default_factory=Counter)  # number of ranks that reported each digest

    def digest(self, ranks: int) -> str | None:
        """Returns None if not all ranks have reported it, or if they differ."""
        found = [digest for digest, count in self.digests.items() if count == ranks and digest != UNNAMED]
        return found[0] if found and len(self.digests) == 1 else None


class KnownAdapters:
    """The scheduler's half: what the workers have reported about their adapters."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[int, _Known] = {}  # by lora_int_id
        # By adapter name: number and digest of the engine's own blocks.
        self._blocks: dict[str, tuple[int, str | None]] = {}
        self._asked: set[int] = set()

    def arrive(self, adapter: Any) -> bool:
        """Call it when a request of this adapter begins. Returns whether the engine's own blocks under the adapter's
        name may have other content."""
        name, number = adapter.lora_name, adapter.lora_int_id
        known = self._known.get(number)
        before = self._blocks.get(name)
        if before is None or before[0] != number:
            self._blocks[name] = (number, None if known is None else known.digest(self._ranks))
        return before is not None and before[0] != number

    def find(self, number: int) -> tuple[AdapterLoad, str] | None:
        """Returns the load and its digest. The digest is None while it is unknown; it is then requested if possible."""
        known = self._known.get(number)
        digest = None if known is None else known.digest(self._ranks)
        if known is not None and digest is not None and not known.absent:
            return known.load, digest
        self._asked.add(number)
        return None

    def may_come(self, number: int) -> bool:
        """Returns whether workers may soon report the digest."""
        known = self._known.get(number)
        return known is None or (not known.absent and not known.digests[UNNAMED])

    def take_asked(self) -> set[int]:
        asked, self._asked = self._asked, set()
        return asked

    def hear(self, reports: Counter[Report]) -> set[str]:
        """Returns the names under which the engine's own blocks may have other content than the adapter's."""
        changed: set[str] = set()
        for (number, step, what), ranks in sorted(
            reports.items(), key=lambda each: (*each[0][:2], _ORDER.get(each[0][2], 2))
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
