# SPDX-License-Identifier: Apache-2.0
"""Segments of chats: the special tokens between messages, found in chat templates."""

import pytest
import tokenizers
import transformers
from message_templates import STYLES
from tiny_tokenizer import CHATML, HEADERS, TURNS, tokenizer

from ashlar.boundaries import declared_boundaries
from ashlar.chat_template import message_tokens

FIRST = ["system", "user", "assistant"]
EXCHANGES = [["user", "assistant"], ["user", "call", "tool", "assistant"], ["user", "assistant", "user", "assistant"]]


def tokens_of(known):
    """The texts of the tokens that begin messages, and of those that end messages."""
    return tuple(set(known.convert_ids_to_tokens(each)) for each in message_tokens(known))


def content(number):
    """A text of known words, different for each number."""
    return " ".join("two" if digit == "1" else "one" for digit in f"{number:06b}")


def messages_of(roles, numbers):
    found = []
    for role, number in zip(roles, numbers):
        if role == "call":
            call = {"id": "callid000", "type": "function", "function": {"name": content(number), "arguments": {}}}
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif role == "tool":
            found.append({"role": "tool", "content": content(number), "name": "f", "tool_call_id": "callid000"})
        else:
            found.append({"role": role, "content": content(number)})
    return found


def segments_of(known, messages, **variables):
    """The segments and the query of a chat, as texts of tokens."""
    tokens = known.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
    position, found = 0, []
    for length in declared_boundaries((), "messages", known).lengths(tokens):
        found.append(tokens[position : position + length])
        position += length
    return [" ".join(known.convert_ids_to_tokens(each)) for each in [*found, tokens[position:]]]


def chat(style, order):
    """The first messages, exchanges of messages in this order, and a question."""
    parts = [(role, number) for number, role in enumerate(FIRST)]
    for exchange in order:
        if not style.refused & {*EXCHANGES[exchange]}:
            parts += [(role, 8 * (1 + exchange) + i) for i, role in enumerate(EXCHANGES[exchange])]
    parts = [(role, number) for role, number in [*parts, ("user", 63)] if role not in style.refused]
    return messages_of(*zip(*parts)), [(role, content(number)) for role, number in parts]


@pytest.mark.parametrize(
    "template, specials, wanted",
    [
        *((each.template, each.specials.split(), (each.begins, each.ends)) for each in STYLES.values()),
        (CHATML, ["<|im_start|>", "<|im_end|>"], ("<|im_start|>", "")),
        (HEADERS, ["<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"], ("<|header|>", "<|eot|>")),
        (TURNS, ["<bos>", "<turn>", "</turn>"], ("<turn>", "")),
    ],
    ids=[*STYLES, "CHATML", "HEADERS", "TURNS"],
)
def test_the_tokens_between_messages_are_found_in_the_template(template, specials, wanted):
    assert tokens_of(tokenizer(template, specials)) == tuple(set(each.split()) for each in wanted)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_each_message_is_a_segment(style):
    messages, texts = chat(style, [0, 1, 2])
    segments = segments_of(tokenizer(style.template, style.specials.split()), messages)
    place = [[number for number, each in enumerate(segments) if text in each] for _, text in texts]
    assert [len(each) for each in place] == [1] * len(texts), segments
    for (role, _), (before,), (after,) in zip(texts, place, place[1:]):
        assert after - before == (0 if role in style.merged else 1), "no segment is between two messages"


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_messages_have_the_same_segments_in_any_order(style):
    known = tokenizer(style.template, style.specials.split())
    wanted = segments_of(known, chat(style, [0, 1, 2])[0])
    for order in ([2, 1, 0], [1, 2, 0], [0, 2, 1]):
        *found, question = segments_of(known, chat(style, order)[0])
        assert sorted(found) == sorted(wanted[:-1]) and question == wanted[-1]


def test_tools_between_messages_are_a_segment():
    style = STYLES["mistral"]
    known, messages = tokenizer(style.template, style.specials.split()), chat(style, [0, 1])[0]
    tools = [{"name": "two two two two"}]
    without, found = segments_of(known, messages), segments_of(known, messages, tools=tools)
    own = "[AVAILABLE_TOOLS] two two two two [/AVAILABLE_TOOLS]"
    assert own in found and [each for each in found if each != own] == without


def test_the_servers_template_takes_precedence():
    known = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_start|>", "<|im_end|>"])
    assert message_tokens(known, CHATML).begins == (known.convert_tokens_to_ids("<|im_start|>"),)


@pytest.mark.parametrize(
    "template, reason",
    [
        (None, "ValueError: "),
        ("{{ raise_exception('no chats') }}", "TemplateError: no chats"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            r"only '\\nassistant: ' is between messages",
        ),
        (  # the end of an answer alone separates no question from its answer
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<other>' if m.role == 'assistant' else ' ' }}{% endfor %}",
            "only ' assistant: ' is between messages of user and assistant",
        ),
        ("<other>{{ messages[0].content }}", "no prompt contains the text of each message once and in order"),
        (
            "{% for m in messages %}{{ m.content }}{{ '<other>x<other>' if m.role == 'user' else '<other>' }}{% endfor %}",
            "none of <other> is only between messages",
        ),
    ],
)
def test_a_template_without_such_tokens_is_refused(template, reason):
    with pytest.raises(
        ValueError, match="^segment_boundaries: messages cannot be found .* set segment_separator instead$"
    ) as e:
        message_tokens(tokenizer(template, ["<other>"]))
    assert e.match(rf"the chat template \({reason}")


def test_tokens_that_prompts_do_not_have_are_refused(monkeypatch):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    own = known.apply_chat_template

    def render(messages, tokenize=True, **options):
        return [1, 2] if tokenize else own(messages, tokenize=False, **options)

    monkeypatch.setattr(known, "apply_chat_template", render)
    with pytest.raises(ValueError, match=r"the token ids of prompts do not contain <\|im_start\|> as the text does"):
        message_tokens(known)


class Wrapped:
    """A tokenizer with only some of the attributes of another one."""

    def __init__(self, tokenizer, lacks):
        self._tokenizer, self._lacks = tokenizer, lacks

    def __getattr__(self, name):
        if name == self._lacks:
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("lacks", ["convert_tokens_to_ids", "apply_chat_template"])
def test_a_tokenizer_without_a_required_method_is_refused(lacks):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(ValueError, match=rf"^segment_boundaries: .*\(AttributeError: {lacks}\); expected "):
        declared_boundaries((), "messages", Wrapped(known, lacks))


@pytest.mark.parametrize("lacks", ["all_special_tokens", "get_added_vocab"])
def test_special_tokens_are_those_that_the_tokenizer_names(lacks):
    known = tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    assert message_tokens(Wrapped(known, lacks)) == message_tokens(known)
    assert declared_boundaries("<|im_end|>", "", Wrapped(known, lacks)).lengths(known.encode("<|im_end|> one")) == [1]


def test_a_separator_whose_tokens_depend_on_its_neighbours_is_named_in_a_warning(caplog):
    model = tokenizers.models.BPE({"a": 0, "#": 1, "##": 2, "##a": 3}, [("#", "#"), ("##", "a")])
    known = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    tokens = known.encode("aa##aa")
    assert declared_boundaries("##", "", known).lengths(tokens) == [], "it is not found"
    assert "segment_separator: '##' has the token ids [2]; expected one special or added token" in caplog.text
    known.add_tokens(["##"])
    caplog.clear()
    assert declared_boundaries("##", "", known).lengths(known.encode("aa##aa")) == [3] and not caplog.text
