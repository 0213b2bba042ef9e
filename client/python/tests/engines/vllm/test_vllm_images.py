# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: text before an image is shared, and text after it only after the same image."""

import itertools

import pytest
from tiny_engines import connector, prompt, same, saved
from tiny_images import IMAGE_MODELS, WORDS, Seeing, image_model

BLOCK = {"qwen3_vl": 128, "qwen3_5": 384, "qwen3_5_moe": 384}
IMAGE = 2 + 48  # tokens of an image and its marks
# Type, tolerance, and compared tokens. The rounding of a gated delta net in bf16 depends on where steps begin, and exceeds
# the difference between two images. For these models only the counts of tokens show that no image is taken for another.
# Later tokens of the mixture of experts differ more.
DTYPE = {"qwen3_vl": ("float32", 2e-5, 6), "qwen3_5": ("bfloat16", 6e-2, 6), "qwen3_5_moe": ("bfloat16", 0.15, 1)}


def text(name, tokens):
    return [token % WORDS for token in prompt(name, tokens)]


# What follows the common text: images by their seeds, and a second text.
SUFFIXES = {"first": (1, "after"), "second": (2, "after"), "later": ("after", 1), "both": (1, 2, "after"),
            "swapped": (2, 1, "after"), "none": ("after",)}  # fmt: skip


@pytest.mark.parametrize("model", IMAGE_MODELS)
def test_prompts_with_the_same_images_are_resumed(model, shared_daemon, tmp_path):
    (dtype, close, new), block, folder = DTYPE[model], BLOCK[model], image_model(model, tmp_path)
    before, after = text(f"before {model}", 2 * block + 20), text(f"after {model}", 2 * block)
    prompts = {
        name: [before, *(after if each == "after" else each for each in parts)] for name, parts in SUFFIXES.items()
    }
    with Seeing(folder, dtype=dtype) as plain:
        wanted = {name: plain.see(*parts, tokens=new) for name, parts in prompts.items()}
    for one, other in itertools.combinations(wanted.values(), 2):
        ((tokens, logs),), ((others, other_logs),) = one, other
        apart = max(abs(a - b) for a, b in zip(logs, other_logs))
        assert tokens != others or apart > (2 * close if dtype == "float32" else 0), "each image shows"
    with Seeing(folder, connector(shared_daemon), dtype=dtype) as child:
        child.see(before)  # because a hybrid keeps only the ends of steps
        for name, parts in prompts.items():
            count = saved(child)
            same(child.see(*parts, tokens=new), wanted[name], close)
            text_alone = len(before) + (len(after) if name == "none" else 0)  # "later" begins with the whole text
            assert text_alone - block < saved(child) - count <= text_alone, (name, "the text before the first image")
        for name, parts in prompts.items():
            count = saved(child)
            same(child.see(*parts, tokens=new), wanted[name], close)
            tokens = sum(IMAGE if isinstance(each, int) else len(each) for each in parts)
            assert saved(child) - count >= (tokens - 1) // block * block, name
    with Seeing(folder, connector(shared_daemon), dtype=dtype) as child:
        same(child.see(*prompts["both"], tokens=new), wanted["both"], close)
        assert saved(child) >= (4 * block + 20 + 2 * IMAGE - 1) // block * block, "found after a restart"
        count = saved(child)
        same(child.see(*prompts["first"], tokens=new, uuids=["a caller's"]), wanted["first"], close)
        assert saved(child) - count >= (4 * block + 20 + IMAGE - 1) // block * block, "its name does not count"
    with Seeing(folder, connector(shared_daemon), dtype=dtype) as child:
        same(child.see(*prompts["second"], tokens=new, uuids=["a caller's"]), wanted["second"], close)
        assert saved(child) >= (4 * block + 20 + IMAGE - 1) // block * block, "nor here, of another image"
