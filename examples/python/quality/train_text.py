# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model on Debian's documentation, and writes prompts for ashlar-eval from texts that are not in
its training data.

    python3 examples/python/quality/train_text.py build/text-model
    ashlar-eval --model build/text-model --prompts build/text-model/prompts.jsonl --json figures.json

The model has the layers of Qwen3-Next, without experts: 8 layers, of which 2 are attention, 7.6 million weights. A row
of its training has passages of several documents, and then quotes of them: each names a package, and repeats a sentence
of its passage. A prompt has the same form, and asks for the second half of a quote.

The documentation comes from Debian's archive: `apt-get download`, without installing anything. The script saves the model
after every 100 steps. --resume starts a new run of --steps steps with the saved model's weights.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import json
import math
import pathlib
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

import tokenizers
import torch
import train
import transformers

PACKAGES = (
    "apache2-doc debian-faq debian-handbook debian-policy debian-reference-en developers-reference git-doc "
    "installation-guide-amd64 maint-guide postgresql-doc-15 python3.11-doc"
).split()
HELD_OUT = 0.05  # fraction of the documents
VOCABULARY = 4096
PASSAGE = range(64, 224)  # tokens
SENTENCE = range(10, 28)  # words of a quote
RATE = 2e-3
COMMON = frozenset("the of to and a is in for that be".split())


class _Paragraphs(html.parser.HTMLParser):
    """Collects the prose of a page: its paragraphs, items of lists, and definitions."""

    BLOCKS = frozenset(("p", "li", "dd"))
    OTHERS = frozenset(("ul", "ol", "dl", "dt", "pre", "table", "h1", "h2", "h3", "h4", "h5", "h6"))

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []  # blocks that contain the current place, outermost first
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self.BLOCKS | self.OTHERS:
            self._end()
            # HTML closes a paragraph at the next block, and an item or a definition at the next of its kind.
            closed = ("p", "dd", "dt") if tag in ("dd", "dt") else ("p", tag)
            while self._open and self._open[-1] in closed:
                self._open.pop()
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS | self.OTHERS:
            self._end()
            if tag in self._open:
                while self._open.pop() != tag:
                    pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.BLOCKS:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        text = " ".join("".join(self._text).split())
        self._text = []
        words = text.lower().split()
        is_english = text.isascii() and sum(word in COMMON for word in words) > 0.12 * len(words)
        if len(words) >= 12 and is_english:
            self.found.append(text)


def download(folder: pathlib.Path) -> None:
    """Creates the folder with the unpacked packages. CalledProcessError if the archive lacks one or cannot be reached;
    then the folder does not exist."""
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    subprocess.run(["apt-get", "-qq", "download", *PACKAGES], cwd=partial, check=True)
    for package in sorted(partial.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package.name, package.name.partition("_")[0]], cwd=partial, check=True)
        package.unlink()
    partial.rename(folder)


def documents(folder: pathlib.Path) -> list[tuple[str, list[str]]]:
    """Returns (package, paragraphs) of each page. A paragraph occurs once in all pages."""
    known: set[bytes] = set()
    pages = []
    for package in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in sorted(package.rglob("*.html*")):
            if not path.is_file() or path.is_symlink():
                continue
            with (
                gzip.open(path, "rt", errors="ignore") if path.suffix == ".gz" else open(path, errors="ignore") as file
            ):
                reader = _Paragraphs()
                reader.feed(file.read())
                reader.close()
            paragraphs = []
            for text in reader.found:
                digest = hashlib.sha256(text.encode()).digest()
                if digest not in known:
                    known.add(digest)
                    paragraphs.append(text)
            if paragraphs:
                pages.append((package.name.removesuffix("-doc"), paragraphs))
    return pages


def train_tokenizer(pages: list[tuple[str, list[str]]]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, paragraphs in pages for text in paragraphs), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def config() -> transformers.Qwen3NextConfig:
    """Twice three gated delta nets and an attention layer."""
    return train.config(
        vocab_size=VOCABULARY,
        intermediate_size=640,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        mlp_only_layers=list(range(8)),
        partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        max_position_embeddings=16384,
        eos_token_id=0,
        pad_token_id=0,
    )


class Texts:
    """Passages, and rows of several passages with quotes of them."""

    def __init__(self, pages: list[tuple[str, list[str]]], tokenizer: transformers.PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pages = [(package, [*self._split(paragraphs)]) for package, paragraphs in pages]
        self.pages = [page for page in self.pages if page[1]]

    def _split(self, paragraphs: list[str]) -> Iterator[str]:
        """Yields passages: whole paragraphs together, of PASSAGE.start to PASSAGE.stop tokens."""
        text, count = "", 0
        for paragraph in paragraphs:
            tokens = len(self.tokenize(paragraph))
            if count + tokens > PASSAGE.stop:
                if count >= PASSAGE.start:
                    yield text
                text, count = "", 0
            if tokens <= PASSAGE.stop:
                text, count = f"{text} {paragraph}".strip(), count + tokens
        if count >= PASSAGE.start:
            yield text

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def sentences(self, passage: str) -> list[str]:
        """Returns the sentences of a passage that can be quoted."""
        sentences = re.findall(r"(?:^|(?<=[.!?] ))[A-Z][^.!?]+\.", passage)
        return [each for each in sentences if len(each.split()) in SENTENCE]

    def prompt(self, chance: random.Random, passages: int) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Returns the segments, and (introduction, first half, second half) of the quotes."""
        segments, quotes = [], []
        for package, found in chance.sample(self.pages, passages):
            passage = chance.choice(found)
            segments.append(f"Documentation of {package}: {passage}\n\n")
            if sentences := self.sentences(passage):
                words = chance.choice(sentences).split()
                half = len(words) // 2
                quotes.append((f"From {package}: ", " ".join(words[:half]), f" {' '.join(words[half:])}"))
        chance.shuffle(quotes)
        return segments, quotes

    def row(self, chance: random.Random, tokens: int) -> list[int]:
        segments, quotes = self.prompt(chance, chance.randint(2, 4))
        row = sum((self.tokenize(each) for each in segments), [])
        # Quotes repeat, so that most of the row's rest is determined by its passages.
        while quotes and len(row) < tokens:
            for introduction, first, second in quotes:
                row += [*self.tokenize(introduction + first), *self.tokenize(second + "\n")]
        return (row + self.row(chance, tokens))[:tokens] if len(row) < tokens else row[:tokens]


def loss_of(model: transformers.PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def fit(model: transformers.PreTrainedModel, texts: Texts, given: argparse.Namespace) -> None:
    chance = random.Random(given.seed)
    model.train()
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    begun, mean = time.monotonic(), 0.0
    for step in range(1, given.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / 50, 0.05 + 0.475 * (1 + math.cos(math.pi * step / given.steps)))
        rows = torch.tensor([texts.row(chance, given.tokens) for _ in range(given.rows)])
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if step == 1 else mean + 0.05 * (loss.item() - mean)
        if step % 10 == 0:
            seconds = time.monotonic() - begun
            print(f"{seconds:.0f} s, step {step} of {given.steps}, loss {mean:.3f}", flush=True)
        if step % 100 == 0 or step == given.steps:
            model.save_pretrained(given.folder)


def write_prompts(texts: Texts, path: pathlib.Path, passages: int, count: int, seed: int) -> None:
    chance = random.Random(seed)
    lines: list[str] = []
    if not any(texts.sentences(passage) for _, found in texts.pages for passage in found):
        raise SystemExit(f"none of the {len(texts.pages)} held-out pages has a sentence to quote; add documentation")
    while len(lines) < count:
        segments, quotes = texts.prompt(chance, passages)
        if quotes:
            introduction, first, second = quotes[0]
            lines.append(json.dumps({"segments": segments, "question": introduction + first, "answers": [second]}))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=pathlib.Path, help="folder of the model; its subfolder packages has the documentation"
    )
    parser.add_argument("--steps", type=int, default=1200, help="number of training steps (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="number of rows per step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=640, help="number of tokens per row (%(default)s)")
    parser.add_argument("--passages", type=int, default=4, help="number of passages per prompt (%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="seed of the weights and of the rows (%(default)s)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="start with the weights in the folder; give another --seed, because the same one repeats the rows",
    )
    given = parser.parse_args()
    sources = given.folder / "packages"
    if not sources.is_dir():
        download(sources)
    pages = documents(sources)
    random.Random(0).shuffle(pages)
    held_out = math.ceil(HELD_OUT * len(pages))
    tokenizer = train_tokenizer(pages[held_out:])
    tokenizer.save_pretrained(given.folder)
    texts = Texts(pages[held_out:], tokenizer)
    passages = [passage for _, found in texts.pages for passage in found]
    print(
        f"{len(texts.pages)} documents, {sum(map(len, passages)) / 1e6:.1f} MB in {len(passages)} passages", flush=True
    )
    held_texts = Texts(pages[:held_out], tokenizer)
    if len(held_texts.pages) < given.passages:
        raise SystemExit(
            f"--passages: {given.passages}; only {len(held_texts.pages)} of {len(pages)} pages are held out with passages; "
            "set a lower number"
        )
    write_prompts(held_texts, given.folder / "prompts.jsonl", given.passages, given.prompts, 1)
    torch.manual_seed(given.seed)
    if given.resume:
        model = transformers.Qwen3NextForCausalLM.from_pretrained(given.folder)
    else:
        model = transformers.Qwen3NextForCausalLM(config())
        train.remember(model, longest=2e3)
    print(f"{sum(weight.numel() for weight in model.parameters())} weights", flush=True)
    fit(model, texts, given)


if __name__ == "__main__":
    main()
