# SPDX-License-Identifier: Apache-2.0
"""Segments of models that take images, whose rotary positions have several axes: texts are composed as by the text-only
class, and prompts with images are computed."""

import contextlib

import pytest
from segmented_engines import PATIENT, Segmented, texts
from test_vllm_images import IMAGE, text
from test_vllm_segments import composes_exactly, interiors
from tiny_engines import CLOSE, connector, count, prompt, same, saved
from tiny_images import Seeing, image_model, pair_of_checkpoints

MODELS = ["qwen3_5", "qwen3_5_moe"]
SETTINGS = dict(load_format="safetensors", mamba_ssm_cache_dtype="float32", num_gpu_blocks_override=256)


class SeeingSegments(Seeing, Segmented):
    """An engine that takes images, and segments from the cache."""


@contextlib.contextmanager
def pair_of_engines(model, daemon, folder):
    """Two engines with segments and the same weights: a model that takes images, and its text-only class. The third
    value is the first one's folder."""
    options, settings = connector(daemon, segments=True, **PATIENT), dict(SETTINGS, max_logprobs=512)
    seeing, text_only = pair_of_checkpoints(model, folder)
    with SeeingSegments(seeing, options, **settings) as child, Segmented(text_only, options, **settings) as other:
        yield child, other, seeing


@pytest.fixture(scope="module", params=MODELS)
def pair(request, shared_daemon, tmp_path_factory):
    with pair_of_engines(request.param, shared_daemon, tmp_path_factory.mktemp(request.param)) as engines:
        yield engines


def test_texts_are_composed_as_by_the_text_only_class(pair):
    """Both kinds of rotary embedding round differently in bf16."""
    *engines, _ = pair
    parts, query, found = texts("seeing", 4), prompt("seeing query", 20), []
    others = [parts[i] for i in (3, 0, 1)]
    for child in engines:
        assert child.publish(parts) == 6
        jumps = count(child, "jumps")
        first = child.ask(parts, query)
        assert first[2] == 100 + interiors(100, 100, 100) and count(child, "jumps") - jumps == 4
        child.call("erase")
        assert child.ask(parts, query) == first, "landed as it was published"
        child.call("erase")
        assert child.ask(others, query)[2] == interiors(100, 100)
        child.call("erase")
        composed = [child.ask(each, query, 1, everything=True) for each in (parts, others)]
        child.call("erase")
        whole = [child.probe("ask", sum(each, []) + query, None, 1, everything=True) for each in (parts, others)]
        for one, other in zip(composed, whole):
            assert 0 < max(abs(a - b) for a, b in zip(one, other)) < 0.5, "close to full prefill, not equal"
        found.append([*composed, *whole])
    apart = [max(abs(a - b) for a, b in zip(one, other)) for one, other in zip(*found)]
    print("composed and computed, from the text-only class:", apart)
    assert max(apart) < 2 * CLOSE


def test_states_are_composed_exactly(pair):
    composes_exactly(pair[0], texts("seeing exactly", 4))


def test_a_model_of_attention_composes_texts(shared_daemon, tmp_path):
    parts, query = texts("attention sees", 4), prompt("attention sees query", 20)
    others = [parts[i] for i in (3, 0, 1)]
    options = connector(shared_daemon, segments=True, **PATIENT)
    with SeeingSegments(image_model("qwen3_vl", tmp_path), options, max_logprobs=512) as child:
        child.publish(parts)
        jumps = count(child, "jumps")
        composed = child.ask(others, query, 1, everything=True)
        assert count(child, "jumps") >= jumps + 2
        child.call("erase")
        whole = child.probe("ask", sum(others, []) + query, None, 1, everything=True)
        assert 0 < max(abs(a - b) for a, b in zip(composed, whole)) < 0.5, "close to full prefill, not equal"
        jumps = count(child, "jumps")
        child.see_segments(([*others, 1, query], [100] * 3))
        assert count(child, "jumps") == jumps


def test_prompts_with_images_are_computed(pair):
    child, _, folder = pair
    parts, query, after = texts("beside images", 3, 192), prompt("beside images query", 20), text("after an image", 20)
    seen = [
        ([*parts, 1, after], [192] * 3),
        ([parts[0], 1, *parts[1:], after], [192, IMAGE, 192, 192]),
        ([1, *parts, after], [IMAGE + 192, 192, 192]),
    ]
    with Seeing(folder, **SETTINGS) as plain:
        wanted = [plain.see(*each) for each, _ in seen]
    child.publish(parts)
    composed, jumps, before = child.ask(parts, query), count(child, "jumps"), saved(child)
    assert composed[2] == 192 + interiors(192, 192)
    # Each prompt is alone. The first one begins with the same text, whose composed blocks are still in the engine.
    for each, answer in zip(seen, wanted):
        same(child.see_segments(each), answer, 1e-4)
    assert count(child, "jumps") == jumps and saved(child) == before
    child.call("erase")
    (tokens, logs), *others = child.see_segments(([*parts, query], [192] * 3), *seen, tokens=1)
    assert count(child, "jumps") == jumps + 3, "the text alone jumps, beside prompts with images"
    for ours, theirs in zip([logs, *(each[1] for each in others)], [composed[1], *(each[0][1] for each in wanted)]):
        print(f"together: {abs(ours[0] - theirs[0]):.1e} apart")
        assert abs(ours[0] - theirs[0]) < 6e-2, "the rounding of other steps, as in test_vllm_images.py"
    child.call("erase")
    assert child.ask(parts, query)[:2] == composed[:2]
