# SPDX-License-Identifier: Apache-2.0
"""The cost of reusing segments for a trained hybrid: the accuracy of task.py by full recompute, by Ashlar at several
seams, by naive addition of states, and with only stale keys; also the drift of the states, layer by layer.

Needs torch and transformers. It starts a private daemon.

usage: evaluate.py [--weights FILE] [--segments N,N,…] [--tokens N,N,…] [--examples N] [--dtype TYPE]
                   [--segment-dtype TYPE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import sys
from typing import Any

import torch
import transformers

import ashlar
import ashlar.daemon
from ashlar.transformers.assembly import Assembler

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import task  # noqa: E402
import train  # noqa: E402


class Naive(Assembler):
    """Adds a segment's state and leaves its transition out."""

    def compose(self, request: Any, place: Any, step: Any, state: torch.Tensor) -> None:
        alone = torch.zeros_like(state)
        super().compose(request, place, step, alone)
        state += alone


class Stale(Assembler):
    """Uses cached keys, but leaves states as if the segment did not exist."""

    def compose(self, request: Any, place: Any, step: Any, state: torch.Tensor) -> None:
        pass


# name, head, tail, assembler
WAYS: list[tuple[str, int, int, type[Assembler]]] = [
    ("seams of 0, and 3 for the convolution", 3, 0, Assembler),  # a layout allows no narrower head
    *((f"seams of {width}", width, width, Assembler) for width in (4, 8, 16, 32)),
    ("head of one page", 16, 0, Assembler),
    ("naive addition, seams of 8", 8, 8, Naive),
    ("stale keys alone, seams of 8", 8, 8, Stale),
]


def right(logits: torch.Tensor, one: task.Example) -> list[bool]:
    """Returns whether each answer was predicted; `logits`: of the query's tokens."""
    return [int(logits[place - 1].argmax()) == one.query[place] for place in one.answers]


def share(outcomes: list[list[bool]], examples: list[task.Example], kind: str) -> float:
    """Returns per cent: of all answers, of recalls, or of copied tokens."""
    parts = {"all": slice(None), "recall": None, "copy": None}
    counted: list[bool] = []
    for marks, one in zip(outcomes, examples, strict=True):
        parts["recall"], parts["copy"] = slice(0, one.recalls), slice(one.recalls, None)
        counted += marks[parts[kind]]
    return round(100 * sum(counted) / len(counted), 2)


def states(model: Any, cache: Any) -> dict[str, torch.Tensor]:
    found = {}
    for number, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            found[f"layer {number}, state"] = layer.recurrent_states[0].float().flatten()
        else:
            found[f"layer {number}, keys"] = layer.keys.float().flatten()
    return found


def drift(real: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Returns the relative distance, and the angle between both in degrees."""
    result = {}
    for name, one in real.items():
        two = other[name]
        cosine = float((one.double() @ two.double()) / one.double().norm() / two.double().norm())
        result[name] = {
            "l2": round(float((two - one).norm() / one.norm()), 5),
            "angle_degrees": round(math.degrees(math.acos(max(-1.0, min(1.0, cosine)))), 3),
        }
    return result


def mean(parts: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {key: round(sum(part[name][key] for part in parts) / len(parts), 4) for key in parts[0][name]}
        for name in parts[0]
    }


def cell(model: Any, daemon: Any, segments: int, tokens: int, count: int, **options: Any) -> dict[str, Any]:
    """`options`: of the cache."""
    chance = random.Random(1000 * segments + tokens)
    examples = [task.example(chance, segments, tokens, 8, 3, 8, 3) for _ in range(count)]
    real, outcomes = [], []
    for one in examples:
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.tensor([one.tokens])
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=len(one.query)).logits[0]
        outcomes.append(right(logits, one))
        real.append(states(model, cache))
    rows = {"full recompute": outcomes}
    drifts = {}
    for name, head, tail, assembler in WAYS:
        if tokens <= head + tail:
            continue
        rows[name], apart = [], []
        capacity = segments * tokens + 256
        with ashlar.cache_for(model, daemon, tokens=capacity, head=head, tail=tail, **options) as cache:
            with ashlar.attach(model, cache, assembler=assembler) as reuse, torch.no_grad():
                for i, one in enumerate(examples):
                    output = model(ashlar.Prompt(one.segments, one.query))
                    if reuse.last.fault or reuse.last.cached_tokens == 0:
                        raise RuntimeError(f"nothing was taken from the cache: {reuse.last}")
                    rows[name].append(right(output.logits[0], one))
                    apart.append(drift(real[i], states(model, output.past_key_values)))
        drifts[name] = mean(apart)
    accuracy = {
        name: {kind: share(marks, examples, kind) for kind in ("all", "recall", "copy")} for name, marks in rows.items()
    }
    answers = sum(len(one.answers) for one in examples)
    return {
        "segments": segments,
        "segment_tokens": tokens,
        "examples": count,
        "answers": answers,
        "accuracy": accuracy,
        "drift": drifts,
    }


def pooled(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, over all sizes of a way, its accuracy, and the points lost against full recompute."""
    result = {}
    for way in dict.fromkeys(name for one in cells for name in one["accuracy"]):
        tried = [one for one in cells if way in one["accuracy"]]
        answers = sum(one["answers"] for one in tried)

        def over(name: str, kind: str, tried: list[dict[str, Any]] = tried, answers: int = answers) -> float:
            return sum(one["accuracy"][name][kind] * one["answers"] for one in tried) / answers

        result[way] = {
            "answers": answers,
            **{kind: round(over(way, kind), 2) for kind in ("all", "recall", "copy")},
            "points_lost": round(over("full recompute", "all") - over(way, "all"), 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default=str(HERE / "hybrid.safetensors"))
    parser.add_argument("--segments", default="2,4,8,16")
    parser.add_argument("--tokens", default="64,256,1024", help="of a segment")
    parser.add_argument("--examples", type=int, default=40, help="of each size; fewer where prompts are long")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model")
    parser.add_argument("--segment-dtype", default="float32", choices=("float32", "float16"), help="of stored tuples")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    model = train.build().eval()
    train.load(model, arguments.weights)
    model = model.to(getattr(torch, arguments.dtype))
    cells = []
    with ashlar.daemon.start(dram="768MiB") as daemon:
        for tokens in map(int, arguments.tokens.split(",")):
            for segments in map(int, arguments.segments.split(",")):
                count = max(4, min(arguments.examples, arguments.examples * 2048 // (segments * tokens)))
                cells.append(cell(model, daemon, segments, tokens, count, segment_dtype=arguments.segment_dtype))
                print(f"{segments} segments of {tokens} tokens, {cells[-1]['answers']} answers", flush=True)
                for name, found in cells[-1]["accuracy"].items():
                    parts = f"recall {found['recall']:6.2f}, copy {found['copy']:6.2f}"
                    print(f"  {name:38} {found['all']:6.2f} ({parts})", flush=True)
                if arguments.json:
                    pathlib.Path(arguments.json).write_text(
                        json.dumps({"pooled": pooled(cells), "cells": cells}, indent=1) + "\n"
                    )


if __name__ == "__main__":
    main()
