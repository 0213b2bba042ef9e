# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts whose requests declare none."""

import types

import pytest
import tokenizers
import transformers
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt

import ashlar
from ashlar.boundaries import Boundaries, message_token
from ashlar.vllm import boundaries
from ashlar.vllm.boundaries import find_boundaries
from ashlar.vllm.options import Options

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # begins with its own system message
    "<|begin|>{% if messages[0].role != 'system' %}<|header|>system<|end_header|>none<|eot|>{% endif %}"
    "{% for m in messages %}<|header|>{{ m.role }}<|end_header|>{{ m.content }}<|eot|>{% endfor %}"
)
TURNS = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<turn>{{ m.role }}\n{{ m.content }}</turn>\n{% endfor %}"
)


def tokenizer(template, specials):
    model = tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.add_special_tokens(specials)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=own, additional_special_tokens=specials)
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    "template, specials, wanted",
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_start|>"),
        (HEADERS, ["<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"], "<|header|>"),
        (TURNS, ["<bos>", "<turn>", "</turn>"], "<turn>"),
    ],
)
def test_the_token_that_begins_messages_is_found_in_the_template(template, specials, wanted):
    known = tokenizer(template, specials)
    assert message_token(known) == known.convert_tokens_to_ids(wanted)


def test_the_servers_template_takes_precedence():
    known = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_start|>", "<|im_end|>"])
    assert message_token(known, CHATML) == known.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None])
def test_a_template_without_such_a_token_is_refused(template, monkeypatch):
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: tokenizer(template, ["<other>"]))
    with pytest.raises(
        ValueError, match="segment_boundaries: messages cannot be found .* set segment_separator instead"
    ):
        find_boundaries(Options(segment_boundaries="messages"), None)


@pytest.mark.parametrize(
    "separator, message, tokens, wanted",
    [
        ([9], None, [1] * 5 + [9] + [2] * 4 + [9] + [3] * 3, [6, 5]),
        ([9, 8], None, [1] * 5 + [9] + [2] * 4 + [9, 8] + [3], [12]),
        ([9], None, [1] * 5 + [9] + [2] * 4 + [9], [6]),  # the last token is always computed
        ([9], None, [1] * 20, []),
        ([9], None, [], []),
        ([], 7, [7] + [1] * 5 + [7] + [2] * 5 + [7, 3], [6, 6]),
        ([9], 7, [7] + [1] * 5 + [9] + [2] * 5 + [7, 3], [7, 5]),
        ([9], None, [1, 9, 1, 9] + [1] * 5 + [9, 1, 9, 3], [4, 6, 2]),  # short segments are only joined with short ones
    ],
)
def test_boundaries_are_found_in_tokens(separator, message, tokens, wanted):
    assert Boundaries(separator, message, 4).lengths(tokens) == wanted


def test_a_separator_is_text_or_tokens(monkeypatch):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>", "<|sep|>"])
    monkeypatch.setattr(boundaries, "_tokenizer", lambda config: known)
    sep = known.convert_tokens_to_ids("<|sep|>")
    tokens = [1] * 40 + [sep] + [2] * 40
    for given in ("<|sep|>", [sep]):
        options = Options.read({"segments": True, "segment_separator": given})
        assert find_boundaries(options, None).lengths(tokens) == [41]
    assert find_boundaries(Options(), None) is None
    with pytest.raises(ValueError, match="segment_boundaries: 'lines' was given; expected 'messages'"):
        find_boundaries(Options(segment_boundaries="lines"), None)
    with pytest.raises(ValueError, match="segment_separator"):
        Options.read({"segment_separator": [1, "2"]})


@pytest.mark.parametrize("skips", [True, False])
def test_a_model_without_a_tokenizer_is_refused(skips, tmp_path):
    config = types.SimpleNamespace(
        tokenizer=str(tmp_path), tokenizer_revision=None, trust_remote_code=False, skip_tokenizer_init=skips,
        tokenizer_mode="auto", runner_type="generate", hf_config=None, renderer="auto",
    )  # fmt: skip
    with pytest.raises(ValueError, match="no tokenizer in .*; give segment_separator as a list of token ids"):
        find_boundaries(Options(segment_separator="<|sep|>"), config)


def test_segments_are_found_by_their_separator(shared_daemon, segmented):
    """The same segments as those that a request declares. A declaration takes precedence."""
    parts = [part + [500, 501] for part in texts("separated", 3)]
    query = prompt("separated query", 30)
    options = connector(shared_daemon, segments=True, segment_separator=[500, 501], model_id="separated", **PATIENT)
    with Segmented(MODEL, options) as child:
        child.publish(parts)
        with ashlar.Prober(shared_daemon.rpc_socket, shared_daemon.session_socket) as prober:
            probed = prober.probe(sum(parts, []) + query, [102] * 3, model_id="separated").nodes[0]
            assert (probed.prefix_tokens, probed.segment_tokens) == (102, 2 * 86)
            assert prober.probe(query, model_id="separated").nodes[0].saved_tokens == 0
        for declared in (None, [102] * 3):
            *_, cached = child.probe("ask", sum(parts, []) + query, declared)
            assert cached == 102 + 2 * 86
            child.call("erase")
        jumps = count(child, "jumps")
        assert child.probe("ask", sum(parts, []) + query, [])[2] == 0 and count(child, "jumps") == jumps
