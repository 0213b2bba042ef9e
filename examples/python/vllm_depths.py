# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt is resumed, with tiny models of random weights on the CPU.

    python3 examples/python/vllm_depths.py --json depths.json

Part 1, vLLM: prompts whose lengths are near the ends of vLLM's blocks, each followed by a longer one. Part 2, vLLM and
Transformers: conversations through a chat template that drops the reasoning of earlier turns. `ideal` is the number of
tokens that a prompt shares with earlier text, `reused` how many of them were not computed again. vLLM's own prefix
cache is emptied before each prompt. Needs a source tree, the packages `ashlar`, `vllm` and `transformers`, and no
network.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/tests/engines/vllm"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/tests/engines/transformers"))

import jinja2
import tiny_engines as engines
import tiny_transformers
import torch

import ashlar
import ashlar.daemon
from ashlar.vllm.template import rewritten_tokens

MODELS = {"qwen3_5": "GDN", "granite": "Mamba-2", "lfm2": "short convolutions", "qwen3": "attention"}
AROUND = (-100, -40, -17, -9, -1, 0, 1, 9, 17, 40, 100)  # tokens from a block's end
MORE = 40  # tokens that the longer prompt has in addition
TURNS, REASONED, ANSWERED = 6, 40, 40
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n
{%- endfor -%}
<|im_start|>assistant\n{{ opening }}"""
OPENINGS = {"plain": "", "think": "<think>\n"}  # by template: the text that opens the model's turn
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
FIRST_SPECIAL, LETTERS = 250, 0x4000  # ids below 256, the smallest vocabulary; letters that represent ids


def encode(text):
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [
        token
        for part in parts
        for token in ([FIRST_SPECIAL + SPECIAL.index(part)] if part in SPECIAL else map(number, part))
    ]


def number(letter):
    return ord(letter) - LETTERS if ord(letter) >= LETTERS else ord(letter)


def decode(tokens):
    return "".join(chr(LETTERS + token) for token in tokens)


def words(seed, tokens):
    return decode(token % FIRST_SPECIAL for token in engines.prompt(seed, tokens))


def render(messages, template):
    return jinja2.Template(TEMPLATE).render(messages=messages, opening=OPENINGS[template])


def shared(prompt, texts):
    """The longest prefix of the prompt that one of the texts shares. The last token is computed in any case."""
    found = 0
    for text in texts:
        pairs = zip(prompt[:-1], text)
        found = max(found, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(text))))
    return found


def lengths(model, daemon):
    cases, block = [], engines.BLOCK[model]
    with engines.Child(model, engines.connector(daemon)) as child:
        for tokens in (count * block + around for count in (1, 2) for around in AROUND):
            text = engines.prompt(f"{model} {tokens}", tokens)
            child.generate([text], 1)
            child.call("erase")
            before = engines.saved(child)
            child.generate([text + engines.prompt("more", MORE)], 1)
            reused = int(engines.saved(child) - before)
            cases.append({"model": model, "block": block, "tokens": tokens, "reused": reused, "ideal": tokens})
    return cases


def conversation(template, answer, seed):
    """`answer(prompt)` returns the tokens that a model writes, and how many tokens of the prompt it has not computed."""
    messages = [{"role": "system", "content": words(f"system {seed}", 200)}]
    texts, turns = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(f"user {turn}", 150)})
        prompt = encode(render(messages, template))
        written, reused = answer(prompt)
        turns.append(
            {
                "template": template,
                "turn": turn + 1,
                "tokens": len(prompt),
                "reused": reused,
                "ideal": shared(prompt, texts),
            }
        )
        texts.append(prompt + written[:-1])  # the last token is not computed
        messages.append({"role": "assistant", "content": decode(written[REASONED:])})
    return turns


def vllm_turns(model, daemon, template):
    # As the connector does where the model's own tokenizer has the template.
    tokens = rewritten_tokens(lambda messages: encode(render(messages, template)))
    with engines.Child(model, engines.connector(daemon, checkpoint_tokens=tokens)) as child:

        def answer(prompt):
            child.call("erase")
            before = engines.saved(child)
            ((written, _, _),) = child.generate([prompt], REASONED + ANSWERED)
            return written, int(engines.saved(child) - before)

        return [{"engine": "vllm", "model": model, **turn} for turn in conversation(template, answer, template)]


def transformers_turns(family, daemon, template):
    import ashlar.transformers as adapter

    model = tiny_transformers.build(family)
    cache = adapter.cache_for(model, daemon, weights_digest=f"{family} {template}", tokens_per_second=1.0)
    with adapter.attach(model, cache) as reuse:

        def answer(prompt):
            ids = torch.tensor([prompt])
            found = model.generate(ids, max_new_tokens=REASONED + ANSWERED, do_sample=False)
            return found[0, len(prompt) :].tolist(), reuse.last.cached_tokens

        return [
            {"engine": "transformers", "model": family, **turn} for turn in conversation(template, answer, template)
        ]


def show(rows):
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--models", default=",".join(MODELS), help="of part 1 and of vLLM's conversations")
    options = parser.parse_args()
    engines.import_once()
    results = {"vllm": engines.vllm.__version__, "cases": [], "turns": []}
    with tempfile.TemporaryDirectory(prefix="ashlar-depths-") as folder:
        with ashlar.daemon.start(dram="1GiB", folder=folder) as daemon:
            for model in options.models.split(","):
                results["cases"] += show(lengths(model, daemon))
                for template in OPENINGS:
                    results["turns"] += show(vllm_turns(model, daemon, template))
            for family in ("qwen3_5", "qwen3"):
                for template in OPENINGS:
                    results["turns"] += show(transformers_turns(family, daemon, template))
    results["mean"] = statistics.mean(case["reused"] / case["ideal"] for case in results["cases"])
    print(f"mean of reused / ideal: {results['mean']:.3f}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
