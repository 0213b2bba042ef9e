# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: only accepted tokens are saved, and the tokens are equal to those of an engine without
speculation or cache."""

from types import SimpleNamespace

import pytest
import torch
from tiny_engines import Child, connector, prompt, same, saved
from tiny_models import CONFIGS
from transformers import Qwen3Config, Qwen3ForCausalLM

from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import _check
from ashlar.vllm.options import Options

NGRAM = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1)
COMMITTED = """
import ashlar
server.committed, own = [], ashlar.Cache.commit
def commit(self, tokens, *args, **kwargs):
    server.committed.append(tokens.tolist())
    return own(self, tokens, *args, **kwargs)
ashlar.Cache.commit = commit
"""


def drafts(child):
    """Proposed and accepted draft tokens."""
    metrics = child.call("evaluate", "{m.name: m.value for m in llm.get_metrics() if hasattr(m, 'value')}")
    return [metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]


def test_ngram_drafts_change_neither_tokens_nor_saves(shared_daemon):
    exact = dict(dtype="float32")  # steps of several tokens round differently
    first = prompt("ngram", 200)
    with Child("qwen3", enable_prefix_caching=True, **exact) as plain:
        answer = plain.generate([first], 400)
        second = first + answer[0][0] + prompt("next turn", 30)
        plain.call("erase")
        wanted = plain.generate([second], 40)
    with Child("qwen3", connector(shared_daemon), speculative_config=NGRAM, **exact) as child:
        child.call("execute", COMMITTED)
        assert child.generate([first], 400)[0][0] == answer[0][0]
        proposed, accepted = drafts(child)
        assert 0 < accepted < proposed, "drafts of both kinds"
        texts = child.call("evaluate", "server.committed")
        assert max(map(len, texts)) >= 512, "decoded tokens are kept, too"
        assert all(text == second[: len(text)] for text in texts), "of no draft that was rejected"
    for speculative in (dict(speculative_config=NGRAM), {}):
        with Child("qwen3", connector(shared_daemon), **speculative, **exact) as child:
            same(child.generate([second], 40), [each[:2] for each in wanted], 1e-3)
            assert saved(child) >= 512, "found after a restart, with drafts and without"


def checkpoint(folder, noise):
    """A model with weights in files. With noise, it is a draft model that is sometimes right."""
    torch.manual_seed(0)
    config = {name: value for name, value in CONFIGS["qwen3"].items() if name not in ("architectures", "torch_dtype")}
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    with torch.no_grad():
        for weights in (each for each in model.parameters() if each.dim() > 1):
            weights.copy_(torch.rand_like(weights) * 0.4 - 0.2)
        for weights in (each for each in model.parameters() if each.dim() > 1):
            weights += noise * (torch.rand_like(weights) * 0.4 - 0.2)
    model.save_pretrained(folder)
    return str(folder)


def test_a_draft_models_layers_are_kept_with_the_others(shared_daemon, tmp_path):
    target, draft = checkpoint(tmp_path / "target", 0), checkpoint(tmp_path / "draft", 0.1)
    other = checkpoint(tmp_path / "other", 0.2)
    exact = dict(dtype="float32", load_format="auto", max_model_len=2048)
    settings = dict(method="draft_model", num_speculative_tokens=3)
    first = prompt("draft model", 200)
    with Child(target, enable_prefix_caching=True, **exact) as plain:
        answer = plain.generate([first], 400)
        second = first + answer[0][0] + prompt("next turn", 30)
        plain.call("erase")
        wanted = [each[:2] for each in plain.generate([second], 40)]
    with Child(target, connector(shared_daemon), speculative_config=dict(settings, model=draft), **exact) as child:
        assert child.generate([first], 400)[0][0] == answer[0][0]
        proposed, accepted = drafts(child)
        assert 0 < accepted < proposed
        assert len(child.call("evaluate", "server.connector()._scheduler._described.attention")) == 4, "of both models"
        child.call("erase")
        drafts_before = drafts(child)
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) >= 512
        cold = [after - before for after, before in zip(drafts(child), drafts_before)]
    with Child(target, connector(shared_daemon), speculative_config=dict(settings, model=draft), **exact) as child:
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) >= 512, "found after a restart"
        assert drafts(child) == cold, "drafts as good as before: their keys came, too"
    with Child(target, connector(shared_daemon), speculative_config=dict(settings, model=other), **exact) as child:
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) == 0, "keys of another draft model"


def test_the_layer_of_a_models_own_mtp_head_is_kept_with_the_others(shared_daemon, model="mimo"):
    exact, settings = dict(dtype="float32"), dict(speculative_config=dict(method="mtp", num_speculative_tokens=1))
    first = prompt("mtp", 200)
    with Child(model, enable_prefix_caching=True, **exact) as plain:
        answer = plain.generate([first], 100)
        second = first + answer[0][0] + prompt("next turn", 30)
        plain.call("erase")
        wanted = [each[:2] for each in plain.generate([second], 40)]
    with Child(model, connector(shared_daemon), **settings, **exact) as child:
        child.call("execute", COMMITTED)
        assert child.generate([first], 100)[0][0] == answer[0][0]
        assert drafts(child)[0] > 0
        assert len(child.call("evaluate", "server.connector()._scheduler._described.attention")) == 3, "the head's, too"
        texts = child.call("evaluate", "server.committed")
        assert max(map(len, texts)) >= 256, "decoded tokens are kept, too"
        assert all(text == second[: len(text)] for text in texts), "of no draft that was rejected"
        child.call("erase")
        before = drafts(child)
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) >= 256
        cold = [after - earlier for after, earlier in zip(drafts(child), before)]
    with Child(model, connector(shared_daemon), **settings, **exact) as child:
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) >= 256, "found after a restart"
        assert drafts(child) == cold
    with Child(model, connector(shared_daemon), **exact) as child:
        same(child.generate([second], 40), wanted, 1e-3)
        assert saved(child) == 0, "without the head's keys"


def test_a_hybrid_with_its_own_mtp_head_is_resumed(shared_daemon, model="qwen3_5"):
    """vLLM's kernels that move states of drafts run in Python: see draft_states.py."""
    settings = dict(speculative_config=dict(method="mtp", num_speculative_tokens=2))
    first = prompt("hybrid mtp", 900)
    with Child(model, enable_prefix_caching=True, **settings) as plain:
        answer = plain.generate([first], 40)
        second = first + answer[0][0] + prompt("next turn", 40)
        plain.call("erase")
        wanted = [each[:2] for each in plain.generate([second], 20)]
    with Child(model, connector(shared_daemon), **settings) as child:
        same(child.generate([first], 40), [answer[0][:2]])
        child.call("erase")  # the answer is saved in a later step
        assert drafts(child)[0] > 0
    with Child(model, connector(shared_daemon), **settings) as child:
        same(child.generate([second], 20), wanted, 5e-2)  # in steps of other lengths
        assert saved(child) >= len(first) + 39, "from where the answer ended"


def test_other_methods_are_refused_by_name():
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(method="dflash"),
    )
    with pytest.raises(Unsupported, match="speculative_config: method dflash is not supported; expected ngram, "):
        _check(config, Options())
