# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of hybrids: every state that is saved and resumed is that of its depth, whatever drafts were
accepted. The engine's arithmetic is emulated; see drafting_engine.py."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
from driven_specs import config_of, describe, in_child
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import MambaSpec

import ashlar
from ashlar.vllm.drafts import Place, Step
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import _check, _check_drafts, layers_of
from ashlar.vllm.options import Options
from ashlar.vllm.segments import unsupported

# Inputs of the convolution, and state: those of one of 16 ranks of the published model, and smaller ones.
QWEN3_NEXT = Backend.GDN_ATTN, ((3, 512), (2, 128, 128))
QWEN3_5 = Backend.GDN_ATTN, ((3, 512), (4, 64, 64))
MAMBA2 = Backend.MAMBA2, ((3, 192), (8, 16, 32))
SHORT_CONV = Backend.SHORT_CONV, ((2, 64),)
LIGHTNING = Backend.LINEAR, ((4, 32, 32),)


def specs_of(kind, block, drafts, head):
    import drafting_engine as drafting

    backend, shapes = kind
    linear = drafting.states(backend, shapes, block, drafts)
    specs = {f"model.layers.{i}.mixer": linear for i in range(2)} | {"model.layers.2.attn": drafting.attention(block)}
    return specs | ({"mtp.layers.0.attn": drafting.attention(block)} if head else {})


def served(kind, daemon, **options):
    return in_child(_served, kind, daemon, **options)


def _served(kind, daemon, model, method, drafts, block, overlap=False, seed=0, stop=False, preempts=False, blocks=48):
    """Serves prompts and their continuations in one engine, and again in a second one. Returns what both resumed."""
    import drafting_engine as drafting

    drafting.emulate()
    source = random.Random(seed)
    specs = specs_of(kind, block, drafts, method == "mtp")

    def engine():
        return drafting.Engine(daemon, specs, model, method, drafts, block, seed=seed, overlap=overlap, blocks=blocks)

    first, second = engine(), engine()
    for each in (first, second):
        each.wait_until_open()
    found = dict(prompts=[], answers=[])
    for turn in range(6):
        prompt = [source.randrange(drafting.VOCABULARY) for _ in range(source.randrange(2 * block + 2, 4 * block))]
        answers = first.run([prompt], source.randrange(1, 2 * block), stop, preempts=preempts)
        for text in (prompt, prompt + answers[0] + [turn]):
            before = second.counts["resumed"]
            second.erase()
            second.run([text], 3)
            found["prompts" if text is prompt else "answers"].append((len(text), second.counts["resumed"] - before))
    found |= dict(drafts=first.counts["drafts"], accepted=first.counts["accepted"])
    for each in (first, second):
        each.close()
    return found


@pytest.mark.parametrize(
    "kind, model, method, drafts, block",
    [
        (QWEN3_NEXT, "qwen3_next", "mtp", 2, 16),
        (QWEN3_NEXT, "qwen3_next", "mtp", 1, 32),
        (QWEN3_5, "qwen3_5", "ngram", 3, 16),
        (QWEN3_5, "qwen3_5", "mtp", 3, 32),
        (MAMBA2, "granite", "ngram", 4, 16),
        (SHORT_CONV, "lfm2", "ngram", 3, 16),
        (LIGHTNING, "granite", "ngram", 2, 32),
    ],
)
def test_every_state_is_that_of_its_depth(kind, model, method, drafts, block, shared_daemon):
    found = served(kind, shared_daemon, model=model, method=method, drafts=drafts, block=block)
    assert 0 < found["accepted"] < found["drafts"], "drafts of both kinds"
    for length, resumed in found["prompts"]:
        assert resumed >= (length - 1) // block * block, "as without drafts: the prompt's last whole block"
    ends = [resumed >= length - 2 for length, resumed in found["answers"]]
    assert sum(ends) >= len(ends) - 2, "answers are resumed where they end, unless rejected drafts end a block"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preempts", [False, True])
def test_stop_tokens_and_preemptions_leave_right_states(overlap, preempts, shared_daemon):
    """`overlap`: vLLM schedules a step before the tokens of the previous one are known."""
    found = served(
        QWEN3_5, shared_daemon, model="qwen3_5", method="mtp", drafts=3, block=16, seed=10, stop=True, overlap=overlap,
        preempts=preempts,
    )  # fmt: skip
    assert 0 < found["accepted"] < found["drafts"]
    for length, resumed in found["prompts"]:
        assert resumed >= (length - 1) // 16 * 16


def test_a_wrong_place_is_detected(shared_daemon, monkeypatch):
    """The emulated engine checks the states that it continues from."""
    monkeypatch.setattr(Step, "place", lambda self, depth, end, block: Place(-(-end // block) - 1))
    with pytest.raises(AssertionError, match="of layer 0 at"):
        served(QWEN3_5, shared_daemon, model="qwen3_5", method="mtp", drafts=3, block=16, seed=20)


def test_a_step_ends_in_the_place_that_vllm_chooses():
    step = Step(start=6, tokens=4, drafts=3)  # the known token is the seventh
    assert step.place(7, 7, 8) == Place(1, 0), "the step's last block, although its drafts are rejected"
    assert step.place(9, 9, 8) == Place(1, 2)
    assert step.place(8, 9, 8) == Place(1, 1), "a stop token before the last accepted draft"
    assert step.place(6, 9, 8) is None and step.place(11, 11, 8) is None
    full = Step(start=4, tokens=4, drafts=3)
    assert full.place(8, 8, 8) == Place(0, 0), "vLLM has moved the last state into the first block"
    assert full.place(7, 8, 8) is None, "over this one"
    assert full.place(7, 7, 8) is None, (
        "vLLM 0.33 does not say whether it has: the eighth token may follow a stop token"
    )
    assert Step(start=7, tokens=1, drafts=0).place(8, 8, 8) == Place(0)
    assert Step(start=None, tokens=4, drafts=3).place(7, 7, 8) is None


def states_of(drafts, **rest):
    from drafting_engine import attention, states

    spec = dataclasses.replace(states(*QWEN3_5, block=128, drafts=drafts), **rest)
    return config_of({"model.layers.0.mixer": spec, "model.layers.1.attn": attention(128)})


def test_engines_with_and_without_drafts_store_the_same_states():
    text = SimpleNamespace(linear_num_key_heads=2)
    plain, drafting = (describe(states_of(drafts), text=text) for drafts in (0, 3))
    assert drafting.model.layers == plain.model.layers and isinstance(plain.model.layers[0], ashlar.Linear)
    assert drafting.identity.parts == plain.identity.parts
    assert (plain.drafts, drafting.drafts) == (0, 3)
    opaque = [describe(states_of(drafts)) for drafts in (0, 3)]
    assert opaque[0].model.layers == opaque[1].model.layers and isinstance(opaque[0].model.layers[0], ashlar.Opaque)
    assert opaque[0].identity.parts == opaque[1].identity.parts
    assert "states of drafts" in unsupported(drafting) and not unsupported(plain)


def test_drafts_that_the_engine_drops_within_a_step_are_refused():
    layers = layers_of(states_of(2), None, 1)
    config = SimpleNamespace(speculative_config=SimpleNamespace(enable_adaptive_verification=True))
    with pytest.raises(Unsupported, match="speculative_config: enable_adaptive_verification .* expected false"):
        _check_drafts(config, layers)
    _check_drafts(config, layers_of(states_of(0), None, 1))
    config.speculative_config.enable_adaptive_verification = False
    _check_drafts(config, layers)


def test_states_that_follow_all_accepted_drafts_are_refused():
    """KDA's RecoverSSM: if a stop token precedes accepted drafts, the state is that of a later depth."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
    )
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=parallel,
        speculative_config=SimpleNamespace(method="mtp"),
        diffusion_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True, use_kda_recoverssm=True),
    )
    with pytest.raises(Unsupported, match="use_replayssm: not supported with speculative decoding of KDA; expected"):
        _check(config, Options())
    config.cache_config.use_kda_recoverssm = False
    _check(config, Options())


@pytest.mark.skipif(
    "is_draft" not in {f.name for f in dataclasses.fields(MambaSpec)}, reason="vLLM 0.33 marks layers of draft models"
)
def test_states_of_a_draft_model_are_refused():
    with pytest.raises(
        Unsupported, match="model.layers.0.mixer: states of a draft model .*; remove speculative_config"
    ):
        layers_of(states_of(0, is_draft=True), None, 1)
