"""How a model is named: by what it is, and not by the place that it was loaded from."""

import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers.model import weights_digest

QUERY = tiny.tokens(12, 99)
SEGMENTS = [tiny.tokens(60, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One checkpoint in two folders."""
    model = tiny.build("qwen3_next")
    found = [tmp_path_factory.mktemp("checkpoint") for _ in range(2)]
    for each in found:
        model.save_pretrained(each)
    return found


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_checkpoint_in_two_folders_is_shared(folders, daemon):
    published = []
    for folder in folders:
        model = load(folder)
        assert model.config._name_or_path == str(folder), "the digest must not see it"
        with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
            model.generate(ashlar.Prompt(SEGMENTS, QUERY), max_new_tokens=2, do_sample=False)
            published.append(reuse.last.published)
    assert published == [len(SEGMENTS), 0]


def test_a_configuration_that_differs_names_another_model(folders):
    model = load(folders[0])
    before = weights_digest(model)
    assert before == weights_digest(load(folders[1]))
    model.config.rms_norm_eps *= 2
    assert weights_digest(model) != before
