# SPDX-License-Identifier: Apache-2.0
"""Trains the small hybrid of docs/benchmarks/quality.md until it solves task.py, and saves its weights.

usage: train.py [--out FILE] [--steps N] [--seed N]

The stored weights, `hybrid.safetensors`, are from the defaults: 25 minutes on one core of a busy machine.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import time

import safetensors.torch
import task
import torch
import transformers

HERE = pathlib.Path(__file__).parent
RATE = 1e-3


def config(**changes: object) -> transformers.Qwen3NextConfig:
    """Qwen3-Next: gated delta net, attention, and two more gated delta nets; without experts."""
    return transformers.Qwen3NextConfig(
        **{
            "vocab_size": task.VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [0, 1, 2, 3],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 65536,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "tie_word_embeddings": True,
            "initializer_range": 0.03,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **changes,
        }
    )


def build() -> transformers.PreTrainedModel:
    return transformers.Qwen3NextForCausalLM(config())


def remember(model: transformers.PreTrainedModel, longest: float = 2e4) -> None:
    """Initialises heads with memories of 20 to `longest` tokens: by default they erase within a few tokens."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            with torch.no_grad():
                memories = torch.logspace(1.3, math.log10(longest), mixer.num_v_heads)
                mixer.A_log.zero_()
                mixer.dt_bias.copy_(torch.log(torch.expm1(1 / memories)))


def repeated(chance: random.Random, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random texts that occur twice, with filler between: the first occurrence determines every token of the second."""
    length, gap = chance.choice((8, 12, 16, 24)), chance.choice((0, 3, 8))
    rows, targets = [], []
    for _ in range(max(4, tokens // (2 * length + gap))):
        text = chance.sample(range(task.FIRST_KEY, task.FIRST_FILLER), length)
        filler = [chance.randrange(task.FIRST_FILLER, task.VOCABULARY) for _ in range(gap)]
        rows.append(text + filler + text)
        targets.append([-100] * (length + gap) + text[1:] + [-100])
    return torch.tensor(rows), torch.tensor(targets)


def batch(chance: random.Random, level: float, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of one length; targets are −100 for undetermined tokens. `level` 0 to 1 makes them longer."""
    segments = chance.randint(2, 2 + round(6 * level))
    keys = chance.randint(3, 4 + round(8 * level))
    names = chance.randint(1, 2 + round(2 * level))
    least = 2 * keys + (1 + task.PHRASE) * names
    length = chance.choice((least, least + 16, max(least, 16 + round(112 * level * chance.random() ** 2))))
    count = max(4, tokens // (segments * length + 3 * keys + (2 + task.PHRASE) * names))
    examples = [task.example(chance, segments, length, keys, names, keys, names) for _ in range(count)]
    rows = torch.tensor([example.tokens for example in examples])
    targets = torch.full_like(rows, -100)
    for row, one in enumerate(examples):
        places = torch.tensor(one.answers) + len(one.tokens) - len(one.query)
        targets[row, places - 1] = rows[row, places]
    return rows, targets


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    asked = targets >= 0
    return (logits.argmax(-1)[asked] == targets[asked]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(HERE / "hybrid.safetensors"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    chance = random.Random(arguments.seed)
    model = build()
    remember(model)
    print(sum(weight.numel() for weight in model.parameters()), "weights", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    begun, step, level, mean, copied, seen = time.monotonic(), 0, 0.0, 0.0, 0.0, 0
    while step < arguments.steps:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50)
        is_repeat = chance.random() < 0.6 - 0.5 * level
        rows, targets = repeated(chance, arguments.tokens) if is_repeat else batch(chance, level, arguments.tokens)
        logits = model(rows, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not is_repeat:
            mean += 0.05 * (accuracy(logits, targets) - mean)
        else:
            copied += 0.05 * (accuracy(logits, targets) - copied)
        if mean > 0.9 and level < 1:
            level, mean = min(1.0, level + 0.1), 0.8
        step, seen = step + 1, seen + rows.numel()
        if step % 25 == 0:
            spent = time.monotonic() - begun
            progress = f"{spent:.0f} s, step {step}, {seen} tokens, level {level:.1f}, loss {loss:.3f}"
            print(f"{progress}, accuracy {mean:.3f}, repeats {copied:.3f}", flush=True)
        if step % 100 == 0:
            save(model, arguments.out)
    save(model, arguments.out)


def load(model: transformers.PreTrainedModel, path: str) -> None:
    weights = {name: weight.float() for name, weight in safetensors.torch.load_file(path).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"{path}: not the weights of this model")
    model.tie_weights()


def save(model: transformers.PreTrainedModel, path: str) -> None:
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embedding
    safetensors.torch.save_file(weights, path)


if __name__ == "__main__":
    main()
