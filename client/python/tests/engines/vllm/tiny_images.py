# SPDX-License-Identifier: Apache-2.0
"""Tiny models that take images, with a processor, a tokenizer of 512 words, and an engine that takes images."""

import json

import safetensors.torch
import torch
from tiny_engines import Child
from tiny_models import COMMON, CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from vllm.model_executor.models import ModelRegistry

WORDS = 500  # words of texts; the later tokens have special meanings
SPECIAL = {
    "<|im_end|>": 506, "<|video_pad|>": 507, "<|vision_start|>": 508, "<|image_pad|>": 509, "<|vision_end|>": 510, "<unk>": 511,
}  # fmt: skip
VISION = dict(
    depth=2, hidden_size=64, intermediate_size=64, num_heads=2, patch_size=16, out_hidden_size=64, num_position_embeddings=64
)  # fmt: skip
MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_interleaved=True)
HYBRID = {name: value for name, value in CONFIGS["qwen3_5"].items() if name != "architectures"}
HYBRID["rope_parameters"] = dict(HYBRID["rope_parameters"], mrope_section=[2, 1, 1], mrope_interleaved=True)
IMAGE_MODELS = {
    "qwen3_vl": dict(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=dict(
            COMMON,
            model_type="qwen3_vl_text",
            num_hidden_layers=3,
            rope_parameters=dict(MROPE, mrope_section=[6, 5, 5]),
        ),
        vision_config=dict(VISION, model_type="qwen3_vl", deepstack_visual_indexes=[0, 1]),
    ),
    "qwen3_5": dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=HYBRID,
        vision_config=dict(VISION, model_type="qwen3_5"),
    ),
    "qwen3_5_moe": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        text_config=dict(
            HYBRID,
            model_type="qwen3_5_moe_text",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        vision_config=dict(VISION, model_type="qwen3_5_moe"),
    ),
}
ASK = """
import numpy, vllm
from PIL import Image
def picture(seed):
    return Image.fromarray(numpy.random.RandomState(seed).randint(0, 256, (256, 192, 3), dtype="uint8"))
def asked(parts, uuids=None):
    ids, pictures = [], []
    for part in parts:
        pictures += [picture(part)] if isinstance(part, int) else []
        ids += [508, 509, 510] if isinstance(part, int) else part
    media = dict(multi_modal_data=dict(image=pictures)) if pictures else {}
    media |= dict(multi_modal_uuids=dict(image=uuids)) if uuids else {}
    return dict(prompt_token_ids=ids, **media)
def see(prompts, tokens, segments):
    sampling = [
        vllm.SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=tokens,
            extra_args=None if lengths is None else dict(kv_transfer_params=dict(ashlar_segments=lengths)),
        )
        for lengths in segments
    ]
    outputs = llm.generate([asked(*each) for each in prompts], sampling, use_tqdm=False)
    best = [output.outputs[0] for output in outputs]
    return [
        (list(one.token_ids), [each[token].logprob for each, token in zip(one.logprobs, one.token_ids)]) for one in best
    ]
server.see = see
"""


def image_model(model, folder):
    """Its folder: configuration, tokenizer and processor."""
    words = {f"t{i}": i for i in range(SPECIAL["<|im_end|>"])} | SPECIAL
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    patches = dict(patch_size=16, temporal_patch_size=2, merge_size=2)
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(min_pixels=32 * 32, max_pixels=512 * 512, **patches),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>"),
        Qwen3VLVideoProcessor(**patches),
        chat_template="{{ messages }}",
    ).save_pretrained(folder)
    names = dict(image_pad="image", video_pad="video", vision_start="vision_start", vision_end="vision_end")
    special = {f"{ours}_token_id": SPECIAL[f"<|{theirs}|>"] for theirs, ours in names.items()}
    config = dict(IMAGE_MODELS[model], model_type=model, tie_word_embeddings=False, torch_dtype="bfloat16", **special)
    (folder / "config.json").write_text(json.dumps(config))
    for architecture in config["architectures"]:  # otherwise each engine inspects the class in a separate process
        ModelRegistry._try_inspect_model_cls(architecture)
        ModelRegistry._try_load_model_cls(architecture)
    return str(folder)


def pair_of_checkpoints(model, folder):
    """Writes weights for a model that takes images, and for its text-only class with plain rotary positions. Returns
    both folders."""
    seeing, text = folder / "seeing", folder / "text"
    for each in (seeing, text):
        each.mkdir()
    image_model(model, seeing)
    with torch.random.fork_rng():
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(seeing))
        torch.manual_seed(0)
        weights = {name: torch.rand(each.shape) * 0.4 - 0.2 for name, each in whole.state_dict().items()}
    for name, each in weights.items():
        each -= 2 * name.endswith(("A_log", "dt_bias"))  # heads remember tens of tokens, as in tiny_engines
        weights[name] = each if name.endswith("A_log") else each.bfloat16()
    texts = {name: each for name, each in weights.items() if not name.startswith("model.visual.")}
    for path, tensors in ((seeing, weights), (text, texts)):
        safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own = IMAGE_MODELS[model]
    config = dict(own["text_config"], rope_parameters=CONFIGS["qwen3_5"]["rope_parameters"])
    config["architectures"] = [own["architectures"][0].replace("ConditionalGeneration", "CausalLM")]
    (text / "config.json").write_text(json.dumps(config))
    return str(seeing), str(text)


class Seeing(Child):
    def __init__(self, folder, *connectors, **options):
        limits = dict(limit_mm_per_prompt={"image": 4, "video": 0}, num_gpu_blocks_override=128) | options
        super().__init__(folder, *connectors, skip_tokenizer_init=False, enable_prefix_caching=True, **limits)
        self.call("execute", ASK)

    def see(self, *parts, tokens=6, uuids=None):
        """Answer to texts and images; an int is the seed of an image. The engine's own cache is erased before."""
        self.call("erase")
        return self.call("evaluate", f"server.see([({parts!r}, {uuids!r})], {tokens}, [None])")

    def see_segments(self, *prompts, tokens=6):
        """Answers to prompts that are served together: texts and images, with the lengths of segments or None."""
        asked, segments = [(parts,) for parts, _ in prompts], [lengths for _, lengths in prompts]
        return self.call("evaluate", f"server.see({asked!r}, {tokens}, {segments!r})")
