# SPDX-License-Identifier: Apache-2.0
"""Which calls of `generate` and `forward` the cache serves: the ones that run one whole prompt, and whose states depend
on its tokens alone. For any other call, a function here returns why it runs without the cache."""

from __future__ import annotations

from typing import Any

import torch

from ashlar.transformers.weights import Weights, standing

# Arguments of `generate` that choose or report tokens and do not affect states.
_CHOOSING = frozenset(
    ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer", "trust_remote_code")
)
# Arguments of `forward` whose values are checked here.
_KNOWN = frozenset(
    ("attention_mask", "logits_to_keep", "past_key_values", "position_ids", "inputs_embeds", "return_dict", "use_cache")
)
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")  # outputs for every token of the run
_ONE = ("num_return_sequences", "guidance_scale")  # 1 is equivalent to the default
_OFF = frozenset((*_OUTPUTS, "synced_gpus", "trust_remote_code"))  # False is equivalent to the default
# Options of `generate` that choose tokens, decide when to stop, or decide what is returned for the new tokens. Options
# of assistants and beams matter only in modes that are refused.
_SERVED_OPTIONS = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams use_cache
    temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    sequence_bias watermarking_config output_scores output_logits return_dict_in_generate pad_token_id bos_token_id
    eos_token_id decoder_start_token_id num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind assistant_ensemble_weight max_matching_ngram_size speculation_type
    num_beam_groups diversity_penalty disable_compile compile_config transformers_version
""".split()
)


def of_model(model: Any, described: str, weights: Weights | None = None) -> str | None:
    """Returns why the model's states differ from those that an open cache names: by its mode, by its adapters, which
    were `described`, or by its weights. None: they do not differ."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    if model.training:
        return "training"
    now = standing(model)
    if now.training:
        return "training"
    if now.adapters != described:
        return "adapters"
    return "weights" if weights is not None and weights.changed(now) else None


def of_prompt(ids: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> str | None:
    """Returns why the arguments are not those of one whole prompt, or None."""
    if args:
        return "positional arguments"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        return "no tokens"
    if ids.shape[0] != 1:
        return f"{ids.shape[0]} sequences"
    if ids.shape[1] < 2:
        return "one token"
    if int(ids.min()) < 0 or int(ids.max()) > torch.iinfo(torch.int32).max:
        return "tokens out of range"
    for name in ("past_key_values", "inputs_embeds", "position_ids"):
        if arguments.get(name) is not None:
            return name
    mask = arguments.get("attention_mask")
    # Only a mask that hides nothing is accepted. Transformers also takes prepared masks, in a dict.
    if mask is None or (isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool((mask == 1).all())):
        return None
    return "attention_mask"


def of_generate(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[str | None, Any]:
    """Returns why `generate` does not run every token of one sequence once and in order, or None, and its options."""
    if arguments.get("custom_generate") is not None:
        return "custom_generate", None
    if not hasattr(model, "_prepare_generation_config"):
        return "custom generate method", None
    # Prepares options as the installed version does, on a copy: `arguments` (including the config), the model's
    # options, defaults.
    given = {name: value for name, value in arguments.items() if name != "generation_config"}
    options, others = model._prepare_generation_config(arguments.get("generation_config"), **given)
    return _of_options(options, arguments.get("assistant_model")) or _of_others(options, ids, others), options


def _of_options(options: Any, assistant: Any) -> str | None:
    mode = options.get_generation_mode(assistant)
    if mode not in ("greedy_search", "sample"):
        return str(mode.value)
    if options.use_cache is False:
        return "use_cache"
    # All other options, including ones of later versions: caches, prompts that are run in parts or changed first,
    # outputs of every token.
    for name, value in vars(options).items():
        known = name in _SERVED_OPTIONS or name.startswith("_") or (name in _ONE and value == 1)
        if not known and value is not None and value is not False:
            return str(name)
    return None


def _of_others(options: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> str | None:
    """Returns an argument that is not an option and may affect states, such as images or adapters."""
    if (name := _first(arguments, _CHOOSING | {"attention_mask"})) is not None:
        return name
    # Without a mask `generate` also hides padding tokens, unless the padding token ends texts.
    if arguments.get("attention_mask") is None:
        pads, ends = _numbers(options.pad_token_id), _numbers(options.eos_token_id)
        if pads & set(ids.flatten().tolist()) and not pads & ends:
            return "pad_token_id"
    return None


def _first(arguments: dict[str, Any], known: frozenset[str]) -> str | None:
    """Returns the name of the first given argument that is not `known`, or None."""
    given = sorted(
        name for name, value in arguments.items() if not (value is None or (value is False and name in _OFF))
    )
    return next((name for name in given if name not in known), None)


def _numbers(value: Any) -> set[int]:
    return set() if value is None else set(torch.as_tensor(value).flatten().tolist())


def of_forward(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> str | None:
    """Returns why `forward` returns more than the logits of some last tokens, or None."""
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


def new_tokens(model: Any, options: Any, count: int, arguments: dict[str, Any]) -> int:
    """Returns the number of tokens that `generate` may add to a prompt of `count` tokens."""
    if options.max_new_tokens is not None:
        return int(options.max_new_tokens)
    given = arguments.get("max_length"), getattr(arguments.get("generation_config"), "max_length", None)
    if all(length is None for length in (*given, model.generation_config.max_length)):
        return int(options.max_length)  # number of new tokens if it is the default
    return max(0, int(options.max_length) - count)
