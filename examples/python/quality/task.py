# SPDX-License-Identifier: Apache-2.0
"""A task over several segments that needs both kinds of layers: recall of values that later segments overwrite, and
copying of phrases.

A segment holds assignments (a key, then its value), phrases (a name, then three words) and filler. A key may be assigned
in several segments: the last assignment counts, so a state that adds where it should erase gives wrong answers. The
query asks for keys' values and for phrases, and contains the answers: each answer's token is one prediction.
"""

from __future__ import annotations

import dataclasses
import random

KEYS, VALUES, NAMES, WORDS, FILLERS, PHRASE = 16, 12, 4, 12, 8, 3
ASK, COPY = 0, 1
FIRST_KEY = 2
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_NAME = FIRST_VALUE + VALUES
FIRST_WORD = FIRST_NAME + NAMES
FIRST_FILLER = FIRST_WORD + WORDS
VOCABULARY = FIRST_FILLER + FILLERS


@dataclasses.dataclass(frozen=True)
class Example:
    segments: list[list[int]]
    query: list[int]
    answers: list[int]  # positions in the query whose tokens follow from the tokens before them
    recalls: int  # this number of first answers are recalls, the rest is copying

    @property
    def tokens(self) -> list[int]:
        return [token for segment in [*self.segments, self.query] for token in segment]


def example(
    chance: random.Random, segments: int, length: int, keys: int, names: int, asked: int, copied: int
) -> Example:
    """`keys` keys are assigned once or twice, in random segments of `length` tokens each; each of `names` phrases
    occurs once."""
    items: list[list[list[int]]] = [[] for _ in range(segments)]
    value_of, phrase_of = {}, {}
    for key in chance.sample(range(FIRST_KEY, FIRST_KEY + KEYS), keys):
        for where in sorted(chance.sample(range(segments), min(segments, chance.choice((1, 2))))):
            value_of[key] = chance.randrange(FIRST_VALUE, FIRST_VALUE + VALUES)
            items[where].append([key, value_of[key]])
    for name in chance.sample(range(FIRST_NAME, FIRST_NAME + NAMES), names):
        phrase_of[name] = [chance.randrange(FIRST_WORD, FIRST_WORD + WORDS) for _ in range(PHRASE)]
        items[chance.randrange(segments)].append([name, *phrase_of[name]])
    texts = []
    for held in items:
        chance.shuffle(held)
        filler_tokens = length - sum(map(len, held))
        if filler_tokens < 0:
            raise ValueError(f"length: {length} tokens are too few; expected at least {length - filler_tokens}")
        gaps = sorted(chance.randrange(filler_tokens + 1) for _ in held)
        text: list[int] = []
        filled = 0
        for gap, item in zip(gaps, held, strict=True):
            text += [chance.randrange(FIRST_FILLER, VOCABULARY) for _ in range(gap - filled)]
            filled = gap
            text += item
        text += [chance.randrange(FIRST_FILLER, VOCABULARY) for _ in range(length - len(text))]
        texts.append(text)
    query, answers = [], []
    for key in chance.sample(sorted(value_of), min(asked, len(value_of))):
        query += [ASK, key, value_of[key]]
        answers.append(len(query) - 1)
    recalls = len(answers)
    for name in chance.sample(sorted(phrase_of), min(copied, len(phrase_of))):
        query += [COPY, name, *phrase_of[name]]
        answers += range(len(query) - PHRASE, len(query))
    return Example(texts, query, answers, recalls)
