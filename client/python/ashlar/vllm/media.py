# SPDX-License-Identifier: Apache-2.0
"""Names of the images, videos and sounds of prompts.

The cache's keys include the position and the SHA-256 of each medium (`media` of `Cache.start_begin`), from the block in
which the medium begins. So every prompt finds the text before the first medium, but finds later text only after the
same media at the same positions. Replacing placeholders by tokens made of the digest would work only for media with
enough placeholders.

vLLM's identifiers are not used: they may be strings of the caller (`multi_modal_uuids`) or an id in a picture's
metadata. The hash covers the model's inputs: the processed data, with the grids that M-RoPE counts positions by, the
placeholder's length and mask, and the configuration of the encoders. vLLM itself reuses an encoder's output, and
blocks, by the identifier. Prompts are not served if their identifier has also named different or unknown content.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ashlar.vllm.content import content_digest

_MOST = 4096  # media of a prompt
_MOST_KNOWN = 1 << 18  # identifiers: more than the engine has encoder outputs or blocks


class Unnamed(Exception):
    """No key can name what the request's tokens depend on; the request runs without the cache."""


class MediaNames:
    def __init__(self, encoders: str | None) -> None:
        """`encoders`: what decides a medium's numbers besides its data and the weights; None: that cannot be named."""
        self._encoders = encoders
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ashlar-media")
        self._lock = threading.Lock()
        # By identifier; None: more than one digest. guarded by lock_.
        self._known: OrderedDict[str, bytes | None] = OrderedDict()
        self._hashing: Counter[str] = Counter()  # media by identifier. guarded by lock_

    def begin(self, request: Any, digests: list[Future[bytes]]) -> None:
        """Starts hashing the request's media in the background, after the ones in `digests`. Raises Unnamed.

        Call it for every request of the engine: other requests may receive its encoder outputs.
        """
        features = request.mm_features[len(digests) :]  # later input of a session adds media
        if not features:
            return
        reason = self._reason(request)
        with self._lock:
            for each in features:
                if reason:
                    self._known[each.identifier] = None
                else:
                    self._hashing[each.identifier] += 1
                    digests.append(self._hasher.submit(self._digest, each))
        if reason:
            raise Unnamed(f"mm_features: {reason}")

    def _reason(self, request: Any) -> str:
        """Returns why the request's media have no names; empty: they have names."""
        if self._encoders is None:
            return (
                "media cannot be hashed with this configuration; set mm_processor_cache_type to lru, and remove "
                "mm_encoder_attn_dtype and ec_transfer_config"
            )
        if len(request.mm_features) > _MOST:
            return f"{len(request.mm_features)} images, videos and sounds were given; expected at most {_MOST}"
        for each in request.mm_features:
            if each.modality == "prompt_embeds":
                return "prompt embeddings are not supported"
            if each.data is None or any(element.data is None for element in each.data.values()):
                return f"the scheduler does not have the data of a {each.modality}"
        return ""

    def _digest(self, feature: Any) -> bytes:
        place, digest = feature.mm_position, None
        try:
            data = {name: element.data for name, element in feature.data.items()}
            digest = content_digest(self._encoders, feature.modality, place.length, place.is_embed, data)
            return digest
        finally:
            with self._lock:
                self._hashing[feature.identifier] -= 1
                if self._known.setdefault(feature.identifier, digest) != digest:
                    self._known[feature.identifier] = None
                self._hashing = +self._hashing
                while len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)

    def names(self, request: Any, digests: list[Future[bytes]]) -> list[tuple[int, bytes]] | None:
        """Returns position and digest of each medium; the digest is None until it is computed. Raises Unnamed."""
        self.begin(request, digests)
        with self._lock:
            if any(self._hashing[feature.identifier] for feature in request.mm_features):
                return None
        found: dict[int, list[bytes]] = {}
        for feature, future in zip(request.mm_features, digests):
            try:
                digest = future.result()
            except Exception as error:
                raise Unnamed(f"mm_features: cannot hash the {feature.modality}: {error}") from error
            with self._lock:
                known = self._known.setdefault(feature.identifier, digest)
                self._known.move_to_end(feature.identifier)
            if known != digest:
                raise Unnamed(
                    f"mm_features: {feature.identifier} names {feature.modality}s of different content; expected one "
                    "for each multi_modal_uuid and ImageID"
                )
            found.setdefault(feature.mm_position.offset, []).append(digest)
        # Media that begin at one position, such as a video and its sound, count as one.
        return [
            (offset, each[0] if len(each) == 1 else content_digest(*(digest.hex() for digest in each)))
            for offset, each in sorted(found.items())
        ]

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)
