# SPDX-License-Identifier: Apache-2.0
"""The scheduler half's record of the engine's requests, and their names in the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
import uuid
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger

import ashlar
from ashlar.vllm.adapters import AdapterLoad, KnownAdapters
from ashlar.vllm.drafts import Step
from ashlar.vllm.media import MediaNames, Unnamed
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.segments import ADAPTERS, named_apart

logger = init_logger("vllm.ashlar")

_MOST_SAID = 16  # number of reasons that are logged


@dataclasses.dataclass
class Name:
    """Everything except tokens that determines the cache keys of a request."""

    salt: str
    media: list[tuple[int, bytes]]  # position and digest
    adapter: AdapterLoad | None

    def within(self, tokens: int) -> list[tuple[int, bytes]]:
        return [medium for medium in self.media if medium[0] < tokens]


@dataclasses.dataclass
class Lookup:
    handle: ashlar.Request
    name: Name
    tokens: int  # tokens of the request
    looked_up: int  # tokens that were looked up, from the first one on
    since: float
    plan: ashlar.Plan | None = None


@dataclasses.dataclass
class Followed:
    """The connector's record of one of the engine's requests."""

    request: Any
    salt: str  # the caller's salt
    lookup: Lookup | None = None
    loading: int = 0  # tokens of the prefix that is being loaded
    missed: tuple[int, int] = (0, 0)  # numbers of tokens and of computed tokens for which the last lookup found nothing
    refused: bool = False  # a load has failed: nothing more is looked up
    wanted: list[int] = dataclasses.field(default_factory=list)  # depths at which known prompts diverge
    saved: int = 0  # tokens that were offered to the cache or came from it
    present: int | None = None  # tokens that the engine had before its first step
    ended: bool = False
    scheduled: bool = False  # whether a step has computed a part of it since it last waited
    mixed: bool = False  # the engine was reset during the request: its keys may be of two sets of weights
    media: list[Future[bytes]] = dataclasses.field(default_factory=list)  # digests, in the order of its mm_features
    step: Step | None = None  # its last step, if that leaves states of drafts
    first_step: int = 0  # step that first computed or loaded a part of it
    nameless: bool = False  # whether it has no name, and is therefore not cached
    asked: float | None = None  # time at which its name was requested
    node: str = ""  # node of the decode engine that continues the request
    depths: list[int] = dataclasses.field(default_factory=list)  # depths whose states were offered or loaded


def adapter_name(followed: Followed) -> str | None:
    adapter = followed.request.lora_request
    return None if adapter is None else str(adapter.lora_name)


class Names:
    """Names requests. `adapters` are those that the workers have loaded."""

    def __init__(self, described: Described, options: Options, ranks: int) -> None:
        self._identity, self._options = described.identity, options
        self._media = MediaNames(described.identity.encoders)
        self.adapters = KnownAdapters(ranks)
        self.generation = ""  # generation of the engine's weights; unique after the first reset
        self._said: set[str] = set()  # logged reasons for requests without a name

    def close(self) -> None:
        self._media.close()

    def reset(self) -> None:
        """Begins a new generation: names differ from all earlier ones."""
        self.generation = uuid.uuid4().hex

    def begin(self, request: Any, media: list[Future[bytes]]) -> None:
        """Starts to compute the digests of the request's media that `media` lacks, and appends them to it."""
        with contextlib.suppress(Unnamed):  # `find` logs the reason
            self._media.begin(request, media)

    def find(self, followed: Followed) -> Name | None:
        """Returns None if the request has no name, or its name is not known yet."""
        if followed.nameless:
            return None
        request, salt, load = followed.request, self.generation + followed.salt, None
        try:
            media = self._media.names(request, followed.media) if request.mm_features else []
        except Unnamed as error:
            followed.nameless = True
            if len(self._said) < _MOST_SAID and str(error) not in self._said:
                self._said.add(str(error))
                logger.warning("Ashlar: some requests with media are computed without the cache: %s", error)
            return None
        adapter = request.lora_request
        if adapter is not None:
            found = self.adapters.find(adapter.lora_int_id)
            if found is None:
                return None
            load, digest = found
            named = [adapter.lora_name, digest, self._identity.adapters, followed.salt]
            salt = self.generation + ADAPTERS + hashlib.sha256(json.dumps(named).encode()).hexdigest()
        return None if media is None else Name(salt, media, load)

    def awaits(self, followed: Followed) -> bool:
        """Returns whether the request waits for its name. Meanwhile other requests are scheduled."""
        now = time.monotonic()
        if followed.asked is None:
            followed.asked = now
        adapter = followed.request.lora_request
        if followed.nameless or (adapter is not None and not self.adapters.may_come(adapter.lora_int_id)):
            return False
        return now - followed.asked < self._options.lookup_ms / 1000

    def serves(self, request: Any) -> bool:
        """Returns whether the prompt's tokens, media and adapter determine its states, and its states are exact."""
        identity, adapter = self._identity, request.lora_request
        if request.prompt_embeds is not None or named_apart(request) or request.pooling_params:
            return False
        if adapter is None:
            return identity.plain
        # Requests whose adapter is loaded again in each step, or changes encoders, are excluded: the engine reuses
        # outputs of encoders by the adapter's name.
        return not adapter.load_inplace and not (request.mm_features and identity.adapted_encoders)
