# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint with random weights and its own tokenizer, for tests that start an HTTP server."""

import installed
import tokenizers
import torch
import transformers
from tiny_models import CONFIGS

TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}assistant:"


def parts(**settings):
    """A model of `qwen3`, and a tokenizer trained on the text of the licence."""
    own = {name: value for name, value in CONFIGS["qwen3"].items() if name not in ("architectures", "torch_dtype")}
    config = transformers.AutoConfig.for_model(**own | {"max_position_embeddings": 8192} | settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train([str(installed.SOURCE / "LICENSE")], vocab_size=config.vocab_size, special_tokens=["<|end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer
