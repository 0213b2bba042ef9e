# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts whose requests declare none."""

import pathlib
import shutil
import types

import mistral_common
import pytest
from message_templates import STYLES
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt
from tiny_tokenizer import CHATML, tokenizer
from vllm import SamplingParams
from vllm.tokenizers.mistral import MistralTokenizer

from ashlar.boundaries import declared_boundaries
from ashlar.vllm import boundaries
from ashlar.vllm.boundaries import find_boundaries
from ashlar.vllm.options import Options
from ashlar.vllm.prompt_segments import PromptSegments


def test_a_separator_is_text_or_tokens(monkeypatch):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>", "<|sep|>"])
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    sep = known.convert_tokens_to_ids("<|sep|>")
    tokens = [1] * 40 + [sep] + [2] * 40
    for given in ("<|sep|>", [sep]):
        options = Options.read({"segments": True, "segment_separator": given})
        assert find_boundaries(options, None).lengths(tokens) == [41]
    assert find_boundaries(Options(), None) is None
    with pytest.raises(ValueError, match=r"extra_config\.segment_boundaries: 'lines' was given; expected 'messages'"):
        find_boundaries(Options(segment_boundaries="lines"), None)
    with pytest.raises(ValueError, match="segment_separator"):
        Options.read({"segment_separator": [1, "2"]})


def test_a_separator_that_may_not_be_found_is_named_in_a_warning(monkeypatch, caplog):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    for given, ids in (("<|im_end|>", []), ("one two", [1, 2]), ("one", [1]), ("<|sep|>", known.encode("<|sep|>"))):
        caplog.clear()
        find_boundaries(Options.read({"segment_separator": given}), None)
        found = [f"{given!r} has the token ids {ids}; " in each.getMessage() for each in caplog.records]
        assert found == [True] * bool(ids)


def test_messages_are_found_with_the_servers_template(monkeypatch):
    known = tokenizer(None, ["<|im_start|>", "<|im_end|>"])
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    begin = known.convert_tokens_to_ids("<|im_start|>")
    options = Options(segment_boundaries="messages", chat_template=CHATML)
    assert find_boundaries(options, None).lengths([begin, *[1] * 39, begin, *[2] * 39, begin, 0]) == [40, 40]
    with pytest.raises(ValueError, match=r"^kv_connector_extra_config\.segment_boundaries: messages cannot be found"):
        find_boundaries(Options(segment_boundaries="messages"), None)


def test_messages_are_found_whose_roles_have_different_tokens(monkeypatch):
    style = STYLES["glm"]
    known = tokenizer(style.template, style.specials.split())
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    system, user, assistant = known.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    tokens = [system, *[1] * 39, user, *[2] * 39, assistant, *[1] * 39, user, *[2] * 39, assistant]
    assert find_boundaries(Options(segment_boundaries="messages"), None).lengths(tokens) == [40] * 4


def test_messages_are_found_with_a_tokenizer_of_mistral_common(monkeypatch, tmp_path):
    """Which has no chat template. The proxy's tokenizer is that of Transformers."""
    name = "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(pathlib.Path(mistral_common.__file__).parent / "data" / name, tmp_path / "tokenizer.model.v3")
    known = MistralTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    found = find_boundaries(Options(segment_boundaries="messages"), None)
    proxys = declared_boundaries((), "messages", known.transformers_tokenizer, short=32)
    texts = ["One question. " * 20, "An answer. " * 20, "Another question? " * 20, "The other answer. " * 20]
    segments = []
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        messages = [{"role": ("user", "assistant")[i % 2], "content": texts[each]} for i, each in enumerate(order)]
        tokens = known.apply_chat_template([*messages, {"role": "user", "content": "Why?"}])
        lengths = found.lengths(tokens)
        assert lengths == proxys.lengths(tokens) and len(lengths) == 5 and sum(lengths) < len(tokens)
        ends = [sum(lengths[: i + 1]) for i in range(5)]
        segments.append([tokens[end - length : end] for end, length in zip(ends, lengths)])
    assert segments[0][0] == segments[1][0] == [known.bos_token_id]
    assert sorted(segments[0]) == sorted(segments[1])


@pytest.mark.parametrize("skips", [True, False])
def test_a_model_without_a_tokenizer_is_refused(skips, tmp_path):
    config = types.SimpleNamespace(
        tokenizer=str(tmp_path), tokenizer_revision=None, trust_remote_code=False, skip_tokenizer_init=skips,
        tokenizer_mode="auto", runner_type="generate", hf_config=None, renderer="auto",
    )  # fmt: skip
    with pytest.raises(ValueError, match="no tokenizer in .*; give segment_separator as a list of token ids"):
        find_boundaries(Options(segment_separator="<|sep|>"), config)


def test_prompts_whose_tokens_are_scored_have_no_segments():
    """Also if the caller lets vLLM read its prefix cache."""

    def lengths(**sampling):
        request = types.SimpleNamespace(
            lora_request=None, mm_features=[], skip_reading_prefix_cache=False, num_prompt_tokens=200,
            kv_transfer_params={"ashlar_segments": [100]}, sampling_params=SamplingParams(**sampling),
        )  # fmt: skip
        return PromptSegments(True, None).lengths_of(request)

    assert lengths() == [100]
    assert lengths(prompt_logprobs=0) == [] and lengths(prompt_logprob_token_ids=[[1], [2]]) == []


def test_segments_are_found_by_their_separator(shared_daemon, segmented):
    """The same segments as those that a request declares. A declaration takes precedence."""
    parts = [part + [500, 501] for part in texts("separated", 3)]
    query = prompt("separated query", 30)
    options = connector(shared_daemon, segment_separator=[500, 501], model_id="separated", **PATIENT)
    with Segmented(MODEL, options) as child:
        child.publish(parts)
        sockets = shared_daemon.rpc_socket, shared_daemon.session_socket
        probed = child.probe("saved", sockets, sum(parts, []) + query, [102] * 3, "separated")
        assert probed[:2] == (102, 2 * 86)
        assert child.probe("saved", sockets, query, [], "separated")[2] == 0
        for declared in (None, [102] * 3):
            *_, cached = child.probe("ask", sum(parts, []) + query, declared)
            assert cached == 102 + 2 * 86
            child.call("erase")
        jumps = count(child, "jumps")
        assert child.probe("ask", sum(parts, []) + query, [])[2] == 0 and count(child, "jumps") == jumps
