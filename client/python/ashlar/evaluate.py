# SPDX-License-Identifier: Apache-2.0
"""Measures what reusing segments costs and saves, for a model of Transformers and your own prompts.

    ashlar-eval --model FOLDER --prompts prompts.jsonl --json figures.json

Each line of the file is `{"segments": ["…", …], "question": "…", "answers": ["…", …]}`; `answers` may be missing. The
ways are full prefill; segments composed at several seam widths; `naive`: separately computed segments without seams,
whose states are added without transitions; `keys`: keys and values of separately computed segments, without their
states; `prefix`: only the first segment comes from the cache. Figures of each way:

- `loss`: next-token loss of the question and the first answer (full prefill's own answer, if none is given)
- `kl`: KL divergence of these tokens' distributions from those of full prefill
- `agreement`: greedy answers that equal full prefill's
- `f1`, `rouge_l`: of the greedy answer, compared with the best of `answers`
- `reused`: the fraction of the prompt's tokens that came from the cache
- `ttft_ms`: time to first token, with the segments in the cache

Each figure is a mean over prompts with a 95 % interval (bootstrap). It starts a private daemon.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import string
import time
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Question:
    segments: list[list[int]]  # token ids
    query: list[int]
    answers: list[str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one way for one prompt."""

    logits: torch.Tensor  # logits of the query's and the reference answer's tokens
    answer: list[int]
    seconds: float  # time to first token
    reused: float = 0.0  # fraction of the prompt


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


def read_prompts(path: pathlib.Path, tokenizer: Any, chat: bool, limit: int | None) -> list[Question]:
    """ValueError names the line that is wrong."""
    before, after = _around(tokenizer) if chat else ("", "")
    questions: list[Question] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or (limit is not None and len(questions) >= limit):
            continue
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; expected a JSON object") from error
        wrong = _wrong(given)
        if wrong is not None:
            raise ValueError(f"{path}:{number}: {wrong}")
        texts = [before, *given["segments"]] if before else given["segments"]
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if not chat and tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
            rows[0] = [tokenizer.bos_token_id, *rows[0]]
        query = tokenizer(given["question"] + after, add_special_tokens=False)["input_ids"]
        questions.append(Question(rows, query, given.get("answers") or []))
    if not questions:
        raise ValueError(f"{path}: no prompts; expected one JSON object per line")
    return questions


def _wrong(given: Any) -> str | None:
    if not isinstance(given, dict):
        return f"{type(given).__name__}; expected a JSON object"
    for name, least in (("segments", 1), ("answers", 0)):
        texts = given.get(name, [])
        if (
            not isinstance(texts, list)
            or len(texts) < least
            or not all(isinstance(text, str) and text for text in texts)
        ):
            return f"{name}: expected a list of {'at least one text' if least else 'texts'}"
    if not isinstance(given.get("question"), str) or not given["question"]:
        return "question: expected a text"
    return None


def _around(tokenizer: Any) -> tuple[str, str]:
    """Returns the text that the chat template writes before and after the user's message."""
    message = [{"role": "user", "content": _MARK}]
    before, found, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).partition(
        _MARK
    )
    if not found:
        raise ValueError("--chat: the chat template does not write the user's message; leave the option out")
    return before, after


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
        self, model: Any, tokenizer: Any, questions: list[Question], answer_tokens: int, **options: Any
    ) -> None:
        """`options`: of `cache_for`."""
        self.model, self.tokenizer, self.questions, self.options = model, tokenizer, questions, options
        self.answer_tokens = answer_tokens
        self.capacity_tokens = answer_tokens + 256 + max(
            sum(map(len, each.segments)) + len(each.query) + max([len(self._tokens(a)) for a in each.answers], default=0)
            for each in questions
        )  # fmt: skip
        self.digest = weights_digest(model)
        self.full = [self._full(each) for each in questions]
        self.figures: dict[str, dict[str, list[float]]] = {FULL: self._figures(self.full)}

    def cache(self, daemon: Any, **options: Any) -> ModelCache:
        options = self.options | options
        return cache_for(self.model, daemon, tokens=self.capacity_tokens, weights_digest=self.digest, **options)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

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

    def _full(self, question: Question) -> Outcome:
        """Runs full prefill without a cache. Its own answer is the reference if the prompt has none."""
        text = [*sum(question.segments, []), *question.query]
        answer, seconds = self._generate(torch.tensor([text], device=self.model.device))
        reference = self._tokens(question.answers[0]) if question.answers else answer
        ids = torch.tensor([[*text, *reference]], device=self.model.device)
        with torch.no_grad():
            logits = self.model(ids, logits_to_keep=len(question.query) + len(reference)).logits[0]
        return Outcome(logits.float().cpu(), answer, seconds)

    def composed(self, name: str, daemon: Any, head: int, tail: int, assembler: type[Assembler] = Assembler) -> None:
        """Measures one way with all segments of a prompt in the cache."""
        outcomes = []
        cache = self.cache(daemon, head=head, tail=tail)
        with cache:
            with attach(self.model, cache, assembler=assembler) as reuse, torch.no_grad():
                for question, full in zip(self.questions, self.full, strict=True):
                    reference = self._tokens(question.answers[0]) if question.answers else full.answer
                    prompt = Prompt(question.segments, [*question.query, *reference])
                    logits = self.model(prompt).logits[0].float().cpu()
                    self._reused(reuse)
                    answer, seconds = self._generate(Prompt(question.segments, question.query))
                    outcomes.append(Outcome(logits, answer, seconds, self._reused(reuse)))
        self.figures[name] = self._figures(outcomes)

    def prefix(self, daemon: Any) -> None:
        """Measures exact reuse of only the first segment of each prompt."""
        outcomes = []
        cache = self.cache(daemon)
        with cache:
            with attach(self.model, cache) as reuse, torch.no_grad():
                for i, (question, full) in enumerate(zip(self.questions, self.full, strict=True)):
                    first, salt = question.segments[0], f"prefix {i}"
                    self.model.generate(Prompt([], first, salt=salt), max_new_tokens=1, pad_token_id=self._pad())
                    text = [*sum(question.segments, []), *question.query]
                    answer, seconds = self._generate(Prompt([], text, salt=salt))
                    # The states are those of full prefill.
                    outcomes.append(Outcome(full.logits, answer, seconds, self._reused(reuse)))
        self.figures[PREFIX] = self._figures(outcomes)

    @staticmethod
    def _reused(reuse: Any) -> float:
        """Returns the reused fraction of the last prompt. RuntimeError: it ran without the cache, so its figures would
        be those of full prefill."""
        last = reuse.last
        if last.fault or last.skip_reason:
            raise RuntimeError(f"a prompt was computed without the cache: {last.fault or last.skip_reason}")
        return float(last.cached_tokens / last.tokens)

    def _figures(self, outcomes: list[Outcome]) -> dict[str, list[float]]:
        figures: dict[str, list[float]] = {name: [] for name in METRICS}
        for question, full, found in zip(self.questions, self.full, outcomes, strict=True):
            reference = self._tokens(question.answers[0]) if question.answers else full.answer
            text = torch.tensor([*question.query, *reference])
            real, other = (outcome.logits[:-1].log_softmax(-1) for outcome in (full, found))
            figures["loss"].append(float(-other.gather(1, text[1:, None]).mean()))
            figures["kl"].append(float((real.exp() * (real - other)).sum(-1).mean()))
            figures["agreement"].append(float(found.answer == full.answer))
            figures["reused"].append(found.reused)
            figures["ttft_ms"].append(1000 * found.seconds)
            if question.answers:
                answer = self.tokenizer.decode(found.answer, skip_special_tokens=True)
                figures["f1"].append(max(f1(answer, each) for each in question.answers))
                figures["rouge_l"].append(max(rouge_l(answer, each) for each in question.answers))
        return figures


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
    **options: Any,
) -> list[dict[str, Any]]:
    """Returns rows by way: {"way", "seam_head", "seam_tail", and the mean and interval of each metric}. `options`: of
    `cache_for`."""
    evaluation = Evaluation(model, tokenizer, questions, answer_tokens, **options)
    with evaluation.cache(daemon) as cache:
        linear = [layer for layer in cache.model.layers if isinstance(layer, Linear)]
    # The inputs of a convolution are always recomputed.
    least = max([layer.conv_kernel - 1 for layer in linear if layer.conv_kernel > 0], default=0)
    seams: dict[str, tuple[int, int]] = {FULL: (0, 0)}
    for width in widths:
        name = f"composed {width}"
        seams[name] = max(width, least), width
        evaluation.composed(name, daemon, *seams[name])
    for name, assembler in ((NAIVE, _Naive), (KEYS, _KeysAlone)):
        seams[name] = least, 0
        if not linear and "composed 0" in evaluation.figures:  # a model without states gives the same result
            evaluation.figures[name] = evaluation.figures["composed 0"]
        else:
            evaluation.composed(name, daemon, least, 0, assembler)
    seams[PREFIX] = 0, 0
    evaluation.prefix(daemon)
    return [
        {
            "way": name,
            "seam_head": head,
            "seam_tail": tail,
            **{metric: interval(values) for metric, values in evaluation.figures[name].items() if values},
        }
        for name, (head, tail) in seams.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'way':12}" + "".join(f"{metric:>26}" for metric in METRICS)]
    for row in rows:
        cells = [row.get(metric) for metric in METRICS]
        texts = ["" if c is None else f"{c['mean']:.4g} [{c['low']:.4g}, {c['high']:.4g}]" for c in cells]
        lines.append(f"{row['way']:12}" + "".join(f"{text:>26}" for text in texts))
    return "\n".join(lines)


def _widths(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 0:
        raise ValueError
    return found


def main(words_given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="ashlar-eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, or name on Hugging Face")
    parser.add_argument("--prompts", required=True, type=pathlib.Path, metavar="FILE", help="JSON Lines")
    parser.add_argument("--widths", type=_widths, default="0,4,8,16,32", help="seam widths, in tokens (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, metavar="N", help="of greedy answers (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--chat", action="store_true", help="put the texts into the model's chat template")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the model (%(default)s)"
    )
    parser.add_argument(
        "--segment-dtype", default="float32", choices=("float32", "float16"), help="of stored tuples (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="of the model (%(default)s)")
    parser.add_argument("--dram", default="2GiB", metavar="SIZE", help="of the daemon (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the figures to this file")
    given = parser.parse_args(words_given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    try:
        questions = read_prompts(given.prompts, tokenizer, given.chat, given.limit)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype).eval().to(given.device)
    with ashlar.daemon.start(dram=given.dram) as daemon:
        options = {"segment_dtype": given.segment_dtype}
        rows = evaluate(model, tokenizer, questions, daemon, given.widths, given.answer_tokens, **options)
    print(table(rows))
    if given.json:
        figures = {"model": given.model, "dtype": given.dtype, **options, "prompts": len(questions), "ways": rows}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
