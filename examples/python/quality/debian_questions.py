# SPDX-License-Identifier: Apache-2.0
"""Writes prompts for ashlar-eval from the documentation of this machine's Debian packages.

    python3 examples/python/quality/debian_questions.py prompts.jsonl
    ashlar-eval --model MODEL --prompts prompts.jsonl --chat --json figures.json

A prompt has passages of several packages, in a random order, and asks for the second half of a sentence of one of them.
Passages occur in several prompts, as documents do in a service.
"""

import argparse
import gzip
import json
import pathlib
import random
import re

WORDS = range(70, 110)  # in a passage
SENTENCE = range(12, 30)  # words in the sentence that is asked for


def text_of(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", errors="ignore") as file:
        return file.read()


def passage_of(path):
    """The first paragraphs of prose that have enough words together; None: there are none."""
    words = []
    for paragraph in re.split(r"\n\s*\n", text_of(path)):
        letters = sum(letter.isalpha() or letter.isspace() for letter in paragraph)
        if len(paragraph.split()) >= 12 and letters > 0.93 * len(paragraph):
            words += paragraph.split()
        if len(words) >= WORDS.start:
            return " ".join(words[: WORDS.stop])
    return None


def sentence_of(passage):
    sentences = re.findall(r"(?<=[.!?] )[A-Z][^.!?]+(?=\.)", passage)
    return next((each for each in sentences if len(each.split()) in SENTENCE), None)


def documents(root):
    """(package, passage, sentence) of one file per package; packages of one source often have the same."""
    found = {}
    for path in sorted(root.glob("*/README*")):
        package = path.parent.name
        if path.is_file() and package not in {each[0] for each in found.values()}:
            passage = passage_of(path)
            sentence = sentence_of(passage) if passage else None
            if sentence:
                found.setdefault(passage, (package, passage, sentence))
    return list(found.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--root", type=pathlib.Path, default="/usr/share/doc")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--passages", type=int, default=4, help="of a prompt (%(default)s)")
    parser.add_argument("--prompts", type=int, default=24)
    options = parser.parse_args()
    chance = random.Random(0)
    known = documents(options.root)
    if len(known) < options.passages:
        parser.error(
            f"--root: {len(known)} usable passages; expected {options.passages} or more; install documentation"
        )
    known = chance.sample(known, min(options.documents, len(known)))
    with open(options.file, "w") as file:
        for _ in range(options.prompts):
            chosen = chance.sample(known, options.passages)
            package, _, sentence = chance.choice(chosen)
            words = sentence.split()
            half = len(words) // 2
            prompt = {
                "segments": [f"Documentation of {name}: {passage}\n\n" for name, passage, _ in chosen],
                "question": f"Complete this sentence of the documentation of {package} as it is written there: "
                f"{' '.join(words[:half])}",
                "answers": [" ".join(words[half:])],
            }
            file.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
