# SPDX-License-Identifier: Apache-2.0
"""Images and sounds in prompts: named by the model's inputs, whatever identifier the caller gives."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from ashlar.vllm.content import content_digest
from ashlar.vllm.media import MediaNames, Unnamed
from ashlar.vllm.options import Options
from ashlar.vllm.requests import Followed, Names
from ashlar.vllm.scheduler import Scheduler


def item(**data):
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=each, field=field) for name, each in data.items()})


def image(seed, offset=3, length=4, identifier=None, grid=(1, 4, 4), modality="image", mask=None):
    pixels = torch.rand(16, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    data = item(pixel_values=pixels, image_grid_thw=torch.tensor(grid))
    place = PlaceholderRange(offset, length, mask)
    return MultiModalFeatureSpec(data, modality, identifier or f"{seed}", place, identifier)


def names(media, *features):
    request, digests = SimpleNamespace(mm_features=list(features)), []
    media.begin(request, digests)
    media._hasher.submit(int).result()
    return media.names(request, digests)


def test_a_medium_is_named_by_its_content_and_place():
    media = MediaNames("encoders")
    found = names(media, image(1, identifier="one"), image(2, offset=9))
    assert [offset for offset, _ in found] == [3, 9] and len({digest for _, digest in found}) == 2
    assert all(len(digest) == 32 for _, digest in found)
    assert names(media, image(1, identifier="a caller's name"))[0] == found[0]
    mask = torch.tensor([True, False, True, True])
    others = [
        image(1, length=5, identifier="a"), image(1, grid=(1, 2, 8), identifier="b"),
        image(1, modality="video", identifier="c"), image(1, mask=mask, identifier="d"), image(3, identifier="e"),
    ]  # fmt: skip
    digests = {digest for each in others for _, digest in names(media, each)}
    digests |= {names(MediaNames("other encoders"), image(1))[0][1], found[0][1]}
    assert len(digests) == len(others) + 2


def test_media_at_the_same_token_are_combined():
    media = MediaNames("encoders")
    both = names(media, image(1), image(2, modality="audio"))
    swapped = names(media, image(2, modality="audio"), image(1))
    assert len(both) == len(swapped) == 1 and both != swapped
    assert both[0][1] not in (names(media, image(1))[0][1], names(media, image(2, modality="audio"))[0][1])


def test_an_identifier_with_several_contents_is_not_used():
    """With the caller's `multi_modal_uuid`, vLLM uses the first content's outputs for the second."""
    media = MediaNames("encoders")
    first = image(1, identifier="same")
    names(media, first)
    for _ in range(2):
        with pytest.raises(Unnamed, match="mm_features: same names images of different content"):
            names(media, image(2, identifier="same"))
    with pytest.raises(Unnamed):
        names(media, first)
    assert names(media, image(1, identifier="another"))


def test_media_that_are_still_hashed_may_share_an_identifier():
    media, request, digests = MediaNames("encoders"), SimpleNamespace(mm_features=[image(1, identifier="same")]), []
    media.begin(request, digests)
    digests[0].result()
    free = threading.Event()
    media._hasher.submit(free.wait)
    media.begin(SimpleNamespace(mm_features=[image(2, identifier="same")]), [])  # for a request that is not served
    assert media.names(request, digests) is None
    free.set()
    media._hasher.submit(int).result()
    with pytest.raises(Unnamed):
        media.names(request, digests)


def test_an_identifier_of_unknown_content_is_not_used():
    media, unknown = MediaNames("encoders"), image(1, identifier="same")
    unknown.data = None
    with pytest.raises(Unnamed):
        names(media, unknown)
    with pytest.raises(Unnamed, match="different content"):
        names(media, image(1, identifier="same"))


@pytest.mark.parametrize("kind", ["no data", "no tensor", "embeddings", "no encoders", "unknown", "many"])
def test_media_without_content_have_no_name(kind):
    features = [image(1)]
    if kind == "no data":
        features[0].data = None
    elif kind == "no tensor":
        features[0].data["pixel_values"].data = None
    elif kind == "embeddings":
        features[0].modality = "prompt_embeds"
    elif kind == "unknown":
        features[0].data["pixel_values"].data = torch.empty(3, device="meta")
    elif kind == "many":
        features *= 4097
    with pytest.raises(Unnamed, match="mm_features"):
        names(MediaNames(None if kind == "no encoders" else "encoders"), *features)


def test_a_sessions_later_media_are_named_too():
    media, request, digests = MediaNames("encoders"), SimpleNamespace(mm_features=[image(1)]), []
    media.begin(request, digests)
    request.mm_features.append(image(2, offset=20))
    media.names(request, digests)
    media._hasher.submit(int).result()
    assert [offset for offset, _ in media.names(request, digests)] == [3, 20]


def test_a_sessions_later_media_are_hashed_even_if_it_has_no_name():
    """Other requests may get its encoder outputs."""
    known = Names(SimpleNamespace(identity=SimpleNamespace(encoders="encoders", adapters=None)), Options(), 1)
    session = Followed(SimpleNamespace(mm_features=[image(1)], lora_request=None), "", nameless=True)
    known.begin(session.request, session.media)
    session.request.mm_features.append(image(2, offset=20, identifier="same"))
    half = SimpleNamespace(
        _new_loads=[], _new_saves=[], _steps=0, _pool=None, _names=known, _followed={"one": session},
        _handoffs=SimpleNamespace(take=list), _offers=SimpleNamespace(note_drafts=lambda *_: None),
        _jumps=SimpleNamespace(step=lambda *_: ([], [], []), cold=SimpleNamespace(next=lambda *_: None)),
        _renew=lambda: None, _offer_all=lambda *_: None,
    )  # fmt: skip
    Scheduler.step(
        half,
        SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"one": 1}, scheduled_spec_decode_tokens={}),
    )
    other = Followed(SimpleNamespace(mm_features=[image(3, identifier="same")], lora_request=None), "")
    known.begin(other.request, other.media)
    known._media._hasher.submit(int).result()
    assert known.find(other) is None and other.nameless


def test_different_values_have_different_digests():
    ones = torch.ones(2, 2)
    values = [
        None, 0, False, 0.0, "0", [], {}, [1, 2], [[1], 2], ["12"], ["1", "2"], {"a": 1}, {"a": [1]}, ones, ones.view(4),
        ones.to(torch.bfloat16), ones.numpy(), np.int64(1), [ones, ones], SimpleNamespace(a=1),
    ]  # fmt: skip
    assert len({content_digest(value) for value in values}) == len(values)
    assert content_digest(ones, 1) == content_digest(torch.ones(2, 2), 1) != content_digest([ones, 1])
    for unknown in (object, torch.empty(1, device="meta"), np.array([object()])):
        with pytest.raises(TypeError, match="cannot be hashed"):
            content_digest(unknown)
