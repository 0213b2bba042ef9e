# SPDX-License-Identifier: Apache-2.0
"""The time to first token of `generate` for a prompt of cached segments, with and without Ashlar, in Transformers.

The model has Qwen3-Next's layers and random weights: times are real, answers mean nothing. Needs torch and transformers
(`pip install ./client/python[transformers]`). It starts a private daemon.

usage: transformers_segments.py [--segments N] [--tokens N] [--layers N] [--hidden N] [--runs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers

import ashlar
import ashlar.daemon


def build(layers: int, hidden: int) -> transformers.PreTrainedModel:
    torch.manual_seed(20)
    config = transformers.Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        mlp_only_layers=list(range(layers)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        linear_num_key_heads=hidden // 128,
        linear_num_value_heads=hidden // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


def first_token(model: transformers.PreTrainedModel, prompt: ashlar.Prompt | torch.Tensor) -> float:
    begun = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    return 1000 * (time.perf_counter() - begun)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    model = build(arguments.layers, arguments.hidden)
    texts = torch.randint(0, 1024, (arguments.segments, arguments.tokens))
    question = torch.randint(0, 1024, (16,))
    orders = [torch.randperm(arguments.segments - 1) + 1 for _ in range(arguments.runs)]
    # The first one is a prefix and keeps its position.
    prompts = [[texts[0], *(texts[i] for i in order)] for order in orders]
    without, with_cache = [], []
    first_token(model, torch.cat([texts[0], question]).unsqueeze(0))  # warms up
    with ashlar.daemon.start(dram="1GiB") as daemon:
        with ashlar.cache_for(model, daemon, tokens=arguments.segments * arguments.tokens + 256) as cache:
            with ashlar.attach(model, cache) as reuse:
                publishing = first_token(model, ashlar.Prompt(list(texts), question))
                published = reuse.last.published
            for segments in prompts:  # alternating, so that both see the same machine
                without.append(first_token(model, torch.cat([*segments, question]).unsqueeze(0)))
                with ashlar.attach(model, cache) as reuse:
                    with_cache.append(first_token(model, ashlar.Prompt(segments, question)))
            last = reuse.last
    return {
        "segments": arguments.segments,
        "tokens": last.tokens,
        "cached_tokens": last.cached_tokens,
        "published": published,
        "weights": sum(weight.numel() for weight in model.parameters()),
        "ttft_without_ms": round(statistics.median(without), 1),
        "ttft_publishing_ms": round(publishing, 1),
        "ttft_with_ms": round(statistics.median(with_cache), 1),
        "times_as_soon": round(statistics.median(without) / statistics.median(with_cache), 2),
        "runs": arguments.runs,
        "faults": reuse.faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a segment")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = measure(arguments)
    for name, value in result.items():
        print(f"{name:20} {value}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
