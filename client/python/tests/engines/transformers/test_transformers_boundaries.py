# SPDX-License-Identifier: Apache-2.0
"""The token that begins messages, found in chat templates."""

import pytest
import tokenizers
import transformers
from tiny_tokenizer import CHATML, HEADERS, TURNS, tokenizer

from ashlar.boundaries import declared_boundaries, message_token


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
def test_a_template_without_such_a_token_is_refused(template):
    with pytest.raises(
        ValueError, match="segment_boundaries: messages cannot be found .* set segment_separator instead"
    ):
        message_token(tokenizer(template, ["<other>"]))


def test_a_separator_whose_tokens_depend_on_its_neighbours_is_named_in_a_warning(caplog):
    model = tokenizers.models.BPE({"a": 0, "#": 1, "##": 2, "##a": 3}, [("#", "#"), ("##", "a")])
    known = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    tokens = known.encode("aa##aa")
    assert declared_boundaries("##", "", known).lengths(tokens) == [], "it is not found"
    assert "segment_separator: '##' has the token ids [2]; expected one special or added token" in caplog.text
    known.add_tokens(["##"])
    caplog.clear()
    assert declared_boundaries("##", "", known).lengths(known.encode("aa##aa")) == [3] and not caplog.text
