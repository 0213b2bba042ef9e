# SPDX-License-Identifier: Apache-2.0
"""Messages between the connector's two halves: from scheduler to workers with each step, and back with its output."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ashlar.vllm.adapters import AdapterLoad, Told


@dataclasses.dataclass
class Load:
    """A plan to land in a request's blocks. `blocks`: one list a group of the engine's caches. An empty plan fails."""

    request: str
    plan: bytes
    tokens: int  # of the whole prefix
    present: int  # first tokens whose keys and values stand in the blocks already
    blocks: tuple[list[int], ...]
    table: int  # pages of the text that was looked up
    tier: str
    adapter: AdapterLoad | None = None  # that the prefix is of


@dataclasses.dataclass
class Save:
    """A text whose last token is computed by the end of this step, and the depths to resume from; the last is its length.

    `blocks`: one list a group of the engine's caches; 0 where a group has none any more.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    depths: list[int]
    blocks: tuple[list[int], ...]
    prompt: int  # tokens of the whole prompt, of which the text may be a part, or which decoded tokens follow
    salt: str = ""
    media: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)  # position and digest
    adapter: AdapterLoad | None = None  # that the text was computed with
    running: bool = False  # the next step overwrites the states at the last depth
    spare: list[int] = dataclasses.field(default_factory=list)  # a block a group of full attention, for a part of one


@dataclasses.dataclass
class Compose:
    """A prompt to set from its segments, in a request's blocks."""

    request: str
    tokens: npt.NDArray[np.int32]  # those loaded, and one more
    lengths: list[int]
    blocks: tuple[list[int], ...]
    salt: str = ""

    @property
    def tokens_loaded(self) -> int:
        return len(self.tokens) - 1


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load]
    saves: list[Save]
    scheduled_tokens: int
    composes: list[Compose] = dataclasses.field(default_factory=list)
    generation: str | None = None  # of the engine's weights; None: a step of which the scheduler's half says nothing
    number: int = 0  # of the step
    adapters: set[int] = dataclasses.field(default_factory=set)  # whose digests are wanted, by lora_int_id

    def asked(self) -> set[str]:
        """Requests that wait for a worker's answer."""
        return {load.request for load in self.loads} | {compose.request for compose in self.composes}

    def refusal(self) -> WorkerReport | None:
        """The report of a worker that can do nothing of it."""
        if not self.loads and not self.composes and not self.saves:
            return None
        asked, saves = Counter(self.asked()), Counter(save.number for save in self.saves)
        return WorkerReport(failed=asked, saved=saves, refusing=Counter([0]))


@dataclasses.dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One count a rank: of requests whose load failed, whose blocks came in doubt or out of it, and of ended saves."""

    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    doubtful: Counter[str] = dataclasses.field(default_factory=Counter)
    quiet: Counter[str] = dataclasses.field(default_factory=Counter)
    saved: Counter[int] = dataclasses.field(default_factory=Counter)
    kept: Counter[int] = dataclasses.field(default_factory=Counter)  # saves that the cache has
    refusing: Counter[int] = dataclasses.field(default_factory=Counter)  # ranks that can neither load nor save
    pace: Counter[int] = dataclasses.field(default_factory=Counter)  # nanoseconds a token of prefill, by rank
    names: Counter[str] = dataclasses.field(
        default_factory=Counter
    )  # what ranks call the engine's model: Identity.text
    outdated: Counter[str] = dataclasses.field(default_factory=Counter)  # generations within which the weights changed
    adapters: Counter[Told] = dataclasses.field(default_factory=Counter)  # what ranks tell of adapters
    without_segments: Counter[int] = dataclasses.field(default_factory=Counter)  # ranks that can set no prompt from any

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))
        return self

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))
