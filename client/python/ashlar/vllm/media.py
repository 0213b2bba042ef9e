# SPDX-License-Identifier: Apache-2.0
"""Names of the images, videos and sounds of prompts.

The cache's keys take the position and the SHA-256 of each medium (`media` of `Cache.start_begin`), from the block in
which the medium begins. So text before the first medium is found by every prompt that begins with it, and what follows
only behind the same media in the same places. Replacing placeholders by tokens made of the digest would do the same
only where a medium has enough of them.

vLLM's identifiers are not used: they may be texts of the caller (`multi_modal_uuids`) or an id in a picture's metadata.
What is hashed is what the model gets: the processed data, with the grids that M-RoPE counts positions by, the
placeholder's length and mask, and the configuration of the encoders. vLLM itself reuses an encoder's output, and blocks,
by the identifier: prompts whose identifier stands for more than one content are not served.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ashlar.vllm.content import content_digest

_MOST = 4096  # media of a prompt
_MOST_KNOWN = 1 << 18  # identifiers: more than the engine has encoder outputs or blocks of


class Unnamed(Exception):
    """No key can say what the request's tokens depend on; it runs without the cache."""


class MediaNames:
    def __init__(self, encoders: str | None) -> None:
        """`encoders`: what decides a medium's numbers beside its data and the weights; None: there is no such name."""
        self._encoders = encoders
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="ashlar-media")
        self._known: OrderedDict[str, bytes | None] = OrderedDict()  # digests by identifier; None: it had several

    def begin(self, request: Any, digests: list[Future[bytes]]) -> None:
        """Hashes the request's media in the background, behind those in `digests`. Raises Unnamed."""
        features = request.mm_features
        if len(features) > _MOST:
            raise Unnamed(f"mm_features: {len(features)} images, videos and sounds; expected at most {_MOST}")
        for each in features[len(digests) :]:  # a session's later input brings more
            if self._encoders is None:
                raise Unnamed(
                    f"mm_features: a {each.modality} has no name here; expected mm_processor_cache_type lru, no "
                    "mm_encoder_attn_dtype and no ec_transfer_config"
                )
            if each.data is None or any(element.data is None for element in each.data.values()):
                raise Unnamed(f"mm_features: the scheduler does not have the data of a {each.modality}")
            if each.modality == "prompt_embeds":
                raise Unnamed("mm_features: prompt embeddings are not supported")
            digests.append(self._hasher.submit(self._digest, each))

    def _digest(self, feature: Any) -> bytes:
        place = feature.mm_position
        data = {name: element.data for name, element in feature.data.items()}
        return content_digest(self._encoders, feature.modality, place.length, place.is_embed, data)

    def names(self, request: Any, digests: list[Future[bytes]]) -> list[tuple[int, bytes]] | None:
        """Position and digest of each medium; None: not hashed yet. Raises Unnamed."""
        self.begin(request, digests)
        if not all(digest.done() for digest in digests):
            return None
        found: dict[int, list[bytes]] = {}
        for feature, future in zip(request.mm_features, digests):
            try:
                digest = future.result()
            except Exception as error:
                raise Unnamed(f"mm_features: cannot hash a {feature.modality}: {error}") from error
            known = self._known.setdefault(feature.identifier, digest)
            self._known.move_to_end(feature.identifier)
            if known != digest:
                self._known[feature.identifier] = None
                raise Unnamed(
                    f"mm_features: {feature.identifier} names {feature.modality}s of different content; expected one "
                    "for each multi_modal_uuid and ImageID"
                )
            found.setdefault(feature.mm_position.offset, []).append(digest)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        # Media that begin at one position, as a video and its sound, are one.
        return [(offset, each[0] if len(each) == 1 else content_digest(*(d.hex() for d in each)))
                for offset, each in sorted(found.items())]  # fmt: skip

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)
