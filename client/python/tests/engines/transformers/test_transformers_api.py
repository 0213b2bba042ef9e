# SPDX-License-Identifier: Apache-2.0
"""`ashlar.attach` accepts, ignores and refuses the right models and calls, and no fault of the cache reaches the user."""

import importlib.metadata
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest
import tiny_transformers as tiny
import torch
import transformers
from tiny_tokenizer import CHATML, tokenizer

import ashlar
import ashlar.daemon
from ashlar.transformers.assembly import Assembler

SEGMENTS = [tiny.tokens(60, seed) for seed in range(3)]
QUERY = tiny.tokens(12, 99)
PROMPT = torch.tensor([tiny.tokens(300, 7)])
SMALL = {
    **tiny.COMMON,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return tiny.build("qwen3_next")


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(PROMPT, **GREEDY)


def test_import_takes_no_torch():
    code = "import sys, ashlar; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_generate_and_forward_are_restored(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache:
        before = model.forward, model.generate
        with pytest.raises(KeyError), ashlar.attach(model, cache):
            assert model.forward != before[0]
            raise KeyError
        assert (model.forward, model.generate) == before
        assert not {"forward", "generate"} & set(model.__dict__)
    with (
        pytest.raises(TypeError, match="^cache: NoneType was given; expected a cache from ashlar.cache_for"),
        ashlar.attach(model, None),
    ):
        pass


def test_generate_accepts_the_same_arguments_as_without(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        for _ in range(2):
            output = model.generate(
                input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), return_dict_in_generate=True,
                output_scores=True, **GREEDY)  # fmt: skip
            assert len(output.scores) == 8 and output.sequences.shape == (1, 308)
        assert reuse.last.cached_tokens == 292
        torch.manual_seed(3)
        sampled = model.generate(PROMPT, max_new_tokens=8, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, do_sample=True), sampled)


def test_forward_gives_the_logits_after_the_last_segment(model, daemon):
    prompt = ashlar.Prompt(SEGMENTS, torch.tensor(QUERY))
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        output = model(prompt)
        assert output.logits.shape == (1, len(QUERY), 256) and reuse.last.cached_tokens > 0
        assert output.past_key_values.get_seq_length() == len(prompt.tokens)
        assert model(prompt, logits_to_keep=1).logits.shape == (1, 1, 256)
        more = model(prompt, logits_to_keep=100).logits
        assert more.shape == (1, 100, 256) and reuse.last.cached_tokens == 60, (
            "the tokens of a segment that is kept are run"
        )
        assert (
            model(ashlar.Prompt([], prompt.tokens)).logits.shape == (1, 192, 256)
            and reuse.last.skip_reason == "logits_to_keep"
        )
        assert reuse.faults == 0


@pytest.mark.parametrize("query", [12, 100, 200])
def test_captures_and_prefixes_in_a_query_keep_its_logits(model, daemon, query):
    prompt = ashlar.Prompt(SEGMENTS[:1], tiny.tokens(query, 31))
    ids = torch.tensor([prompt.tokens.tolist()])
    with torch.no_grad():
        wanted = model(ids).logits
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        for before in (0, 60, 60):
            torch.testing.assert_close(model(prompt).logits, wanted[:, -query:], atol=1e-4, rtol=0)
            assert reuse.last.fault is None and reuse.last.cached_tokens >= before
        longer = ashlar.Prompt(SEGMENTS[:1], tiny.tokens(query, 31) + [7, 8])
        model.generate(longer, **GREEDY)
        assert reuse.last.cached_tokens == 60 + query, "forward offered the states behind its prompt"
        model.generate(prompt, **GREEDY)
        model.generate(prompt, **GREEDY)
        assert 52 + query <= reuse.last.cached_tokens < 60 + query
        torch.testing.assert_close(model(prompt).logits, wanted[:, -query:], atol=1e-4, rtol=0)
        ids = torch.cat([ids, torch.tensor([tiny.tokens(30, 8)])], 1)
        last = model(ids, logits_to_keep=30).logits
        assert reuse.last.cached_tokens == 60 + query and reuse.faults == 0
        torch.testing.assert_close(last, model(ids).logits[:, -30:], atol=1e-4, rtol=0)


def test_states_requested_near_the_end_are_offered_once(model, daemon):
    text = torch.tensor([tiny.tokens(200, 5)])
    start = text[:, :65]
    plain = model.generate(start, **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(text, **GREEDY)
        assert torch.equal(model.generate(start, **GREEDY), plain)
        assert reuse.last.fault is None and reuse.faults == 0 and "kept" in reuse.last.commits
        assert torch.equal(model.generate(start, **GREEDY), plain)
        assert reuse.last.cached_tokens == 64


def test_a_conversation_in_a_query_keeps_its_logits(model, daemon):
    segments, conversation = [*SEGMENTS, tiny.tokens(120, 5)], bytes(range(16))
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        said = model.generate(ashlar.Prompt(segments, QUERY, conversation), **GREEDY)
        turn = [*said[0, 300:].tolist(), *tiny.tokens(20, 6)]
        wanted = model(ashlar.Prompt(segments, turn)).logits
        assert not reuse.last.exact
        logits = model(ashlar.Prompt(segments, turn, conversation)).logits
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        model.generate(ashlar.Prompt(segments, turn, conversation), **GREEDY)
        assert reuse.last.cached_tokens == 319 and reuse.faults == 0, (
            "its composed states reach behind the last segment"
        )


def test_the_last_segment_of_a_prompt_without_a_query_is_computed(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse, torch.no_grad():
        model.generate(ashlar.Prompt(SEGMENTS), **GREEDY)
        assert reuse.last.fault is None and reuse.last.published == 2
        assert model(ashlar.Prompt(SEGMENTS)).logits.shape == (1, 1, 256)
        assert reuse.last.fault is None and reuse.last.cached_tokens == 60 + 44 and reuse.last.published == 0
        alone = model.generate(ashlar.Prompt(SEGMENTS[:1]), **GREEDY)
        assert reuse.last.fault is None and reuse.faults == 0
    assert torch.equal(alone, model.generate(torch.tensor(SEGMENTS[:1]), **GREEDY))


def test_plain_tokens_are_cut_at_a_separator(model, daemon):
    """The same segments as those of a `Prompt`."""
    separator = [250, 251]
    segments = [[*segment, *separator] for segment in SEGMENTS]
    row = torch.tensor([sum(segments, []) + QUERY])
    with ashlar.cache_for(model, daemon, tokens=1024) as cache:
        with ashlar.attach(model, cache) as reuse:
            said = model.generate(ashlar.Prompt(segments, QUERY, salt=b""), **GREEDY)
            assert reuse.last.published == len(SEGMENTS)
        with ashlar.attach(model, cache, segment_separator=separator) as reuse, torch.no_grad():
            assert torch.equal(model.generate(row, **GREEDY), said)
            assert reuse.last.published == 0 and reuse.last.cached_tokens > 0 and reuse.faults == 0
            assert model(row, logits_to_keep=1).logits.shape[:2] == (1, 1) and reuse.last.cached_tokens > 0
        for name, wrong, error in (
            ("segment_separator", "<sep>", TypeError),
            ("segment_separator", [-1], ValueError),
            ("segment_boundaries", "lines", ValueError),
            ("segment_boundaries", "messages", ValueError),
        ):
            with pytest.raises(error, match=f"^{name}: "), ashlar.attach(model, cache, **{name: wrong}):
                pass


@pytest.mark.parametrize("options", [{"segment_separator": "<|im_end|>"}, {"segment_boundaries": "messages"}])
def test_plain_tokens_are_cut_as_declared_in_text(options, model, daemon):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    begin, end = known.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    messages = [[begin, *(10 + token % 200 for token in segment), end] for segment in SEGMENTS]
    with ashlar.cache_for(model, daemon, tokens=1024) as cache:
        with ashlar.attach(model, cache, tokenizer=known, **options) as reuse:
            for order in ([0, 1, 2], [0, 2, 1]):
                row = torch.tensor([sum((messages[i] for i in order), []) + [begin, *QUERY]])
                model.generate(row, **GREEDY)
                assert reuse.last.published == (3 if order == [0, 1, 2] else 0)
                assert reuse.last.cached_tokens == 62 + 2 * (62 - 16) and reuse.faults == 0


def test_a_conversation_continues_after_its_own_composed_states(model, daemon):
    conversation = bytes(range(16))
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        said = model.generate(ashlar.Prompt([*SEGMENTS, tiny.tokens(120, 5)], QUERY, conversation), **GREEDY)
        assert not reuse.last.exact and "kept" in reuse.last.commits
        longer = [*said[0].tolist(), *tiny.tokens(20, 6)]
        model.generate(ashlar.Prompt([], longer, conversation), **GREEDY)
        assert reuse.last.cached_tokens == said.shape[1] - 1
        model.generate(ashlar.Prompt([], longer, bytes(16 * [9])), **GREEDY)
        assert reuse.last.cached_tokens < said.shape[1] - 1, "composed states are their conversation's alone"


def test_prompts_hit_only_under_their_own_salt(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        salts, answers = ["", "mine", b"theirs"], []
        for salt in salts:
            said = model.generate(ashlar.Prompt(SEGMENTS, QUERY, salt=salt), **GREEDY)
            assert reuse.last.published == len(SEGMENTS), "not found under another one"
            answers.append(said)
        for salt in salts:
            answers.append(model.generate(ashlar.Prompt(SEGMENTS, QUERY, salt=salt), **GREEDY))
            assert reuse.last.published == 0 and reuse.last.cached_tokens > 0
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        assert reuse.faults == 0


def test_a_prompt_without_space_is_computed_without_the_cache(model, daemon, plain):
    with ashlar.cache_for(model, daemon, tokens=128) as cache, ashlar.attach(model, cache) as reuse:
        assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
        assert "pages" in reuse.last.fault and reuse.faults == 1
        model.generate(ashlar.Prompt(SEGMENTS[:1], QUERY), **GREEDY)
        assert reuse.last.fault is None, "the next one has space"


def test_pages_are_returned(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        for seed in range(12):
            model.generate(ashlar.Prompt([tiny.tokens(150, seed), *SEGMENTS[:2]], QUERY), **GREEDY)
        assert reuse.faults == 0 and sorted(cache.free) == list(range(cache.pages))


def test_a_bad_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match="conversation: .* bytes were given; expected 16"):
        ashlar.Prompt(SEGMENTS, QUERY, b"short")
    with pytest.raises(ValueError, match="segments: no tokens"):
        ashlar.Prompt([])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=64, head_dim=16, num_local_experts=2,
                                       attention_chunk_size=8),
         r"layers\[0\]: chunked attention, or a window in a layer with a state, is not supported"),
        (transformers.Lfm2Config(**{**SMALL, "pad_token_id": 0}, layer_types=["conv", "full_attention"]),
         r"layers\[0\]: a convolution without a state is not supported"),
        (transformers.ZambaConfig(**{**SMALL, "num_hidden_layers": 4}, mamba_d_state=8, mamba_dt_rank=4,
                                  layers_block_type=["mamba", "hybrid", "mamba", "hybrid"]),
         r"layers\[0\]: its linear layer uses an unsupported recurrence"),
        (transformers.LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
         "rope_parameters: frequencies of type dynamic"),
    ],
    ids=["chunks", "convolution", "no rule", "dynamic rotation"],
)  # fmt: skip
def test_models_that_cannot_be_served_are_refused_by_name(config, message, daemon):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match=message):
        ashlar.cache_for(model, daemon)


def test_a_model_that_cannot_continue_from_its_state_is_refused(daemon, monkeypatch):
    """In some versions, rules of several tokens started from zero."""
    model = tiny.build("granitemoehybrid")
    module = sys.modules[type(model).__module__]
    scan = module.mamba2_chunk_scan

    def forgetful(*args, **kwargs):
        return scan(*args, **{**kwargs, "initial_states": None})

    monkeypatch.setattr(module, "mamba2_chunk_scan", forgetful)
    with pytest.raises(ValueError, match=r"layers\[0\]: state differs by .* between a run in two parts and one run"):
        ashlar.cache_for(model, daemon)


@pytest.mark.parametrize("version", ["5.17.2", "5.25.0", "6.0.0"])
def test_other_versions_are_refused_with_the_range(version, model, daemon, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(ImportError, match=rf"version {version} is not supported; expected 5\.18 to below 5\.25"):
        ashlar.cache_for(model, daemon)


def test_other_weights_find_nothing(model, daemon):
    other = tiny.build("qwen3_next", seed=1)
    for one in (model, other):
        with ashlar.cache_for(one, daemon, tokens=512) as cache, ashlar.attach(one, cache) as reuse:
            one.generate(ashlar.Prompt(SEGMENTS, QUERY), **GREEDY)
            assert reuse.last.published == len(SEGMENTS)


def test_two_processes_share_what_one_computed(model, daemon):
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache):
        here = model.generate(ashlar.Prompt(SEGMENTS, QUERY), **GREEDY)
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':')\n"
        "import ashlar, test_transformers_api as t, tiny_transformers as tiny\n"
        "model = tiny.build('qwen3_next')\n"
        "with ashlar.cache_for(model, (sys.argv[2], sys.argv[3]), tokens=512) as cache, ashlar.attach(model, cache) as reuse:\n"
        "    said = model.generate(ashlar.Prompt(t.SEGMENTS, t.QUERY), **t.GREEDY)\n"
        "print(reuse.last.published, reuse.last.cached_tokens, said[0].tolist())\n"
    )
    folder = pathlib.Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, f"{folder}:{folder.parent}", daemon.rpc_socket, daemon.session_socket],
                          capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    assert done.stdout.strip() == f"0 148 {here[0].tolist()}"


class Killing(Assembler):
    """Ends the daemon at one moment of the first prompt."""

    moment = ""
    daemon = None

    def _end_it(self, moment):
        if self.moment == moment:
            self.moment = ""  # one failure
            self.daemon.kill()

    def assemble(self, *args):
        self._end_it("begin")
        return super().assemble(*args)

    def _tuple(self, *args):
        self._end_it("publish")
        return super()._tuple(*args)

    def _follow(self, *args):
        self._end_it("follow")
        return super()._follow(*args)

    def compose(self, *args):
        self._end_it("compose")
        return super().compose(*args)

    def commit(self, *args):
        self._end_it("commit")
        return super().commit(*args)


@pytest.mark.parametrize("moment", ["begin", "publish", "follow", "compose", "commit"])
def test_a_daemon_killed_at_any_moment_only_costs_time(model, daemon, plain, moment):
    prompt = ashlar.Prompt(SEGMENTS, QUERY)
    computed = model.generate(torch.tensor([prompt.tokens.tolist()]), **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024, timeout_ms=2000, land_ms=2000, quiet_ms=2000) as cache:
        if moment != "publish":
            with ashlar.attach(model, cache):
                composed = model.generate(prompt, **GREEDY)
                assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
        killing = type("KillingHere", (Killing,), {"moment": moment, "daemon": daemon})
        with ashlar.attach(model, cache, assembler=killing) as reuse:
            said = model.generate(prompt, **GREEDY)
            assert daemon.pid is None
            if moment == "commit":
                assert torch.equal(said, composed), "the prompt had been assembled"
            else:
                assert torch.equal(said, computed)
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain), "still without a daemon"
            assert reuse.last.cached_tokens == 0
            daemon.start()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # the session reconnects in the background
                assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
                if reuse.last.cached_tokens > 0:
                    break
                time.sleep(0.2)
            assert reuse.last.cached_tokens >= 256, "it is of use again"


def test_a_daemon_killed_at_random_moments_changes_no_token(model, daemon, plain):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw, kills = random.Random(seed), int(os.environ.get("ASHLAR_TRANSFORMERS_KILLS", "6"))
    prompt = ashlar.Prompt(SEGMENTS, QUERY)
    computed = model.generate(torch.tensor([prompt.tokens.tolist()]), **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024, timeout_ms=2000, land_ms=2000, quiet_ms=2000) as cache:
        with ashlar.attach(model, cache) as reuse:
            model.generate(prompt, **GREEDY)
            composed = model.generate(prompt, **GREEDY)
            files = len(os.listdir("/proc/self/fd"))
            for _ in range(kills):
                killer = threading.Timer(draw.uniform(0, 0.3), daemon.kill)
                killer.start()
                while killer.is_alive():
                    assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
                    said = model.generate(prompt, **GREEDY)
                    assert torch.equal(said, composed) or torch.equal(said, computed)
                killer.join()
                assert torch.equal(model.generate(PROMPT, **GREEDY), plain), "without a daemon"
                daemon.start()
                deadline = time.monotonic() + 60
                while reuse.last.cached_tokens == 0 and time.monotonic() < deadline:
                    assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
                assert reuse.last.cached_tokens >= 256, "it is of use again"
            assert torch.equal(model.generate(prompt, **GREEDY), composed)
            deadline = time.monotonic() + 20
            while sorted(cache.free) != list(range(cache.pages)) and time.monotonic() < deadline:
                model.generate(PROMPT, **GREEDY)  # takes back quiesced pages
            assert sorted(cache.free) == list(range(cache.pages)), "no page is lost"
    assert len(os.listdir("/proc/self/fd")) <= files


def test_one_prompt_at_a_time_from_many_threads(model, daemon, plain):
    answers = []
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        threads = [threading.Thread(target=lambda: answers.append(model.generate(PROMPT, **GREEDY))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reuse.faults == 0
    assert len(answers) == 4 and all(torch.equal(answer, plain) for answer in answers)
