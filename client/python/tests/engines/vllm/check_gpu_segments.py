#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares composed with computed states and answers of a tiny hybrid, in a vLLM engine on this machine's GPU.

usage: check_gpu_segments.py [--model NAME] [--backend NAME] [--graphs]

tools/gpu-check runs it with each model and supported attention back end, without and with CUDA graphs. Prints the
relative errors as one line of JSON. Exit status 0 only if all are small. It has never run on a GPU: the tests run it on
CPUs.
"""

import argparse
import json
import os
import sys
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")

import vllm.model_executor.model_loader.dummy_loader as dummy_loader
from segmented_engines import PATIENT, Segmented, texts
from tiny_engines import Server, connector, count, model_folder, prompt, settings_of, wide_weights

import ashlar.daemon

COMPOSED = 1e-5  # largest relative error of a composed state, in fp32
COMPUTED = 2e-2  # the same of a kernel that multiplies in bf16
ANSWER = 0.2  # largest difference of a log-probability: composed answers are close to full prefill, not equal
KERNELS = dict(linear_key_head_dim=128, linear_value_head_dim=128, head_dim=64)  # sizes that all kernels take
MODELS = {"qwen3_5": KERNELS, "granite": {}}  # gated delta nets; Mamba-2


class Local(Segmented):
    """An engine in this process, with states in float32."""

    def __init__(self, model, options, **settings):
        dummy_loader.initialize_single_dummy_weight = wide_weights
        self._server = Server(settings_of(model, options, mamba_ssm_cache_dtype="float32", **settings))

    def call(self, name, *args, timeout=0, **kwargs):
        return getattr(self._server, name)(*args, **kwargs)


def check(engine):
    """Returns errors by name, each with its bound."""
    parts, query = texts("gpu check", 4), prompt("gpu check query", 20)
    tokens, lengths = sum(parts, []), [len(part) for part in parts]
    cut = engine.probe("tuples_against_one_run", tokens, lengths)
    full = engine.probe("ask", tokens + query, None, salt="full")
    assert engine.publish(parts) == 6, "segments were not published"
    before = count(engine, "jumps")
    composed = engine.ask(parts, query)
    assert count(engine, "jumps") == before + 4, "the prompt did not use its cached segments"
    engine.call("erase")
    again = engine.ask(parts, query)
    apart = engine.probe("composed_against_one_run", tokens + prompt("gpu check other", 10), lengths)
    return {
        "tuples": (max(max(one, whole) for one, whole, _ in cut), COMPOSED),
        "kernel of prompts": (max(kernel for *_, kernel in cut), COMPUTED),
        "interiors": (apart[0].interior, COMPOSED),
        "seams": (apart[0].computed, COMPUTED),
        "first token against full prefill": (abs(composed[1][0] - full[1][0]), ANSWER),
        "first token again": (abs(composed[1][0] - again[1][0]), 1e-3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_5", help="tiny model (qwen3_5)")
    parser.add_argument("--backend", default="TRITON_ATTN", help="attention back end (TRITON_ATTN)")
    parser.add_argument("--graphs", action="store_true", help="use CUDA graphs")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ashlar.daemon.start(dram="512MiB", arena="8MiB", folder=folder) as daemon,
    ):
        given = connector(daemon, segments=True, segments_on_gpu=True, **PATIENT)
        settings = dict(enforce_eager=not options.graphs, attention_backend=options.backend, gpu_memory_utilization=0.5)
        errors = check(Local(model_folder(options.model, **MODELS[options.model]), given, **settings))
    print(json.dumps({name: found for name, (found, _) in errors.items()}), flush=True)  # before the end below
    large = [
        f"{name}: {found:.1e} is above {bound:.0e}" for name, (found, bound) in errors.items() if not found <= bound
    ]
    for line in large:
        print(line, file=sys.stderr)
    os._exit(len(large) > 0)  # vLLM's threads would delay the end


if __name__ == "__main__":
    main()
