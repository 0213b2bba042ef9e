"""Which calls of `generate` and `forward` the cache serves: those that run one whole prompt, and whose states follow from
its tokens alone. For any other call a function here says why it is left to the model."""

from __future__ import annotations

from typing import Any

import torch

from ashlar.transformers.model import standing

# Arguments of `generate` that choose or tell tokens, and decide no state.
_CHOOSING = frozenset(
    ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer", "trust_remote_code")
)
_KNOWN = frozenset(
    ("attention_mask", "logits_to_keep", "past_key_values", "position_ids", "inputs_embeds", "return_dict", "use_cache")
)
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")  # of every token that was run


def of_model(model: Any, described: str) -> str | None:
    """Whether the model computes as it did when its adapters were `described`: an open cache names these states alone."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    training, active = (True, "") if model.training else standing(model)
    if training:
        return "training"
    return None if active == described else "adapters"


def of_prompt(ids: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> str | None:
    """Whether these are arguments of one whole prompt."""
    if args:
        return "arguments without a name"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return "no tokens"
    if ids.shape[0] != 1:
        return f"{ids.shape[0]} sequences"
    if ids.shape[1] < 2:
        return "one token"
    for name in ("past_key_values", "inputs_embeds", "position_ids"):
        if arguments.get(name) is not None:
            return name
    mask = arguments.get("attention_mask")
    # One that hides nothing; Transformers also takes prepared ones, in a dict.
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask == 1).all())):
        return "attention_mask"
    return None


def of_generate(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[str | None, Any]:
    """Whether `generate` runs every token of one sequence once, in its order; and the options that it goes by."""
    if arguments.get("custom_generate") is not None:
        return "custom_generate", None
    if not hasattr(model, "_prepare_generation_config"):
        return "a generate of the model's own", None
    # As the installed version prepares them, on a copy: `arguments`, the config among them, the model's own, defaults.
    given = {name: value for name, value in arguments.items() if name != "generation_config"}
    options, others = model._prepare_generation_config(arguments.get("generation_config"), **given)
    return _of_options(options, arguments.get("assistant_model")) or _of_others(options, ids, others), options


def _of_options(options: Any, assistant: Any) -> str | None:
    mode = options.get_generation_mode(assistant)
    if mode not in ("greedy_search", "sample"):
        return str(mode.value)
    for name in ("num_return_sequences", "guidance_scale"):
        if getattr(options, name, None) not in (None, 1):
            return name
    if getattr(options, "use_cache", None) is False:
        return "use_cache"
    # Other caches, prompts that are run in parts or changed first, and outputs of every token.
    for name in ("cache_implementation", "prefill_chunk_size"):
        if getattr(options, name, None) is not None:
            return name
    return next((name for name in ("token_healing", "is_assistant", *_OUTPUTS) if getattr(options, name, None)), None)


def _of_others(options: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> str | None:
    """Of arguments that are no options: images, adapters and the like may decide states."""
    if (name := _first(arguments, _CHOOSING | {"attention_mask"})) is not None:
        return name
    # Without a mask `generate` hides the padding token, where it does not end texts, too.
    if arguments.get("attention_mask") is None:
        pads, ends = _numbers(options.pad_token_id), _numbers(options.eos_token_id)
        if pads & set(ids.flatten().tolist()) and not pads & ends:
            return "pad_token_id"
    return None


def _first(arguments: dict[str, Any], known: frozenset[str]) -> str | None:
    """The first argument that is given, and not known."""
    given = sorted(name for name, value in arguments.items() if value is not None and value is not False)
    return next((name for name in given if name not in known), None)


def _numbers(value: Any) -> set[int]:
    return set() if value is None else set(torch.as_tensor(value).flatten().tolist())


def of_forward(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> str | None:
    """Whether `forward` is asked for the logits of some last tokens, and for nothing that only the whole run gives."""
    keep = arguments.get("logits_to_keep", 0)
    if not isinstance(keep, int) or not 0 < keep < ids.shape[1]:
        return "logits_to_keep"
    for name in ("use_cache", "return_dict"):
        if arguments.get(name) is False:
            return name
    if (other := _first(arguments, _KNOWN)) is not None:  # labels, …
        return other
    configs = model.config, model.config.get_text_config(decoder=True)
    for name in _OUTPUTS:
        if arguments.get(name) is None and any(getattr(config, name, False) for config in configs):
            return f"config.{name}"
    return "gradients" if torch.is_grad_enabled() else None


def room(model: Any, options: Any, count: int, arguments: dict[str, Any]) -> int:
    """Tokens that `generate` may add to `count`."""
    if options.max_new_tokens is not None:
        return int(options.max_new_tokens)
    given = arguments.get("max_length"), getattr(arguments.get("generation_config"), "max_length", None)
    if all(length is None for length in (*given, model.generation_config.max_length)):
        return int(options.max_length)  # of new tokens, where it is the default
    return max(0, int(options.max_length) - count)
