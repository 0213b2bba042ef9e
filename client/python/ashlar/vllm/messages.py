# SPDX-License-Identifier: Apache-2.0
"""Messages between the connector's two halves: from scheduler to workers with each step, and back with the step's
output."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

import ashlar
from ashlar.vllm.adapters import AdapterLoad, Report
from ashlar.vllm.drafts import Place
from ashlar.vllm.handoffs import Handoff

UNAVAILABLE, CONTINUES, NO_SPACE = -1, -2, -3  # see WorkerReport.ran


@dataclasses.dataclass
class Load:
    """A plan to land in a request's blocks. `blocks`: one list per group of the engine's caches. An empty plan
    fails."""

    request: str
    plan: bytes
    tokens: int  # tokens of the whole prefix
    present: int  # number of first tokens whose keys and values are already in the blocks
    blocks: tuple[list[int], ...]
    table: int  # pages of the text that was looked up
    tier: str
    adapter: AdapterLoad | None = None  # adapter of the prefix
    spare: list[list[int]] = dataclasses.field(default_factory=list)  # by group: see Scheduler._spare_blocks


@dataclasses.dataclass
class Save:
    """A text whose last token is computed by the end of this step, and the depths to resume from. The last depth is its
    length.

    `blocks`: one list per group of the engine's caches; 0 where a group no longer has a block.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    depths: list[int]
    blocks: tuple[list[int], ...]
    prompt: int  # tokens of the whole prompt; the text may be shorter, or longer by decoded tokens
    salt: str = ""
    media: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)  # position and digest
    adapter: AdapterLoad | None = None  # adapter with which the text was computed
    running: bool = False  # the next step overwrites the states at the last depth
    place: Place | None = None  # place of the states at the last depth; None: the block of its last token
    # One block per group of full attention, to hold a part of a block.
    spare: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Fetch:
    """A prompt's segments to look up and land in the worker's memory, while the request waits."""

    number: int
    tokens: npt.NDArray[np.int32]  # the tokens of all segments and one more
    lengths: list[int]
    salt: str = ""


@dataclasses.dataclass
class Fetched:
    """The answer to a `Fetch`. If anything lands, a first answer says that the landing begins, and a second one that it
    has ended."""

    ended: bool
    jumps: list[tuple[int, int, bool]] = dataclasses.field(default_factory=list)  # begin, end, whether from position 0
    missing: list[int] = dataclasses.field(default_factory=list)  # segments that the cache lacks
    refused: int = 0  # hits that would save no time
    unfit: int = 0  # hits that do not fit into the rank's memory
    late: bool = False  # the daemon did not answer the lookup within lookup_ms
    tier: str = "dram"
    seconds: float = 0.0
    failure: str = ""


@dataclasses.dataclass
class Jump:
    """Positions of a request that a worker writes from landed segments, before the forward of this step."""

    fetch: int
    begin: int
    end: int
    blocks: tuple[list[int], ...]
    state_block: int  # index of the block in which this step leaves the states
    # Blocks with the states before the jump, by group; empty: the engine has copied the states to `state_block`.
    sources: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Alone:
    """A part of a segment to compute from a zero state, in blocks that belong to no request."""

    number: int  # number of the run; its parts are consecutive
    tokens: npt.NDArray[np.int32]  # of the whole segment
    begin: int  # the part's positions in the segment
    end: int
    first: bool  # stored as a prefix of prompts
    salt: str
    pages: dict[int, list[int]]  # blocks by group of attention layers
    states: dict[int, int]  # one block per group


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load]
    saves: list[Save]
    scheduled_tokens: int
    fetches: list[Fetch] = dataclasses.field(default_factory=list)
    jumps: list[Jump] = dataclasses.field(default_factory=list)
    released: list[int] = dataclasses.field(default_factory=list)  # fetches that are not needed after this step
    alone: Alone | None = None
    run: int = 0  # number of the run whose computed parts are kept; 0: none
    handoffs: list[Handoff] = dataclasses.field(default_factory=list)  # begin after the saves
    # Generation of the engine's weights; None: the scheduler's half reports nothing for the step.
    generation: str | None = None
    number: int = 0  # number of the step
    adapters: set[int] = dataclasses.field(default_factory=set)  # adapters whose digests are wanted, by lora_int_id

    def asked(self) -> set[str]:
        """Requests that wait for a worker's answer."""
        return {load.request for load in self.loads}

    def refusal(self) -> WorkerReport:
        """Returns the report of a worker that can neither load nor save."""
        asked, saves = Counter(self.asked()), Counter(save.number for save in self.saves)
        return WorkerReport(failed=asked, saved=saves, refusing=Counter([0]))


@dataclasses.dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Counts of ranks per request: failed loads, blocks that became unresolved or resolved, and ended saves."""

    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    unresolved: Counter[str] = dataclasses.field(default_factory=Counter)
    quiesced: Counter[str] = dataclasses.field(default_factory=Counter)
    saved: Counter[int] = dataclasses.field(default_factory=Counter)
    kept: Counter[int] = dataclasses.field(default_factory=Counter)  # number of stored saves
    refusing: Counter[int] = dataclasses.field(default_factory=Counter)  # ranks that can neither load nor save
    pace: Counter[int] = dataclasses.field(default_factory=Counter)  # nanoseconds per token of prefill, by rank
    names: Counter[str] = dataclasses.field(
        default_factory=Counter
    )  # each rank's name of the engine's model: Identity.text
    outdated: Counter[str] = dataclasses.field(default_factory=Counter)  # generations within which the weights changed
    adapters: Counter[Report] = dataclasses.field(default_factory=Counter)  # the ranks' reports about adapters
    # Ranks that cannot take segments from the cache.
    without_segments: Counter[int] = dataclasses.field(default_factory=Counter)
    # The layout of segments, by rank. Each rank reports it once.
    layouts: dict[int, ashlar.Model] = dataclasses.field(default_factory=dict)
    # By number of the fetch, and rank.
    fetched: dict[tuple[int, int], Fetched] = dataclasses.field(default_factory=dict)
    # Number of published segments, by number of the run, and rank; UNAVAILABLE: the cache was not asked to store any;
    # CONTINUES: a part that is not the last one was computed; NO_SPACE: too few pages were free to publish it.
    ran: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        for name, value in vars(other).items():
            if value:
                getattr(self, name).update(value)
        return self

    def __bool__(self) -> bool:
        return any(vars(self).values())
