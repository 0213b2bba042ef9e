# SPDX-License-Identifier: Apache-2.0
"""Finds the special tokens between the messages of a chat template.

Conversations of several roles are rendered with known texts. Between two texts, the tokens that also follow the last
message of a conversation belong to the first message. The first other token begins the next message. If there is none,
such as before Mistral's answers, a token that ends the first message is the boundary.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

# Templates may refuse some of them. "call" and "calls" are an assistant's messages with one and two tool calls.
_CONVERSATIONS = tuple(
    tuple(roles.split())
    for roles in (
        "user assistant user assistant user",
        "system user assistant user",
        "user assistant system user",
        "user call tool assistant user",
        "user calls tool tool assistant user",
        "user assistant tool assistant user",
    )
)
_CALLS = ("call", "calls")
_REQUIRED = (("user", "assistant"), ("assistant", "user"))
_SHOWN = 60  # characters of a template in an error


class MessageTokens(NamedTuple):
    begins: tuple[int, ...] = ()  # each begins a message
    ends: tuple[int, ...] = ()  # each ends one


class _NotFound(Exception):
    """The message is the reason."""


def special_tokens(tokenizer: Any) -> set[str]:
    """Returns the texts that the tokenizer replaces by one token wherever they are."""
    added = getattr(tokenizer, "get_added_vocab", dict)  # tokenizers of mistral_common have no added tokens
    return {*getattr(tokenizer, "all_special_tokens", ()), *added()}


def message_tokens(tokenizer: Any, template: str | None = None) -> MessageTokens:
    """Returns the special tokens between messages of the chat template, by default the model's. ValueError: there are
    none between a user's and an assistant's message."""
    try:
        found = _Prompts(tokenizer, template)
        begins, ends = found.choose()
        ids = found.ids_of(begins | ends)
    except _NotFound as reason:
        raise ValueError(
            f"segment_boundaries: messages cannot be found in the chat template ({reason}); expected a special token "
            "between messages of user and assistant; set segment_separator instead"
        ) from None
    begin_ids, end_ids = (tuple(sorted(ids[each] for each in tokens)) for tokens in (begins, ends))
    return MessageTokens(begin_ids, end_ids)


@dataclasses.dataclass(frozen=True)
class _Gap:
    """What a template writes between the texts of two messages."""

    before: str  # role
    after: str
    text: str
    tokens: tuple[tuple[str, int, int], ...]  # each special token's text, begin and end

    def without(self, tokens: Collection[str]) -> _Gap:
        return dataclasses.replace(self, tokens=tuple(each for each in self.tokens if each[0] not in tokens))

    def cuts(self, begins: Collection[str], ends: Collection[str]) -> set[int]:
        """Returns the positions of the boundaries in `text`."""
        found = {begin for token, begin, _ in self.tokens if token in begins}
        return found | {end for token, _, end in self.tokens if token in ends}


class _Prompts:
    """The prompts of a template, with the special tokens that are next to messages."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        specials = sorted((each for each in special_tokens(tokenizer) if each.strip()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._rendered: list[tuple[list[dict[str, Any]], str]] = []
        self._gaps: list[_Gap] = []
        self._first: dict[str, set[str]] = {}  # by role: tokens before a conversation's first message
        self._last: dict[str, set[str]] = {}  # tokens after a conversation's last message
        self._refusal = ""
        conversations = {roles[: count + 1]: None for roles in _CONVERSATIONS for count in range(len(roles))}
        for roles in conversations:
            self._add(roles)
        for gap in self._gaps:  # some templates refuse a conversation that an answer ends
            first = self._first.get(gap.after)
            if first is not None:
                tokens = [token for token, *_ in gap.tokens]
                ended = next((number for number, token in enumerate(tokens) if token in first), len(tokens))
                self._last.setdefault(gap.before, set()).update(tokens[:ended])

    def choose(self) -> tuple[set[str], set[str]]:
        """Returns the tokens that begin messages, and those that end messages; if possible, none that are also inside
        messages."""
        gaps, inside = self._gaps, self._inside()
        if inside:
            self._gaps = [gap.without(inside) for gap in gaps]
            try:
                return self._choose()
            except _NotFound:
                self._gaps = gaps
        return self._choose()

    def _choose(self) -> tuple[set[str], set[str]]:
        required = [gap for gap in self._gaps if (gap.before, gap.after) in _REQUIRED]
        if len({gap.before for gap in required}) < len(_REQUIRED):
            raise _NotFound(self._refusal or "no prompt contains the text of each message once and in order")
        for gap in required:
            if not gap.tokens:
                text = gap.text if len(gap.text) <= _SHOWN else gap.text[:_SHOWN] + "…"
                raise _NotFound(f"only {text!r} is between messages of {gap.before} and {gap.after}")
        openers = {gap: opener for gap in required if (opener := self._opener(gap)) is not None}
        begins, ends = set(openers.values()), set[str]()
        if not all(self._cut_once(gap, begins, ends) for gap in required):
            begins, ends = set(), set()
            if not all(self._cut_once(gap, begins, ends) for gap in required):
                seen = sorted({token for gap in required for token, *_ in gap.tokens})
                raise _NotFound(f"none of {', '.join(seen)} is only between messages")
        for gap in self._gaps:
            # A call's beginning is the assistant's. Several results of tools may be one message.
            if gap.after not in _CALLS and (gap.before, gap.after) != ("tool", "tool"):
                opener = self._opener(gap)
                if not gap.cuts(begins, ends) and (opener is None or not self._extend(begins, [opener], begins, ends)):
                    self._cut_once(gap, begins, ends)
        # A template may write tools between the end of a message and the beginning of the next one.
        for gap, opener in openers.items():
            for (token, _, end), (following, begin, _) in zip(gap.tokens, gap.tokens[1:]):
                if following == opener and opener in begins and end == begin:
                    self._extend(ends, [token], begins, ends)
        return begins, ends

    def ids_of(self, tokens: set[str]) -> dict[str, int]:
        """Returns the ids of the tokens, which are in the token ids of prompts as the tokens are in the text."""
        try:
            ids = {each: self._tokenizer.convert_tokens_to_ids(each) for each in tokens}
        except Exception as error:  # engines have their own classes of tokenizers, which may lack methods
            raise _NotFound(f"{type(error).__name__}: {error}") from None
        for messages, text in self._rendered:
            try:
                prompt = np.asarray(self._render(messages, tokenize=True, return_dict=False)).reshape(-1).tolist()
            except Exception as error:
                raise _NotFound(f"{type(error).__name__}: {error}") from None
            wanted = [ids[each] for each in self._pattern.findall(text) if each in ids]
            if [each for each in prompt if each in ids.values()] != wanted:
                raise _NotFound(f"the token ids of prompts do not contain {', '.join(sorted(tokens))} as the text does")
        return ids

    def _add(self, roles: tuple[str, ...]) -> None:
        messages, texts = _conversation(roles)
        try:
            prompt = self._render(messages, tokenize=False)
        except Exception as error:  # a template is a program, which may fail
            self._refusal = self._refusal or f"{type(error).__name__}: {error}"
            return
        parts, position = [], 0
        for text in texts:
            begin = prompt.find(text, position)
            if begin < 0:
                return
            parts.append(prompt[position:begin])
            position = begin + len(text)
        self._rendered.append((messages, prompt))
        self._first.setdefault(roles[0], set()).update(self._pattern.findall(parts[0]))
        self._last.setdefault(roles[-1], set()).update(self._pattern.findall(prompt[position:]))
        for before, after, part in zip(roles, roles[1:], parts[1:]):
            tokens = tuple((each[0], each.start(), each.end()) for each in self._pattern.finditer(part))
            self._gaps.append(_Gap(before, after, part, tokens))

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, chat_template=self._template, **options)

    def _inside(self) -> set[str]:
        """Returns the tokens between an answer's reasoning and its text."""
        question, answer = {"role": "user", "content": "content0"}, {"role": "assistant", "content": "content1"}
        reasoning = dict.fromkeys(("reasoning", "reasoning_content"), "reasoning1")
        try:
            prompt = self._render([question, answer | reasoning], tokenize=False)
        except Exception:
            return set()
        between, found, _ = prompt.partition("reasoning1")[2].partition("content1")
        return set(self._pattern.findall(between)) if found else set()

    def _opener(self, gap: _Gap) -> str | None:
        """Returns the token with which the second message begins; None: the tokens are those of the first one."""
        first, last = self._first.get(gap.after), self._closing(gap)
        tokens = [token for token, *_ in gap.tokens if first is None or token in first]
        for token in tokens:
            if token not in last:
                return token
        # Some templates begin an answer after each message, also if none is requested.
        return tokens[0] if first is not None and tokens else None

    def _closing(self, gap: _Gap) -> set[str]:
        """Returns the tokens that end messages. Those after a call may also begin one, such as a second call."""
        return set[str]().union(
            *(last for role, last in self._last.items() if role not in _CALLS or role == gap.before)
        )

    def _cut_once(self, gap: _Gap, begins: set[str], ends: set[str]) -> bool:
        """Adds to `ends` a token that ends the first message, unless the gap has a boundary. Returns whether it has
        one."""
        if gap.cuts(begins, ends):
            return True
        every, last = [token for token, *_ in gap.tokens], self._closing(gap)
        tokens = [token for token in every if token in last] or every
        # An answer may begin with its reasoning, so the last token before its text may also be inside answers.
        return self._extend(ends, tokens if gap.after == "assistant" else reversed(tokens), begins, ends)

    def _extend(self, chosen: set[str], tokens: Iterable[str], begins: set[str], ends: set[str]) -> bool:
        """Adds the first of the tokens that adds no second boundary between any messages. `chosen`: `begins` or `ends`.
        Returns whether there is one."""
        before = [len(gap.cuts(begins, ends)) for gap in self._gaps]
        for token in tokens:
            if token in chosen:
                continue
            chosen.add(token)
            if all(len(gap.cuts(begins, ends)) <= max(1, count) for gap, count in zip(self._gaps, before)):
                return True
            chosen.discard(token)
        return False


def _conversation(roles: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns messages of these roles, and a text of each in their order: its content, or the name of its first
    call."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    names, results = ["other"], 0
    for number, role in enumerate(roles):
        text = f"content{number}"
        texts.append(text)
        if role in _CALLS:
            names, results = [text, "other"][: len(role) - 3], 0
            functions = [{"name": name, "arguments": {}} for name in names]
            calls = [{"id": f"callid{i:03}", "type": "function", "function": each} for i, each in enumerate(functions)]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif role == "tool":
            call = {"name": names[results], "tool_call_id": f"callid{results:03}"}
            messages.append({"role": "tool", "content": text, **call})
            results += 1
        else:
            messages.append({"role": role, "content": text})
    return messages, texts
