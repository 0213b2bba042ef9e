# SPDX-License-Identifier: Apache-2.0
"""The token that begins messages, found in chat templates."""

import pytest
from tiny_tokenizer import CHATML, HEADERS, TURNS, tokenizer

from ashlar.boundaries import message_token


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
