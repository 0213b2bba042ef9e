# SPDX-License-Identifier: Apache-2.0
"""A model is named by its type and settings, and not by the place from which it was loaded."""

import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers import calls
from ashlar.transformers.model import describe, weights_digest

QUERY = tiny.tokens(12, 99)
SEGMENTS = [tiny.tokens(60, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders with the same checkpoint."""
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
    named = describe(model, "given", 8, 8, 16)[0].weights_digest
    model.config.rms_norm_eps *= 2
    assert weights_digest(model) != before
    assert describe(model, "given", 8, 8, 16)[0].weights_digest != named, "a given digest names the weights alone"


class Adapted(torch.nn.Module):
    """A linear layer with adapters that has the attributes of PEFT's layers."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scaling, self.merged_adapters = base, {"one": 1.0, "two": 1.0}, []
        self.active, self.disabled = ["one"], False
        self.adapters = torch.nn.ParameterDict({name: torch.randn_like(base.weight) * 0.3 for name in self.scaling})

    @property
    def active_adapters(self):
        return self.active

    @property
    def disable_adapters(self):
        return self.disabled

    def forward(self, x):
        added = [] if self.disabled else [self.scaling[name] * (x @ self.adapters[name].T) for name in self.active]
        return sum(added, self.base(x))


GREEDY = {"max_new_tokens": 4, "do_sample": False}
PROMPT = torch.tensor([tiny.tokens(300, 7)])


@pytest.fixture
def adapted():
    model = tiny.build("qwen3_next")
    layer = model.model.layers[2].mlp
    layer.down_proj = Adapted(layer.down_proj).requires_grad_(False).eval()
    return model, layer.down_proj


@pytest.mark.parametrize("digest", [None, "mine"])
def test_each_setting_of_adapters_names_another_model(adapted, daemon, digest):
    model, layer = adapted
    published = []
    for active, disabled, scale in [(["one"], False, 1.0), (["two"], False, 1.0), (["one"], False, 0.5), (["one"], True, 1.0),
                                    (["one"], False, 1.0)]:  # fmt: skip
        layer.active, layer.disabled, layer.scaling["one"] = active, disabled, scale
        with ashlar.cache_for(model, daemon, tokens=512, weights_digest=digest) as cache:
            with ashlar.attach(model, cache) as reuse:
                model.generate(ashlar.Prompt(SEGMENTS, QUERY), **GREEDY)
                published.append(reuse.last.published)
    assert published == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("digest", [None, "mine"])
def test_adapters_of_one_name_with_other_weights_name_another_model(adapted, digest):
    model, layer = adapted
    first, again = (describe(model, digest, 8, 8, 16)[0].weights_digest for _ in range(2))
    layer.adapters["one"] += 1
    assert first == again != describe(model, digest, 8, 8, 16)[0].weights_digest


def test_a_model_with_switched_adapters_runs_without_the_cache(adapted, daemon):
    model, layer = adapted
    answers = []
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        for values in (
            {},
            {"active": ["two"]},
            {"disabled": True},
            {"scaling": {"one": 2.0}},
            {"active": ["two", "one"]},
        ):
            before = {name: getattr(layer, name) for name in values}
            for name, value in values.items():
                setattr(layer, name, value)
            answers.append(model(ashlar.Prompt([], PROMPT), logits_to_keep=1).logits)
            assert reuse.last.skip_reason == ("adapters" if values else None)
            model.generate(PROMPT, **GREEDY)
            assert reuse.last.skip_reason == ("adapters" if values else None)
            for name, value in before.items():
                setattr(layer, name, value)
        again = model(PROMPT, logits_to_keep=1).logits
        assert reuse.last.cached_tokens == 292 and reuse.last.exact
    assert all((answer - answers[0]).abs().max() > 0.01 for answer in answers[1:]), "each decides states"
    torch.testing.assert_close(again, answers[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("why", ["autocast", "training"])
def test_a_model_that_computes_differently_runs_without_the_cache(daemon, why):
    model = tiny.build("qwen3_next")
    wanted = model.generate(PROMPT, **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        # A single part of the model may be in training mode, such as an adapter that was added.
        model.model.layers[1].train(why == "training")
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            model.generate(PROMPT, **GREEDY)
            assert reuse.last.skip_reason == why
            assert (
                model(ashlar.Prompt(SEGMENTS, QUERY)).logits.shape == (1, len(QUERY), 256)
                and reuse.last.skip_reason == why
            )
        model.eval()
        for cached in (0, 292):
            assert torch.equal(model.generate(PROMPT, **GREEDY), wanted)
            assert reuse.last.skip_reason is None and reuse.last.cached_tokens == cached


def test_a_prompt_costs_at_most_one_walk_over_the_model(monkeypatch):
    model, walked = tiny.build("llama"), []
    own = type(model).named_modules

    def named_modules(self, *args, **kwargs):
        for name, module in own(self, *args, **kwargs):
            walked.append(name)
            yield name, module

    monkeypatch.setattr(type(model), "named_modules", named_modules)
    assert calls.of_model(model, "") is None and walked.count("lm_head") == 1
    walked.clear()
    model.train()
    assert calls.of_model(model, "") == "training" and not walked.count("lm_head")


def test_a_model_is_described_without_autocast(daemon):
    model = tiny.build("qwen3_next")
    with torch.autocast("cpu", torch.bfloat16):
        described, _ = describe(model, "digest", 8, 8, 16)
    assert described == describe(model, "digest", 8, 8, 16)[0]


@pytest.mark.parametrize("way", ["wrapped", "compiled"])
def test_wrapped_and_compiled_models_are_refused_by_name(daemon, way):
    model = tiny.build("llama")
    with ashlar.cache_for(model, daemon, tokens=512) as cache:
        if way == "wrapped":
            other, message = (
                torch.compile(model, backend="eager"),
                "OptimizedModule was given; expected a PreTrainedModel",
            )
        else:
            model.compile(backend="eager")
            other, message = model, r"LlamaForCausalLM.compile\(\) was called"
        with pytest.raises(ValueError, match=message):
            ashlar.cache_for(other, daemon)
        with pytest.raises(ValueError, match=message), ashlar.attach(other, cache):
            pass
    assert not {"forward", "generate"} & set(model.__dict__)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv", "falcon_mamba"])
def test_models_that_keep_their_states_elsewhere_are_refused_by_name(family):
    sizes = {**tiny.COMMON, "num_hidden_layers": 2}
    configs = {
        "mamba": lambda: transformers.MambaConfig(**sizes, state_size=8),
        "mamba2": lambda: transformers.Mamba2Config(
            **sizes, num_heads=4, head_dim=16, state_size=8, n_groups=2, expand=2
        ),
        "rwkv": lambda: transformers.RwkvConfig(**sizes, attention_hidden_size=32),
        "falcon_mamba": lambda: transformers.FalconMambaConfig(**sizes, state_size=8),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[family]()).eval()
    with pytest.raises(ValueError, match=f"^model: {type(model).__name__} ") as refused:
        ashlar.cache_for(model, ("/nowhere/rpc", "/nowhere/session"))
    assert "null" not in str(refused.value) and len(str(refused.value)) < 400
    print(refused.value)


BAD = [
    ("model", 3, ValueError), ("daemon", None, TypeError), ("daemon", "/run", TypeError), ("daemon", ("a",), TypeError),
    ("daemon", (3, "b"), TypeError), ("page_tokens", 0, ValueError), ("page_tokens", None, TypeError), ("page_tokens", 2.5, TypeError),
    ("tokens", 0, ValueError), ("tokens", 3.5, TypeError), ("tokens", "many", TypeError), ("head", -1, ValueError),
    ("tail", 1.5, TypeError), ("capture_tokens", None, TypeError), ("capture_tokens", 0, ValueError), ("epsilon", "small", TypeError),
    ("segment_dtype", None, TypeError), ("segment_dtype", "float8", ValueError),
    ("tokens_per_second", -1.0, ValueError), ("weights_digest", 3, TypeError), ("timeout_ms", 1.5, TypeError), ("land_ms", -1, ValueError), ("tokens", 2**40, ValueError),
]  # fmt: skip


def test_the_daemon_receives_the_declared_rate(daemon):
    with ashlar.cache_for(tiny.build("qwen3"), daemon, tokens=512, tokens_per_second=2.5) as cache:
        assert cache.model.tokens_per_second == 2.5


def test_cache_for_and_attach_refuse_by_name(daemon):
    model = tiny.build("qwen3")
    where = {"daemon": daemon, "tokens": 256}
    for name, value, error in BAD:
        given = {**where, "model": model, name: value}
        name = {"daemon": "(daemon|rpc_socket)"}.get(name, "(tokens|pages)" if value == 2**40 else name)
        with pytest.raises(error, match=f"^{name}: "):
            ashlar.cache_for(given.pop("model"), given.pop("daemon"), **given)
    with ashlar.cache_for(model, daemon, tokens=256) as cache:
        for change, name, error in [({"cache": None}, "cache", TypeError), ({"tuple_method": "fast"}, "tuple_method", ValueError),
                                    ({"assembler": 3}, "assembler", TypeError), ({"model": 3}, "model", ValueError)]:  # fmt: skip
            given = {"model": model, "cache": cache, **change}
            with (
                pytest.raises(error, match=f"^{name}: "),
                ashlar.attach(given.pop("model"), given.pop("cache"), **given),
            ):
                pass
