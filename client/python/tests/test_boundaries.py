# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts that declare none, found in tokens and in text."""

import os
import pathlib

import numpy as np
import pytest

import ashlar
from ashlar.boundaries import Boundaries, declared_boundaries
from ashlar.chat_template import MessageTokens

VECTORS = pathlib.Path(os.environ["ASHLAR_SOURCE"], "client/engine/testdata/segment_lengths.txt")


class Words:
    """A tokenizer of words; it begins each text with token 1."""

    all_special_tokens = ["<sep>"]

    def get_added_vocab(self):
        return {}

    def encode(self, text, add_special_tokens):
        words = [9 if word == "<sep>" else 100 + len(word) for word in text.split()]
        return [1, *words] if add_special_tokens else words


def vectors():
    lines = [line for line in VECTORS.read_text().splitlines() if not line.startswith("#")]
    return [[[int(each) for each in field.split()] for field in line.split("|")] for line in lines]


@pytest.mark.parametrize("tokens, separator, minimum, wanted", vectors())
def test_lengths_are_those_of_the_cpp_api(tokens, separator, minimum, wanted):
    assert ashlar.segment_lengths(tokens, separator, min_tokens=minimum[0]) == wanted


@pytest.mark.parametrize(
    "separator, messages, tokens, wanted",
    [
        ([9], None, [1] * 5 + [9] + [2] * 4 + [9] + [3] * 3, [6, 5]),
        ([9, 8], None, [1] * 5 + [9] + [2] * 4 + [9, 8] + [3], [12]),
        ([9], None, [1] * 5 + [9] + [2] * 4 + [9], [6]),  # the last token is always computed
        ([9], None, [1] * 20, []),
        ([9], None, [], []),
        ([], MessageTokens((7,)), [7] + [1] * 5 + [7] + [2] * 5 + [7, 3], [6, 6]),
        ([9], MessageTokens((7,)), [7] + [1] * 5 + [9] + [2] * 5 + [7, 3], [7, 5]),
        ([], MessageTokens((6, 7)), [6] + [1] * 5 + [7] + [2] * 5 + [6, 3], [6, 6]),
        ([], MessageTokens((7,), (8,)), [7] + [1] * 5 + [8] + [2] * 5 + [7, 3], [7, 5]),
        ([], MessageTokens((7,), (8,)), [7] + [1] * 5 + [8, 7] + [2] * 5 + [8], [7]),
        ([9], None, [1, 9, 1, 9] + [1] * 5 + [9, 1, 9, 3], [4, 6, 2]),  # short segments are only joined with short ones
    ],
)
def test_boundaries_are_found_in_tokens(separator, messages, tokens, wanted):
    assert Boundaries(separator, messages, 4).lengths(tokens) == wanted


def test_a_text_is_cut_at_a_separator_in_text():
    text = "one three <sep> two <sep> four five"
    tokens = [1, 103, 105, 9, 103, 9, 104, 104]
    assert ashlar.segment_lengths(text, "<sep>", tokenizer=Words()) == [4, 2]
    assert ashlar.segment_lengths(np.array(tokens), "<sep>", tokenizer=Words(), min_tokens=5) == [6]
    prompt = ashlar.Prompt.split(text, "<sep>", tokenizer=Words(), salt="mine")
    assert prompt.tokens.tolist() == tokens and prompt.lengths == [4, 2] and prompt.salt == "mine"
    with pytest.raises(ValueError, match="^separator: no tokens"):
        ashlar.segment_lengths(text, "", tokenizer=Words())
    with pytest.raises(TypeError, match="^tokens: a str of 35 characters was given; expected tokens, or also a token"):
        ashlar.segment_lengths(text, [9])


@pytest.mark.parametrize(
    "separator, ids", [("<sep>", None), ([105], None), ("three", [105]), ("# #", [101, 101]), (" ", [])]
)
def test_a_separator_that_is_no_special_token_is_named_in_a_warning(separator, ids, caplog):
    declared_boundaries(separator, "", Words())
    found = [record.getMessage() for record in caplog.records]
    beginning = f"Ashlar: segment_separator: {separator!r} has the token ids {ids}; expected one special or added token"
    assert len(found) == (ids is not None) and all(each.startswith(beginning) for each in found), found


def test_boundaries_are_declared_by_tokens_text_or_messages():
    tokens = [1] * 3 + [9] + [2] * 4
    for separator in ([9], np.array([9]), "<sep>"):
        assert declared_boundaries(separator, "", Words()).lengths(tokens) == [4]
    for nothing in ((), "", np.zeros(0, np.int32)):
        assert declared_boundaries(nothing, "", None) is None
    for separator, kind, name, error in (
        ("<sep>", "", "segment_separator", TypeError),
        ([-1], "", "segment_separator", ValueError),
        ((), "lines", "segment_boundaries", ValueError),
        ((), "messages", "segment_boundaries", ValueError),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            declared_boundaries(separator, kind, None)
