# SPDX-License-Identifier: Apache-2.0
"""Calls of `generate` and `forward` that run without the cache, each with the reason that `Reuse.last` gives."""

import contextlib

import pytest
import tiny_transformers as tiny
import torch
import transformers

import ashlar
from ashlar.transformers import calls

SEGMENTS = [tiny.tokens(60, seed) for seed in range(3)]
QUERY = tiny.tokens(12, 99)
PROMPT = torch.tensor([tiny.tokens(300, 7)])
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return tiny.build("qwen3_next")


def test_inputs_other_than_a_single_prompt_run_without_the_cache(model, daemon):
    two = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    cases = [
        ({"inputs": two}, GREEDY),
        ({"input_ids": PROMPT, "attention_mask": mask}, GREEDY),
        ({"inputs": PROMPT}, {**GREEDY, "num_beams": 2}),
        ({"inputs": PROMPT}, {**GREEDY, "use_cache": False}),
    ]
    reasons = ["2 sequences", "attention_mask", "beam_search", "use_cache"]
    expected = [model.generate(**inputs, **options) for inputs, options in cases]
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        for (inputs, options), answer, why in zip(cases, expected, reasons, strict=True):
            assert torch.equal(model.generate(**inputs, **options), answer)
            assert reuse.last.skip_reason == why and reuse.last.fault is None
        whole = model(PROMPT).logits
        assert whole.shape[1] == PROMPT.shape[1] and reuse.last.skip_reason == "logits_to_keep", (
            "all logits were asked for"
        )
        model(PROMPT, labels=PROMPT).loss.backward()
        model(PROMPT, logits_to_keep=1).logits.sum().backward()
        assert reuse.last.skip_reason == "gradients"
        with torch.no_grad():
            hidden = model(PROMPT, logits_to_keep=1, output_hidden_states=True).hidden_states
            assert len(hidden) == 5 and hidden[0].shape[1] == PROMPT.shape[1]
            assert reuse.last.skip_reason == "output_hidden_states"
    model.zero_grad()


def test_inputs_that_change_states_besides_tokens_run_without_the_cache(daemon):
    model = tiny.build("qwen3_next")

    class Seeing(type(model)):
        __module__ = type(model).__module__  # the module whose rules are recorded

        def forward(self, input_ids=None, attention_mask=None, pixel_values=None, **more):  # all looked for by name
            if pixel_values is not None and input_ids.shape[1] > 1:
                input_ids = (input_ids + int(pixel_values.sum())) % 256
            return super().forward(input_ids, attention_mask=attention_mask, **more)

    model.__class__ = Seeing
    ids = PROMPT.clone()
    ids[0, :200] = 7
    padded = {"pad_token_id": 7, "eos_token_id": 300}
    cases = [
        {"pixel_values": torch.tensor([3])},
        padded,
        {"generation_config": transformers.GenerationConfig(**padded)},
    ]
    expected = [model.generate(ids, **GREEDY, **more) for more in cases]
    usual = model.generate(ids, **GREEDY)
    assert all(not torch.equal(answer, usual) for answer in expected), "each decides states"
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        for more, answer in zip(cases, expected, strict=True):
            assert torch.equal(model.generate(ids, **GREEDY, **more), answer)
            assert reuse.last.skip_reason == ("pixel_values" if "pixel_values" in more else "pad_token_id")
        for more in (
            {**padded, "attention_mask": torch.ones_like(ids)},
            {"pad_token_id": 299},
            {"eos_token_id": [299, 300]},
        ):
            assert torch.equal(model.generate(ids, **GREEDY, **more), usual)
        assert reuse.last.cached_tokens == 292


def test_prepared_masks_run_without_the_cache(daemon):
    model = tiny.build("qwen3")
    masks = {"full_attention": torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()}
    with torch.no_grad():
        expected = model(PROMPT, attention_mask=masks, logits_to_keep=1).logits
        with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
            assert torch.equal(model(PROMPT, attention_mask=masks, logits_to_keep=1).logits, expected)
            assert reuse.last.skip_reason == "attention_mask" and reuse.last.fault is None


def shaped(kind):
    """Arguments of `generate` and `forward` that are not as the prompt is."""
    return {
        "a longer mask": {"attention_mask": torch.ones(1, 310, dtype=torch.long)},
        "a shorter mask": {"attention_mask": torch.ones(1, 290, dtype=torch.long)},
        "a mask of two": {"attention_mask": torch.ones(2, 300, dtype=torch.long)},
        "a mask of four dimensions": {"attention_mask": torch.ones(1, 1, 300, 300).tril()},
        "position_ids": {"position_ids": torch.arange(300).unsqueeze(0) + 5},
        "token_type_ids": {"token_type_ids": torch.zeros(1, 300, dtype=torch.long)},
        "cache_position": {"cache_position": torch.arange(300)},
        "inputs_embeds": {"inputs_embeds": torch.zeros(1, 300, 32)},
        "past_key_values": {"past_key_values": transformers.DynamicCache()},
        "is_causal": {"is_causal": False},
        "an unknown argument": {"scale_of_rotation": 2.0},
    }[kind]


SHAPES = [
    "a longer mask", "a shorter mask", "a mask of two", "a mask of four dimensions", "position_ids", "token_type_ids",
    "cache_position", "inputs_embeds", "past_key_values", "is_causal", "an unknown argument",
]  # fmt: skip


def said(call):
    """Returns an answer, or the error instead."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same(one, other):
    return one == other if isinstance(one, str) or isinstance(other, str) else torch.equal(one, other)


@pytest.mark.parametrize("kind", SHAPES)
def test_arguments_that_contradict_the_prompt_run_without_the_cache(daemon, kind):
    model = tiny.build("qwen3")
    generate = lambda: model.generate(PROMPT, max_new_tokens=12, do_sample=False, **shaped(kind))
    forward = lambda: model(PROMPT, logits_to_keep=1, **shaped(kind)).logits
    with torch.no_grad():
        expected = said(generate), said(forward)
        with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
            for _ in range(2):
                for call, answer in zip((generate, forward), expected, strict=True):
                    assert same(said(call), answer), kind
                    why = next(iter(shaped(kind)))
                    assert (reuse.last.skip_reason, reuse.last.fault, reuse.last.cached_tokens) == (why, None, 0)
            assert torch.equal(model.generate(PROMPT, **GREEDY)[:, :300], PROMPT) and reuse.last.skip_reason is None


def test_invalid_tokens_run_without_the_cache(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        for ids, why in {PROMPT.float(): "no tokens", PROMPT + 2**40: "tokens out of range", PROMPT - 300: "tokens out of range",
                         PROMPT[0]: "no tokens"}.items():  # fmt: skip
            with pytest.raises(Exception):  # noqa: B017
                model(ids, logits_to_keep=1)
            assert reuse.last.skip_reason == why and reuse.last.fault is None


def test_unknown_options_run_without_the_cache_and_are_named(model, daemon):
    served = {
        "max_new_tokens": 3, "min_new_tokens": 1, "do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.9, "min_p": 0.01,
        "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": [3], "output_scores": True,
        "return_dict_in_generate": True, "bad_words_ids": [[5]], "max_time": 60.0,
    }  # fmt: skip
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(PROMPT, **served)
        assert reuse.last.skip_reason is None and reuse.last.fault is None
        config = transformers.GenerationConfig(max_new_tokens=3)
        config.option_of_a_later_version = True
        assert torch.equal(model.generate(PROMPT, generation_config=config)[:, :300], PROMPT)
        assert reuse.last.skip_reason == "option_of_a_later_version"
        known = set(vars(transformers.GenerationConfig()))
        assert calls._SERVED_OPTIONS - {"max_length"} <= known, "a name that this version does not have"


@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_callers_functions_that_change_tokens_store_the_run_tokens(model, daemon, kind):
    def meddle(input_ids, scores, **_):
        if input_ids.shape[1] > 304:
            input_ids[0, 302:] = 9  # after the model has run other tokens
        return scores if kind == "logits_processor" else torch.zeros(1, dtype=torch.bool)

    lists = {
        "logits_processor": transformers.LogitsProcessorList,
        "stopping_criteria": transformers.StoppingCriteriaList,
    }
    meddled = model.generate(PROMPT, **GREEDY, **{kind: lists[kind]([meddle])})
    longer = torch.cat([meddled, torch.tensor([tiny.tokens(30, 3)])], 1)
    expected = model.generate(longer, **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        assert torch.equal(model.generate(PROMPT, **GREEDY, **{kind: lists[kind]([meddle])}), meddled)
        assert reuse.last.fault is None and "kept" in reuse.last.commits
        assert torch.equal(model.generate(longer, **GREEDY), expected)
        assert reuse.last.cached_tokens < 302, "what was stored is what was run, and not what the function wrote"


@contextlib.contextmanager
def set_on(config, **values):
    before = {name: getattr(config, name, None) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


DECODING = [
    ("beam_search", {"num_beams": 3}),
    ("num_return_sequences", {"num_return_sequences": 2, "do_sample": True}),
    ("use_cache", {"use_cache": False}),
    ("guidance_scale", {"guidance_scale": 1.5}),
    ("cache_implementation", {"cache_implementation": "dynamic"}),
    ("prefill_chunk_size", {"prefill_chunk_size": 64}),
    ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
]


@pytest.mark.parametrize(("why", "options"), DECODING, ids=[why for why, _ in DECODING])
def test_other_decoding_methods_run_without_the_cache_wherever_set(model, daemon, why, options):
    given = {"max_new_tokens": 4, **options}
    of_model = {name: value for name, value in given.items() if name != "max_new_tokens"}
    config = transformers.GenerationConfig(**given)

    def calls():
        for arguments in (given, {"generation_config": config}):
            torch.manual_seed(1)
            yield model.generate(PROMPT, **arguments)
        # Transformers takes options that the passed config does not set from the model's config.
        with set_on(model.generation_config, **of_model):
            torch.manual_seed(1)
            yield model.generate(PROMPT, generation_config=transformers.GenerationConfig(max_new_tokens=4))

    expected = list(calls())
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        for warm in (False, True):
            for answer, wanted in zip(calls(), expected, strict=True):
                assert reuse.last.skip_reason == why and reuse.last.fault is None
                one, other = (each if torch.is_tensor(each) else each.sequences for each in (answer, wanted))
                assert torch.equal(one, other)
                for name in ("hidden_states", "attentions"):
                    if getattr(wanted, name, None) is not None:
                        shapes = [[layer.shape for layer in token] for token in getattr(wanted, name)]
                        assert [[layer.shape for layer in token] for token in getattr(answer, name)] == shapes
            plain = model.generate(PROMPT, **GREEDY)  # a prefix is cached and correct
            assert reuse.last.cached_tokens == (292 if warm else 0)
        assert torch.equal(plain[:, :300], PROMPT)
    assert torch.equal(plain, model.generate(PROMPT, **GREEDY))


# These modes need something that the tests lack: a tokenizer, layers for more tokens, another model, code from the Hub.
MODES = [
    ("token_healing", {"token_healing": True}),
    ("assisted_generation", {"prompt_lookup_num_tokens": 3}),
    ("assisted_generation", {"use_mtp": True}),
    ("assisted_generation", {"assistant_early_exit": 1}),
    ("contrastive_search", {"penalty_alpha": 0.6, "top_k": 4}),
    ("dola_generation", {"dola_layers": "high"}),
    ("is_assistant", {"is_assistant": True}),
    ("custom_generate", {"custom_generate": "some/repository"}),
    ("adapter_names", {"adapter_names": ["one"]}),
    ("synced_gpus", {"synced_gpus": True}),
]


@pytest.mark.parametrize(("why", "options"), MODES, ids=["-".join(options) for _, options in MODES])
def test_decoding_methods_that_change_the_run_tokens_run_without_the_cache(model, daemon, monkeypatch, why, options):
    class Left(Exception):
        pass

    def own(*args, **kwargs):
        assert "past_key_values" not in kwargs, "the cache's"
        raise Left

    monkeypatch.setattr(model, "generate", own)
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        with pytest.raises(Left):
            model.generate(PROMPT, **GREEDY, **options)
        assert reuse.last.skip_reason == why


def test_outputs_of_the_whole_run_requested_by_the_config_run_without_the_cache(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        for _ in range(2):
            with set_on(model.config, output_router_logits=True):
                logits = model(PROMPT, logits_to_keep=1).router_logits
            assert logits[0].shape[0] == PROMPT.shape[1] and reuse.last.skip_reason == "config.output_router_logits"
            assert model(PROMPT, logits_to_keep=1).logits.shape == (1, 1, 256) and reuse.last.skip_reason is None


def test_the_last_record_is_that_of_the_last_prompt(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        output = model(ashlar.Prompt(SEGMENTS, QUERY))
        served = reuse.last
        assert served.cached_tokens > 0 and served.skip_reason is None
        model(torch.tensor([[5]]), past_key_values=output.past_key_values)
        assert reuse.last is served, "a token more is no prompt"
        model.generate(PROMPT, **GREEDY, num_beams=2)
        assert (reuse.last.tokens, reuse.last.cached_tokens, reuse.last.skip_reason) == (300, 0, "beam_search")
        model(PROMPT)
        assert reuse.last.skip_reason == "logits_to_keep"
        model.generate(PROMPT, **GREEDY)
        assert reuse.last.skip_reason is None and reuse.last.tokens == 300
