# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of few words, with chat templates of three forms."""

import tokenizers
import transformers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # begins with its own system message
    "<|begin|>{% if messages[0].role != 'system' %}<|header|>system<|end_header|>none<|eot|>{% endif %}"
    "{% for m in messages %}<|header|>{{ m.role }}<|end_header|>{{ m.content }}<|eot|>{% endfor %}"
)
TURNS = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<turn>{{ m.role }}\n{{ m.content }}</turn>\n{% endfor %}"
)


def tokenizer(template, specials):
    model = tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.add_special_tokens(specials)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=own, additional_special_tokens=specials)
    found.chat_template = template
    return found
