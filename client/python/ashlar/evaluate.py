# SPDX-License-Identifier: Apache-2.0
"""Measures what reusing segments costs and saves, for a model of Transformers and your own prompts.

    ashlar-eval --model MODEL --prompts prompts.jsonl --json figures.json

Each line of the file is `{"segments": ["…", …], "question": "…", "answers": ["…", …]}`; `answers` may be missing. The
ways are full prefill; segments composed at several seam widths; `naive`: separately computed segments without seams,
whose states are added without transitions; `keys`: keys and values of separately computed segments, without their
states; `prefix`: the prompt is resumed after its first segment, whose exact states are stored unrounded. Figures of each
way:

- `loss`: next-token loss of the question and the first answer (full prefill's own answer, if none is given)
- `kl`: KL divergence of these tokens' distributions from those of full prefill
- `agreement`: greedy answers that equal full prefill's
- `f1`, `rouge_l`: of the greedy answer, compared with the best of `answers`
- `reused`: the fraction of the prompt's tokens that came from the cache
- `ttft_ms`: time to first token, with the segments in the cache

Each figure is a mean over prompts with a 95 % interval (bootstrap). It starts a private daemon. A temporary file, in the
folder TMPDIR, holds full prefill's logits: for each prompt, one number of the model's type for each token of the
vocabulary and of the question and answer. Exit status: 2 if an option, a prompt or the model cannot be used; 1 if the
daemon does not start, a prompt ran without the cache, or the temporary file cannot be written; 130 if it is
interrupted: the figures of the finished ways are printed, and FILE is not written.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import errno
import io
import json
import os
import pathlib
import re
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import torch
import transformers

import ashlar.daemon
from ashlar.model import Linear
from ashlar.prompt import Prompt
from ashlar.transformers import attach, cache_for
from ashlar.transformers.assembly import Assembler
from ashlar.transformers.model import weights_digest
from ashlar.transformers.model_cache import ModelCache

METRICS = ("loss", "kl", "agreement", "f1", "rouge_l", "reused", "ttft_ms")
FULL, NAIVE, KEYS, PREFIX = "full", "naive", "keys", "prefix"
_RESAMPLES = 2000
_MARK = "\ue000"  # takes the place of a prompt's text while the chat template is rendered
_MOST_TOKENS = 1 << 20  # largest number of tokens in an option
_MESSAGE = 300  # characters of a message of Transformers
_TMPDIR = "set TMPDIR to a folder with more space"
_SUPPORTED = (
    "decoders with attention (also sliding windows), gated delta nets, KDA, Mamba-1, Mamba-2 or lightning attention, which "
    "run on a DynamicCache of Transformers"
)


class BadInput(ValueError):
    """The message begins with the option, or the line of the prompts, that cannot be used."""


class Failed(RuntimeError):
    """The evaluation cannot continue, for a reason that is not in the options."""


class Skipped(Failed):
    """A prompt ran without the cache, so its figures would be those of full prefill."""


@dataclasses.dataclass(frozen=True)
class Question:
    where: str  # file and line, for messages
    segments: list[list[int]]  # token ids
    query: list[int]
    answers: list[str]
    answer: list[int]  # token ids of the first of `answers`; empty: full prefill's own answer is the reference

    @property
    def text(self) -> list[int]:
        return [*sum(self.segments, []), *self.query]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one way for one prompt."""

    logits: torch.Tensor  # logits of the query's and the reference answer's tokens
    answer: list[int]
    seconds: float  # time to first token
    reused: float = 0.0  # fraction of the prompt


class _Logits:
    """Logits of full prefill by prompt, in a file: those of all prompts may exceed the memory."""

    def __init__(self, file: io.RawIOBase, prompts: int) -> None:
        self._file, self._prompts = file, prompts
        self._stored: list[tuple[int, torch.Size, torch.dtype]] = []  # position in the file, shape, type
        self._end = 0  # bytes

    def append(self, logits: torch.Tensor) -> None:
        """Failed: the file cannot be written."""
        left = memoryview(logits.contiguous().flatten().view(torch.uint8).numpy())
        begin = self._end
        try:
            self._file.seek(begin)
            while left:
                count = self._file.write(left) or 0
                self._end, left = self._end + count, left[count:]
        except OSError as error:
            raise Failed(
                f"{tempfile.gettempdir()}: {error.strerror}, after {self._end / 1e9:.1f} GB of logits, at prompt "
                f"{len(self._stored) + 1} of {self._prompts}; {_TMPDIR}"
            ) from error
        self._stored.append((begin, logits.shape, logits.dtype))

    def __getitem__(self, prompt: int) -> torch.Tensor:
        begin, shape, dtype = self._stored[prompt]
        self._file.seek(begin)
        found = np.fromfile(self._file, np.uint8, shape.numel() * dtype.itemsize)
        return torch.from_numpy(found).view(dtype).view(shape)


class _Naive(Assembler):
    def compose(self, request: Any, place: Any, step: Any, state: torch.Tensor) -> None:
        """Adds the segment's state, and leaves its transition out."""
        alone = torch.zeros_like(state)
        super().compose(request, place, step, alone)
        state += alone


class _KeysAlone(Assembler):
    def compose(self, request: Any, place: Any, step: Any, state: torch.Tensor) -> None:
        """Leaves a linear layer's state as if the segment did not exist."""


class _FirstToken:
    """A streamer that records the time of the first token: `generate` passes the prompt, then each token."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: Any) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass


class Progress:
    """The line of a terminal that shows how far the evaluation is. Shows nothing on other streams."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._began = time.monotonic()

    def show(self, text: str) -> None:
        if self._stream is not None:
            minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
            self._stream.write(f"\r\x1b[K[{minutes}:{seconds:02}] {text}")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def read_prompts(path: pathlib.Path, tokenizer: Any, chat: bool, limit: int | None) -> list[Question]:
    """BadInput names the line and the field that are wrong."""
    before, after = _around(tokenizer) if chat else ("", "")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # a text may contain other line breaks
    except OSError as error:
        raise BadInput(f"--prompts: {path}: {error.strerror}") from error
    bos = tokenizer.bos_token_id
    begins = [bos] if not chat and bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(questions) >= limit:
            break
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            given = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: {error}; expected a JSON object") from error
        wrong = _wrong(given)
        if wrong is not None:
            raise BadInput(f"{where}: {wrong}")
        rows = [_encoded(where, f"segments[{i}]", text, tokenizer) for i, text in enumerate(given["segments"])]
        if before:
            rows.insert(0, _encoded(where, "the chat template", before, tokenizer))
        rows[0] = [*begins, *rows[0]]
        query = _encoded(where, "question", given["question"] + after, tokenizer)
        answers = given.get("answers", [])
        answer = _encoded(where, "answers[0]", answers[0], tokenizer) if answers else []
        questions.append(Question(where, rows, query, answers, answer))
    if not questions:
        raise BadInput(f"--prompts: {path}: no prompts; expected one JSON object per line")
    return questions


def _encoded(where: str, field: str, text: str, tokenizer: Any) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise BadInput(f"{where}: {field}: no tokens; expected a text that the model's tokenizer knows")
    return tokens


def _wrong(given: Any) -> str | None:
    if not isinstance(given, dict):
        return f"{type(given).__name__}; expected a JSON object"
    for name, expected in (("segments", "a list of at least one text"), ("answers", "a list of texts")):
        texts = given.get(name, [])
        if not isinstance(texts, list):
            return f"{name}: {type(texts).__name__}; expected {expected}"
        if name == "segments" and not texts:
            return f"{name}: {'empty' if name in given else 'missing'}; expected {expected}"
        for i, text in enumerate(texts):
            if (found := _no_text(text)) is not None:
                return f"{name}[{i}]: {found}; expected a text"
    found = _no_text(given["question"]) if "question" in given else "missing"
    return None if found is None else f"question: {found}; expected a text"


def _no_text(given: Any) -> str | None:
    """Returns what was given in place of a text, or None if it is one."""
    if not isinstance(given, str):
        return type(given).__name__
    try:
        given.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None if given else "empty"


def check_sizes(questions: list[Question], config: Any, answer_tokens: int) -> None:
    """BadInput: a prompt with its answer is longer than the model's maximum, or its tokens are not the model's."""
    text = config.get_text_config(decoder=True)
    most, vocabulary = getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)
    for question in questions:
        count = len(question.text) + max(answer_tokens, len(question.answer))
        if isinstance(most, int) and count > most > 0:
            raise BadInput(f"{question.where}: {count} tokens with the answer; the model takes at most {most}")
        largest = max([*question.text, *question.answer])
        if isinstance(vocabulary, int) and largest >= vocabulary:
            raise BadInput(
                f"--model: its tokenizer has token {largest} ({question.where}); the model has {vocabulary} tokens"
            )


def _around(tokenizer: Any) -> tuple[str, str]:
    """Returns the text that the chat template writes before and after the user's message."""
    message = [{"role": "user", "content": _MARK}]
    try:
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it wants
        raise BadInput(f"--chat: {_sentence(error)}; leave the option out") from error
    before, found, after = rendered.partition(_MARK)
    if not found:
        raise BadInput("--chat: the chat template does not write the user's message; leave the option out")
    return before, after


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _start_error(error: BaseException) -> str:
    """Returns the first line of a message of `ashlar.daemon.start`, and the last one, which is the log's."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{tempfile.gettempdir()}: {error.strerror}; {_TMPDIR}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip(":")


def _sentence(error: BaseException) -> str:
    """Returns the first sentence of a message of Transformers."""
    return re.split(r"[.!]\s", _one_line(error) + " ", maxsplit=1)[0][:_MESSAGE]


def words(text: str) -> list[str]:
    """Splits an answer as SQuAD compares answers: without case, punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _harmonic(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if common else float(found == wanted == 0)


def f1(answer: str, wanted: str) -> float:
    found, right = words(answer), words(wanted)
    common = collections.Counter(found) & collections.Counter(right)
    return _harmonic(sum(common.values()), len(found), len(right))


def rouge_l(answer: str, wanted: str) -> float:
    """Returns the F-measure of the longest common subsequence of words."""
    found, right = words(answer), words(wanted)
    row = [0] * (len(right) + 1)
    for word in found:
        before = row[:]
        for i, other in enumerate(right):
            row[i + 1] = before[i] + 1 if word == other else max(before[i + 1], row[i])
    return _harmonic(row[-1], len(found), len(right))


class Evaluation:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        questions: list[Question],
        answer_tokens: int,
        progress: Progress,
        file: io.RawIOBase,
        **options: Any,
    ) -> None:
        """`file`: for logits. `options`: of `cache_for`."""
        self.model, self.tokenizer, self.questions, self.options = model, tokenizer, questions, options
        self.answer_tokens, self.progress = answer_tokens, progress
        longest = max(len(each.text) + len(each.answer) for each in questions)
        self.capacity_tokens = longest + answer_tokens + 256
        progress.show("hashing the weights")
        self.digest = weights_digest(model)
        self.answers: list[list[int]] = []  # of full prefill
        self.logits = _Logits(file, len(questions))
        self.figures: dict[str, dict[str, list[float]]] = {}

    def cache(self, daemon: Any, **options: Any) -> ModelCache:
        options = self.options | options
        return cache_for(self.model, daemon, tokens=self.capacity_tokens, weights_digest=self.digest, **options)

    def _generate(self, prompt: Any) -> tuple[list[int], float]:
        count = len(prompt.tokens) if isinstance(prompt, Prompt) else prompt.shape[1]
        streamer, began = _FirstToken(), time.perf_counter()
        output = self.model.generate(
            prompt, max_new_tokens=self.answer_tokens, do_sample=False, streamer=streamer, pad_token_id=self._pad()
        )
        return output[0, count:].tolist(), streamer.puts[1] - began

    def _pad(self) -> int | None:
        ends = self.model.generation_config.eos_token_id
        return ends[0] if isinstance(ends, list) else ends

    def _each(self, name: str) -> Iterator[tuple[int, Question]]:
        for i, question in enumerate(self.questions):
            self.progress.show(f"{name}: prompt {i + 1} of {len(self.questions)}")
            yield i, question

    def prefill(self) -> None:
        """Runs full prefill without a cache. Its own answer is the reference if the prompt has none."""
        for i, question in self._each(FULL):
            answer, seconds = self._generate(torch.tensor([question.text], device=self.model.device))
            reference = question.answer or answer
            ids = torch.tensor([[*question.text, *reference]], device=self.model.device)
            with torch.no_grad():
                logits = self.model(ids, logits_to_keep=len(question.query) + len(reference)).logits[0]
            outcome = Outcome(logits.cpu(), answer, seconds)
            self.answers.append(answer)
            self.logits.append(outcome.logits)
            self._add(FULL, i, outcome)

    def composed(self, name: str, daemon: Any, head: int, tail: int, assembler: type[Assembler] = Assembler) -> None:
        """Measures one way with all segments of a prompt in the cache."""
        cache = self.cache(daemon, head=head, tail=tail)
        with cache:
            with attach(self.model, cache, assembler=assembler) as reuse, torch.no_grad():
                for i, question in self._each(name):
                    prompt = Prompt(question.segments, [*question.query, *self._reference(i)])
                    logits = self.model(prompt).logits[0].cpu()
                    self._reused(reuse, question)
                    answer, seconds = self._generate(Prompt(question.segments, question.query))
                    outcome = Outcome(logits, answer, seconds, self._reused(reuse, question))
                    self._add(name, i, outcome)

    def prefix(self, daemon: Any) -> None:
        """Measures exact reuse of only the first segment of each prompt."""
        # In engines, only tuples have another type than the states of the model.
        cache = self.cache(daemon, segment_dtype="float32")
        with cache:
            with attach(self.model, cache) as reuse, torch.no_grad():
                for i, question in self._each(PREFIX):
                    # A run stores states of the whole prompt, which the next one must not find.
                    salts = [f"prefix {i} {run}" for run in ("logits", "answer")]
                    for salt in salts:
                        first = Prompt([], question.segments[0], salt=salt)
                        self.model.generate(first, max_new_tokens=1, pad_token_id=self._pad())
                    text, reference = question.text, self._reference(i)
                    whole = Prompt([], [*text, *reference], salt=salts[0])
                    logits = self.model(whole, logits_to_keep=len(question.query) + len(reference)).logits[0]
                    self._reused(reuse, question)
                    answer, seconds = self._generate(Prompt([], text, salt=salts[1]))
                    outcome = Outcome(logits.cpu(), answer, seconds, self._reused(reuse, question))
                    self._add(PREFIX, i, outcome)

    def _reference(self, i: int) -> list[int]:
        return self.questions[i].answer or self.answers[i]

    @staticmethod
    def _reused(reuse: Any, question: Question) -> float:
        """Returns the reused fraction of the last prompt."""
        last = reuse.last
        if last.fault or last.skip_reason:
            raise Skipped(f"{question.where}: the prompt ran without the cache: {last.fault or last.skip_reason}")
        return float(last.cached_tokens / last.tokens)

    def _add(self, way: str, i: int, found: Outcome) -> None:
        question, figures = self.questions[i], self.figures.setdefault(way, {name: [] for name in METRICS})
        text = torch.tensor([*question.query, *self._reference(i)])
        real, other = (logits[:-1].double().log_softmax(-1) for logits in (self.logits[i], found.logits))
        figures["loss"].append(float(-other.gather(1, text[1:, None]).mean()))
        figures["kl"].append(float((real.exp() * (real - other)).sum(-1).mean()))
        figures["agreement"].append(float(found.answer == self.answers[i]))
        figures["reused"].append(found.reused)
        figures["ttft_ms"].append(1000 * found.seconds)
        if question.answers:
            answer = self.tokenizer.decode(found.answer, skip_special_tokens=True)
            figures["f1"].append(max(f1(answer, each) for each in question.answers))
            figures["rouge_l"].append(max(rouge_l(answer, each) for each in question.answers))

    def row(self, way: str, head: int, tail: int) -> dict[str, Any]:
        means = {metric: interval(values) for metric, values in self.figures[way].items() if values}
        return {"way": way, "seam_head": head, "seam_tail": tail, **means}


def interval(values: list[float]) -> dict[str, float]:
    """Returns the mean, and the 95 % interval of means of samples drawn from the values."""
    chance = np.random.default_rng(0)
    means = np.array(values)[chance.integers(0, len(values), (_RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high)}


def evaluate(
    model: Any,
    tokenizer: Any,
    questions: list[Question],
    daemon: Any,
    widths: list[int],
    answer_tokens: int,
    progress: Progress,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yields each way's row when it is finished: {"way", "seam_head", "seam_tail", and the mean and interval of each
    metric}. `options`: of `cache_for`. BadInput: the model is not supported. Failed: a prompt ran without the cache, or
    the temporary file cannot be written."""
    with tempfile.TemporaryFile(buffering=0) as file:
        evaluation = Evaluation(model, tokenizer, questions, answer_tokens, progress, file, **options)
        try:
            with evaluation.cache(daemon) as cache:
                linear = [layer for layer in cache.model.layers if isinstance(layer, Linear)]
        except (ValueError, ImportError) as error:
            kind = type(model).__name__
            raise BadInput(f"--model: {kind} is not supported: {_one_line(error)}; supported: {_SUPPORTED}") from error
        # The inputs of a convolution are always recomputed.
        least = max([layer.conv_kernel - 1 for layer in linear if layer.conv_kernel > 0], default=0)
        evaluation.prefill()
        yield evaluation.row(FULL, 0, 0)
        for width in widths:
            name, head = f"composed {width}", max(width, least)
            evaluation.composed(name, daemon, head, width)
            yield evaluation.row(name, head, width)
        for name, assembler in ((NAIVE, _Naive), (KEYS, _KeysAlone)):
            if not linear and "composed 0" in evaluation.figures:  # a model without states gives the same result
                evaluation.figures[name] = evaluation.figures["composed 0"]
            else:
                evaluation.composed(name, daemon, least, 0, assembler)
            yield evaluation.row(name, least, 0)
        evaluation.prefix(daemon)
        yield evaluation.row(PREFIX, 0, 0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["way", *METRICS]]
    for row in rows:
        cells = [row.get(metric) for metric in METRICS]
        texts = ["" if c is None else f"{c['mean']:.4g} [{c['low']:.4g}, {c['high']:.4g}]" for c in cells]
        lines.append([row["way"], *texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _widths(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(_count(part, 0) for part in text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or several, separated by commas") from error


def _count(text: str, least: int = 1) -> int:
    if not text.strip().isdecimal() or not least <= int(text) <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} was given; expected a whole number from {least} to {_MOST_TOKENS}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ashlar-eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, or name on Hugging Face")
    parser.add_argument("--prompts", required=True, type=pathlib.Path, metavar="FILE", help="JSON Lines")
    parser.add_argument("--widths", type=_widths, default="0,4,8,16,32", help="seam widths, in tokens (%(default)s)")
    parser.add_argument("--answer-tokens", type=_count, default=32, metavar="N", help="of greedy answers (%(default)s)")
    parser.add_argument("--limit", type=_count, metavar="N", help="use only the first N prompts")
    parser.add_argument("--chat", action="store_true", help="put the texts into the model's chat template")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="of the model; auto: the checkpoint's; vLLM runs float32 checkpoints in 16 bits (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--segment-dtype", default="float16", choices=("float32", "float16"),
        help="of stored tuples; the default is that of vLLM, and in Transformers it is float32 (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="as of Transformers: run the checkpoint's code"
    )
    parser.add_argument("--device", default="cpu", help="of the model (%(default)s)")
    parser.add_argument("--dram", default="2GiB", metavar="SIZE", help="of the daemon (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the figures to this file")
    return parser


def _load(kind: Any, given: argparse.Namespace, hint: str, **options: Any) -> Any:
    """Loads a part of the model with one of Transformers' Auto classes."""
    try:
        return kind.from_pretrained(given.model, trust_remote_code=given.trust_remote_code, **options)
    except Exception as error:  # files of checkpoints, and their own code, raise anything
        if not given.trust_remote_code and "trust_remote_code" in str(error):
            hint = "if you trust the checkpoint's own code, add --trust-remote-code"
        raise BadInput(f"--model: {given.model}: {_sentence(error)}; {hint}") from error


def _check_json(path: pathlib.Path) -> None:
    """BadInput: the file cannot be written."""
    if path.is_dir():
        raise BadInput(f"--json: {path} is a folder; expected a file")
    if not path.parent.is_dir():
        raise BadInput(f"--json: {path.parent} is not a folder; create it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"--json: {path} cannot be written")


def _write(path: pathlib.Path, text: str) -> None:
    """Writes the whole file, or nothing."""
    if path.exists() and not path.is_file():
        path.write_text(text)  # a device or a pipe
        return
    path = path.resolve()
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _run(given: argparse.Namespace, progress: Progress) -> None:
    if given.json:
        _check_json(given.json)
    try:
        torch.zeros(1, device=given.device).item()
    except Exception as error:  # each backend of torch raises what it wants
        raise BadInput(f"--device: {given.device}: {_one_line(error)}") from error
    if given.model.startswith(("/", "./", "../")) and not os.path.isdir(given.model):
        raise BadInput(f"--model: {given.model}: no such folder")
    progress.show("loading the model")
    version = transformers.__version__
    hint = f"expected a folder, or a name on Hugging Face, with a model that Transformers {version} knows"
    config = _load(transformers.AutoConfig, given, hint)
    tokenizer = _load(transformers.AutoTokenizer, given, "expected a tokenizer beside the model")
    questions = read_prompts(given.prompts, tokenizer, given.chat, given.limit)
    check_sizes(questions, config, given.answer_tokens)
    hint = f"model type: {config.model_type}; supported: {_SUPPORTED}"
    model = _load(transformers.AutoModelForCausalLM, given, hint, dtype=given.dtype)
    try:
        model = model.eval().to(given.device)
    except Exception as error:  # as above
        raise BadInput(f"--device: {given.device}: {_one_line(error)}") from error
    try:
        daemon = ashlar.daemon.start(dram=given.dram)
    except (OSError, RuntimeError) as error:
        message = _start_error(error)
        if "dram." in message:  # of the daemon's configuration
            raise BadInput(f"--dram: {given.dram}: {message}") from error
        raise Failed(message) from error
    options = {"segment_dtype": given.segment_dtype}
    rows: list[dict[str, Any]] = []
    with daemon:
        try:
            for row in evaluate(
                model, tokenizer, questions, daemon, given.widths, given.answer_tokens, progress, **options
            ):
                rows.append(row)
        except KeyboardInterrupt:
            progress.clear()
            if rows:
                print(table(rows))
            raise
    progress.clear()
    print(table(rows))
    if given.json:
        dtype = str(model.dtype).removeprefix("torch.")
        figures = {"model": given.model, "dtype": dtype, **options, "prompts": len(questions), "ways": rows}
        try:
            _write(given.json, json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--json: {given.json}: {error.strerror}") from error


def main(words_given: list[str] | None = None) -> None:
    parser, progress = _parser(), Progress(sys.stderr)
    given = parser.parse_args(words_given)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        _run(given, progress)
    except (BadInput, Failed) as error:
        progress.clear()
        parser.exit(2 if isinstance(error, BadInput) else 1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        progress.clear()
        parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
