# SPDX-License-Identifier: Apache-2.0
"""The accuracy of segments: the logits' divergence from a full recompute, by seam width, compared with naive addition.
Weights are random; figures of a trained model are in docs/benchmarks/quality.md."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tiny_transformers as tiny
import torch

import ashlar
from ashlar.transformers.assembly import Assembler

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])


class Naive(Assembler):
    """Adds a segment's state instead of composing it: the transition is omitted."""

    def compose(self, request, place, step, state):
        alone = torch.zeros_like(state)
        super().compose(request, place, step, alone)
        state += alone


def divergence(real, other):
    real, other = real.log_softmax(-1), other.log_softmax(-1)
    return float((real.exp() * (real - other)).sum(-1).mean())


def ask(model, daemon, width, prompts, assembler=Assembler):
    # A layout's head is at least as wide as the convolutions: 3 tokens.
    with ashlar.cache_for(model, daemon, tokens=1024, head=max(3, width), tail=width) as cache:
        with ashlar.attach(model, cache, assembler=assembler) as reuse, torch.no_grad():
            logits = [model(prompt).logits for prompt in prompts]
            assert reuse.faults == 0 and reuse.last.cached_tokens > 0
    return logits


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "falcon_h1", "jamba", "minimax"])
def test_divergence_is_below_that_of_naive_addition_at_every_seam_width(family, daemon):
    model = tiny.build(family)
    prompts = [ashlar.Prompt([tiny.tokens(100, 10 * n + i) for i in range(5)], tiny.tokens(16, n)) for n in range(4)]
    with torch.no_grad():
        real = [model(torch.tensor([prompt.tokens.tolist()])).logits[:, -16:] for prompt in prompts]
    found = {}
    for width in (0, 4, 8, 16, 32):
        for name, assembler in (("composed", Assembler), ("naive", Naive)):
            logits = ask(model, daemon, width, prompts, assembler)
            found[name, width] = sum(map(divergence, real, logits)) / len(prompts)
        print(f"{family}, seams of {width}: KL {found['composed', width]:.2e}, naive {found['naive', width]:.2e}")
    for width in (4, 8, 16, 32):
        assert found["composed", width] < found["naive", width]
    assert found["composed", 32] < found["composed", 4], "wider seams compute more with all that stands before"


def test_a_doubled_or_omitted_interior_is_detected(daemon):
    """The first layer is exact to 1e-5 only if every token and every transition is applied once."""

    class Twice(Assembler):
        def compose(self, request, place, step, state):
            super().compose(request, place, step, state)
            super().compose(request, place, step, state)

    class Never(Assembler):
        def compose(self, request, place, step, state):
            pass

    model = tiny.build("qwen3_next")
    prompt = ashlar.Prompt([tiny.tokens(80, i) for i in range(4)], tiny.tokens(12, 9))
    states = []
    for assembler in (Assembler, Naive, Twice, Never):
        with ashlar.cache_for(model, daemon, tokens=512) as cache, torch.no_grad():
            one = assembler(model, cache, model.forward)
            assembled = one.assemble(prompt, len(prompt.tokens), 1, 0)
            states.append(assembled.cache.layers[0].recurrent_states[0].clone())
            one.end(assembled)
    for wrong in states[1:]:
        assert (wrong - states[0]).norm() / states[0].norm() > 0.01


def test_the_example_prints_and_writes_its_times(tmp_path):
    file = tmp_path / "times.json"
    command = [sys.executable, SOURCE / "examples/python/transformers_segments.py", "--segments", "8", "--tokens", "96",
               "--layers", "4", "--hidden", "128", "--runs", "3", "--json", file]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ttft_with_ms +[\d.]+", done.stdout)
    times = json.loads(file.read_text())
    assert times["published"] == 8 and times["cached_tokens"] == 96 + 7 * 80 and times["faults"] == 0
    assert times["ttft_with_ms"] > 0 and times["ttft_without_ms"] > 0


def test_the_kept_weights_solve_their_task_and_composition_keeps_what_naive_addition_loses(tmp_path):
    file = tmp_path / "quality.json"
    command = [sys.executable, SOURCE / "examples/python/quality/evaluate.py", "--segments", "4", "--tokens", "64",
               "--examples", "12", "--json", file]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(file.read_text())["cells"]
    accuracy = {way: found["all"] for way, found in cell["accuracy"].items()}
    assert accuracy["full recompute"] >= 95, "the kept weights solve the task"
    assert accuracy["seams of 8"] >= accuracy["full recompute"] - 3
    assert accuracy["naive addition, seams of 8"] < accuracy["seams of 8"] - 2
    assert accuracy["stale keys alone, seams of 8"] < 50
    assert cell["drift"]["seams of 8"]["layer 0, state"]["l2"] <= 1e-5


def test_training_leaves_weights_that_load(tmp_path):
    weights = tmp_path / "weights.safetensors"
    command = [
        sys.executable,
        SOURCE / "examples/python/quality/train.py",
        "--steps",
        "2",
        "--tokens",
        "256",
        "--out",
        weights,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(SOURCE / "examples/python/quality"))
    import train

    model = train.build()
    train.load(model, str(weights))
    assert sum(weight.numel() for weight in model.parameters()) > 2_000_000
