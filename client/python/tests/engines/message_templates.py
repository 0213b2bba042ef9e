# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the styles of model families, which separate messages differently."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Style:
    template: str
    specials: str  # tokens, separated by spaces
    begins: str  # tokens that begin messages
    ends: str = ""  # tokens that end messages
    merged: frozenset = frozenset()  # roles whose messages are part of the next or previous message
    refused: frozenset = frozenset()  # roles that the template refuses

    def __post_init__(self):
        assert {*self.begins.split(), *self.ends.split()} <= {*self.specials.split()}


_CALLS = "{% for each in m.tool_calls or [] %}<tool_call>{{ each.function.name }}</tool_call>{% endfor %}"

STYLES = {
    "chatml": Style(  # results of tools are a user's message
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response>",
        "<|im_start|>",
    ),
    "chatml, which always begins an answer": Style(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n",
        "<|im_start|> <|im_end|>",
        "<|im_start|>",
        refused=frozenset({"call"}),
    ),
    "glm": Style(
        "[gMASK]<sop>{% for m in messages %}"
        "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content }}" + _CALLS + ""
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> "
        "<tool_response> </tool_response>",
        "<|system|> <|user|> <|assistant|> <|observation|>",
    ),
    "deepseek": Style(  # system messages have no token, and are moved to the beginning
        "<｜begin｜>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜output｜>{{ m.content }}<｜/output｜>"
        "{% else %}{% if loop.previtem.role == 'user' %}<｜Assistant｜></think>{% endif %}{{ m.content }}"
        + _CALLS
        + "<｜end｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜><think>{% endif %}",
        "<｜begin｜> <｜end｜> <｜User｜> <｜Assistant｜> <｜output｜> <｜/output｜> <think> </think> <tool_call> "
        "</tool_call>",
        "<｜User｜> <｜Assistant｜> <｜output｜>",
        "<｜end｜> <｜/output｜>",
    ),
    "deepseek, which always begins an answer": Style(  # and whose answers end their reasoning with </think>
        "<｜begin｜>{% for m in messages %}{% set last = 'user' not in messages[loop.index:]|map(attribute='role') %}"
        "{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>{{ '<think>' if last else '</think>' }}"
        "{% elif m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% else %}{% if last %}{{ m.reasoning }}</think>{% endif %}{{ m.content }}<｜end｜>{% endif %}{% endfor %}",
        "<｜begin｜> <｜end｜> <｜User｜> <｜Assistant｜> <think> </think>",
        "<｜User｜>",
        "<｜end｜> <｜Assistant｜>",
        refused=frozenset({"tool"}),
    ),
    "mistral": Style(  # assistants' messages have no token; a system message is a part of the next one
        "{% set ns = namespace(system='', last='') %}<s>{% for m in messages %}"
        "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('order') }}{% endif %}"
        "{% set ns.system = m.content + '\n\n' %}"
        "{% elif m.role == 'user' %}{% if ns.last == 'user' %}{{ raise_exception('order') }}{% endif %}"
        "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools[0].name }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ ns.system + m.content }}[/INST]{% set ns.system = '' %}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{% for each in m.tool_calls %}{{ each.function.name }}, {% endfor %}</s>"
        "{% else %} {{ m.content }}</s>{% endif %}"
        "{% set ns.last = m.role %}{% endfor %}",
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]",
        "[INST] [TOOL_RESULTS]",
        "</s> [/INST] [/TOOL_RESULTS]",
        merged=frozenset({"system"}),
    ),
    "llama": Style(  # begins with its own system message
        "<|begin_of_text|>{% if messages[0].role != 'system' %}"
        "<|start_header_id|>system<|end_header_id|>\n\nnone<|eot_id|>{% endif %}"
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length > 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}"
        "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|start_header_id|>",
        "<|eot_id|>",
    ),
    "granite": Style(
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}" + _CALLS + ""
        "<|end_of_text|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "<|start_of_role|> <|end_of_role|> <|end_of_text|> <tool_call> </tool_call>",
        "<|start_of_role|>",
    ),
    "minimax": Style(
        "]~!b[{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
        + _CALLS
        + "[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
        "]~!b[ ]~b] [e~[ <think> <tool_call> </tool_call>",
        "]~b]",
    ),
    "gemma": Style(
        "<bos>{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<bos> <start_of_turn> <end_of_turn>",
        "<start_of_turn>",
        refused=frozenset({"system", "tool"}),
    ),
    "phi": Style(  # a conversation without a further answer ends with one more token
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + _CALLS + "<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|system|> <|user|> <|assistant|> <|tool|> <|end|> <|endoftext|> <tool_call> </tool_call>",
        "<|system|> <|user|> <|assistant|> <|tool|>",
    ),
    "command-r": Style(
        "<BOS_TOKEN>{% for m in messages %}<|START_OF_TURN_TOKEN|>"
        "{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}" + _CALLS + ""
        "<|END_RESPONSE|>{% else %}<|SYSTEM_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> "
        "<|START_RESPONSE|> <|END_RESPONSE|> <tool_call> </tool_call>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "gpt-oss": Style(  # begins with its own message; the last answer ends with another token
        "<|start|>system<|message|>none<|end|>{% for m in messages %}"
        "{% if m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content }}<|end|>"
        "{% elif m.tool_calls %}{% for each in m.tool_calls %}<|start|>assistant to={{ each.function.name }}"
        "<|channel|>commentary<|message|>none<|call|>{% endfor %}"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|start|> <|message|> <|channel|> <|end|> <|return|> <|call|>",
        "<|start|>",
        "<|end|>",
    ),
    "nemotron": Style(  # always with a system message
        "<SPECIAL_10>System\n{% if messages[0].role != 'system' %}\n{% endif %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('order') }}{% endif %}{{ m.content }}\n"
        "{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content }}" + _CALLS + "\n<SPECIAL_12>\n"
        "{% else %}<SPECIAL_11>User\n{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<SPECIAL_11>Assistant\n<think>\n{% endif %}",
        "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <think> <tool_call> </tool_call>",
        "<SPECIAL_11>",
    ),
    "hunyuan": Style(  # each role ends with its own token; only users' messages begin with one
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% elif m.role == 'system' %}{% if not loop.first %}{{ raise_exception('order') }}{% endif %}"
        "<|bos|>{{ m.content }}<|extra_4|>"
        "{% elif m.role == 'user' %}{% if loop.previtem is not defined or loop.previtem.role != 'system' %}<|bos|>"
        "{% endif %}{{ m.content }}<|extra_0|>{% else %}{{ m.content }}<|eos|>{% endif %}{% endfor %}",
        "<|bos|> <|eos|> <|extra_0|> <|extra_4|>",
        "<|bos|>",
        "<|eos|> <|extra_0|> <|extra_4|>",
        refused=frozenset({"tool"}),
    ),
    "one token ends all messages": Style(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + _CALLS + "<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "<|end|> <tool_call> </tool_call>",
        "",
        "<|end|>",
    ),
    "one token is between messages": Style(
        "{% for m in messages %}{% if not loop.first %}<|sep|>{% endif %}{{ m.role }}: {{ m.content }}"
        "{% for each in m.tool_calls or [] %}{{ each.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|sep|>assistant:{% endif %}",
        "<|sep|>",
        "",
        "<|sep|>",
    ),
    "only users' messages begin with a token": Style(  # a boundary before it would be a second one
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% endif %}{{ m.content }}" + _CALLS + "<|end|>\n"
        "{% endfor %}",
        "<|user|> <|end|> <tool_call> </tool_call>",
        "",
        "<|end|>",
    ),
}
STYLES["mistral, which refuses to end with an answer"] = dataclasses.replace(
    STYLES["mistral"],
    template="{% if messages[-1].role == 'assistant' %}{{ raise_exception('order') }}{% endif %}"
    + STYLES["mistral"].template,
)
