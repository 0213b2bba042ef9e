# SPDX-License-Identifier: Apache-2.0
"""Tiny models that take images, with a processor, a tokenizer of 512 words, and an engine that takes images."""

import json

from tiny_engines import Child
from tiny_models import COMMON, CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
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
        text_config=dict(
            HYBRID, rope_parameters=dict(HYBRID["rope_parameters"], mrope_section=[2, 1, 1], mrope_interleaved=True)
        ),
        vision_config=dict(VISION, model_type="qwen3_5"),
    ),
}
ASK = """
import numpy, vllm
from PIL import Image
def picture(seed):
    return Image.fromarray(numpy.random.RandomState(seed).randint(0, 256, (256, 192, 3), dtype="uint8"))
def see(parts, tokens, uuids):
    ids, pictures = [], []
    for part in parts:
        pictures += [picture(part)] if isinstance(part, int) else []
        ids += [508, 509, 510] if isinstance(part, int) else part
    media = dict(multi_modal_data=dict(image=pictures)) if pictures else {}
    media |= dict(multi_modal_uuids=dict(image=uuids)) if uuids else {}
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=tokens)
    best = llm.generate([dict(prompt_token_ids=ids, **media)], sampling, use_tqdm=False)[0].outputs[0]
    return [(list(best.token_ids), [each[token].logprob for each, token in zip(best.logprobs, best.token_ids)])]
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


class Seeing(Child):
    def __init__(self, folder, *connectors, **options):
        limits = dict(limit_mm_per_prompt={"image": 4, "video": 0}, num_gpu_blocks_override=128)
        super().__init__(
            folder, *connectors, skip_tokenizer_init=False, enable_prefix_caching=True, **limits, **options
        )
        self.call("execute", ASK)

    def see(self, *parts, tokens=6, uuids=None):
        """Answer to texts and images; an int is the seed of an image. The engine's own cache is erased before."""
        self.call("erase")
        return self.call("evaluate", f"server.see({parts!r}, {tokens}, {uuids!r})")
