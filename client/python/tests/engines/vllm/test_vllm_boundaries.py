# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts whose requests declare none."""

import types

import pytest
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt
from tiny_tokenizer import CHATML, tokenizer
from vllm import SamplingParams

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
