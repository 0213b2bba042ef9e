# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint with random weights and its own tokenizer, for tests that start an HTTP server."""

import installed
import tokenizers
import torch
import transformers
from tiny_models import CONFIGS

TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}assistant:"


def parts(name="qwen3", specials=(), template=TEMPLATE, **settings):
    """A model, and a tokenizer trained on the text of the licence. `specials`: further special tokens."""
    own = {key: value for key, value in CONFIGS[name].items() if key not in ("architectures", "torch_dtype")}
    config = transformers.AutoConfig.for_model(**own | {"max_position_embeddings": 8192} | settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inner = tokenizers.ByteLevelBPETokenizer()
    special = ["<|end|>", *specials]
    inner.train([str(installed.SOURCE / "LICENSE")], vocab_size=config.vocab_size, special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = template
    return model, tokenizer
