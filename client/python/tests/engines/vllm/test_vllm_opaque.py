# SPDX-License-Identifier: Apache-2.0
"""Opaque layers: prefixes of any vLLM spec are served, tested with its own block tensors and without an engine."""

import dataclasses
import types

import pytest
import torch
from driven_specs import config_of, describe, drive
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import ashlar
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.segments import unsupported

BF16, F32 = torch.bfloat16, torch.float32
HEADS = dict(block_size=128, num_kv_heads=2, head_size=32, dtype=BF16)
FULL = FullAttentionSpec(**HEADS)
LATENT = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=96, dtype=BF16)


def states(backend, *shapes, dtypes=(BF16, F32), **rest):
    return MambaSpec(
        block_size=128,
        shapes=shapes,
        dtypes=dtypes[: len(shapes)],
        mamba_type=backend,
        mamba_cache_mode="align",
        **rest,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InventedSpec(KVCacheSpec):
    """A layer unknown to vLLM and the connector: three bytes and a sum of squares per token."""

    sums: int = 4

    @property
    def page_size_bytes(self):
        return self.block_size * (3 + 8 * self.sums)

    num_heads = 1
    tokens_per_state = 1

    @property
    def state_content_size_bytes(self):
        return 3 + 8 * self.sums


register_all_kvcache_specs(None)  # vLLM first does this for its own specs
KVCacheSpecRegistry.register(InventedSpec, FullAttentionManager)

MODELS = {
    "latent": {"model.layers.0.attn": LATENT, "model.layers.1.attn": LATENT},
    "kda": {
        "model.layers.0.kda": states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)),
        "model.layers.1.attn": LATENT,
    },
    "lightning": {
        "model.layers.0.attn": states(Backend.LINEAR, (4, 32, 32), dtypes=(F32,)),
        "model.layers.1.attn": LATENT,
    },
    "mamba1": {"model.layers.0.mixer": states(Backend.MAMBA1, (3, 128), (128, 16)), "model.layers.1.attn": FULL},
    "mamba2": {"model.layers.0.mixer": states(Backend.MAMBA2, (3, 192), (8, 16, 32)), "model.layers.1.attn": FULL},
    "states alone": {"model.layers.0.mixer": states(Backend.MAMBA2, (3, 192), (8, 16, 32))},
    "chunks": {
        "model.layers.0.attn": ChunkedLocalAttentionSpec(attention_chunk_size=320, **HEADS),
        "model.layers.1.attn": FULL,
    },
    "windows": {"model.layers.0.attn": SlidingWindowSpec(sliding_window=200, **HEADS), "model.layers.1.attn": FULL},
    "windows alone": {"model.layers.0.attn": SlidingWindowSpec(sliding_window=200, **HEADS)},
    "windows of latents": {
        "model.layers.0.attn": SlidingWindowMLASpec(
            sliding_window=200, block_size=128, num_kv_heads=1, head_size=96, dtype=BF16
        ),
        "model.layers.1.attn": LATENT,
    },
    "quantised": {
        "model.layers.0.attn": FullAttentionSpec(
            **HEADS | dict(dtype=torch.int8), kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=72
        ),
        "model.layers.1.attn": FULL,
    },
    "invented": {"model.layers.0.mystery": InventedSpec(block_size=128), "model.layers.1.attn": FULL},
    "invented alone": {"model.layers.0.mystery": InventedSpec(block_size=128, sums=1)},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [128, 384, 640])
def test_blocks_are_restored_byte_for_byte(model, tokens, shared_daemon):
    assert drive(MODELS[model], shared_daemon, name=f"bytes {model} {tokens}", tokens=tokens) == (True, True)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BLNHC"])
def test_blocks_are_restored_in_every_page_order(layout, shared_daemon):
    assert drive(MODELS["latent"], shared_daemon, name=f"order {layout}", layout=layout) == (True, True)
    assert drive(MODELS["quantised"], shared_daemon, name=f"quantised {layout}", layout=layout) == (True, True)


def test_blocks_of_several_kernel_blocks_are_restored(shared_daemon):
    for model in ("latent", "windows", "chunks"):
        assert drive(MODELS[model], shared_daemon, name=f"split {model}", kernel_blocks=4) == (True, True)


def test_delta_nets_are_restored_as_their_own_kind(shared_daemon):
    gdn = states(Backend.GDN_ATTN, (3, 192), (4, 16, 16))
    specs = {"model.layers.0.gdn": gdn, "model.layers.1.attn": FULL}
    text = types.SimpleNamespace(linear_num_key_heads=4)
    assert drive(specs, shared_daemon, name="delta nets", text=text) == (True, True)


def test_blocks_in_several_pieces_are_refused_with_a_remedy(shared_daemon):
    scattered = {f"model.layers.{i}.attn": MODELS["quantised"]["model.layers.0.attn"] for i in range(2)}
    with pytest.raises(Unsupported, match="layers.0.attn: .* not in one piece; set VLLM_KV_CACHE_LAYOUT to LBNHC"):
        drive(scattered, shared_daemon, layout="BHLNC")


def test_delta_nets_and_attention_keep_their_kinds():
    gdn = states(Backend.GDN_ATTN, (3, 512), (4, 64, 64))
    config = config_of({"model.layers.0.gdn": gdn, "model.layers.1.attn": FULL})
    described = describe(config, text=types.SimpleNamespace(linear_num_key_heads=2))
    assert [type(layer) for layer in described.model.layers] == [ashlar.Linear, ashlar.Attention]
    assert not unsupported(described)


def test_kda_is_opaque_although_vllm_types_it_as_a_gated_delta_net():
    kda = states(Backend.GDN_ATTN, (3, 192), (4, 16, 16))
    described = describe(config_of({"model.layers.0.kda": kda, "model.layers.1.attn": FULL}))
    assert described.model.layers[0] == ashlar.Opaque(state_bytes=2 * 3 * 192 + 4 * 4 * 16 * 16)


def test_opaque_layers_have_no_segments():
    gdn = states(Backend.GDN_ATTN, (3, 512), (4, 64, 64))
    config = config_of({"model.layers.0.gdn": gdn, "model.layers.1.attn": LATENT})
    described = describe(config, text=types.SimpleNamespace(linear_num_key_heads=2))
    assert [type(layer) for layer in described.model.layers] == [ashlar.Linear, ashlar.Opaque]
    assert unsupported(described)


def test_delta_nets_in_float16_have_no_segments_on_a_cpu():
    """On a CPU, vLLM 0.33 computes these layers by Triton kernels."""
    gdn = states(Backend.GDN_ATTN, (3, 512), (4, 64, 64), dtypes=(torch.float16, F32))
    config = config_of({"model.layers.0.gdn": gdn, "model.layers.1.attn": FULL})
    text = types.SimpleNamespace(linear_num_key_heads=2)
    assert unsupported(describe(config, text=text)) == "gated delta nets in float16 only on GPUs"
    assert not unsupported(describe(config, text=text, packed=False))


def test_only_layers_with_bytes_per_token_cost_the_square_of_a_prompt():
    kda = states(Backend.GDN_ATTN, (3, 192), (4, 16, 16))
    described = describe(
        config_of({"model.layers.0.kda": kda, "model.layers.1.kda": kda, "model.layers.2.mla": LATENT})
    )
    width = (described.model.flops_per_token / (24 * 3)) ** 0.5
    assert described.model.flops_per_token_squared == 2 * width
    plain = describe(config_of({"model.layers.0.attn": FULL})).model
    assert (plain.flops_per_token, plain.flops_per_token_squared) == (0, 0), "the daemon derives them from the layout"


@pytest.mark.parametrize(
    "change", [dict(alignment=64), dict(non_causal_multi_token_decode=True), dict(cache_dtype_str="fp8_ds_mla")]
)
def test_specs_that_differ_in_any_field_share_nothing(change, shared_daemon):
    """Their layouts are equal, so the model's name in the cache must contain all fields."""
    other = {name: dataclasses.replace(spec, **change) for name, spec in MODELS["latent"].items()}
    one, two = (describe(config_of(specs)) for specs in (MODELS["latent"], other))
    assert one.model.layers == two.model.layers
    assert one.identity.weights_digest() != two.identity.weights_digest()


@pytest.mark.parametrize(
    "spec, reason",
    [
        (SinkFullAttentionSpec(sink_len=4, **HEADS), "SinkFullAttentionSpec is managed by SinkFullAttentionManager"),
        (CrossAttentionSpec(**HEADS), "CrossAttentionSpec is managed by CrossAttentionManager"),
        (CircularBufferSpec(**HEADS), "CircularBufferSpec is managed by CircularBufferManager"),
        (
            SlidingWindowMLASpec(
                sliding_window=200, block_size=128, num_kv_heads=1, head_size=96, dtype=BF16, bounded_replay=True
            ),
            "vLLM takes no prefixes of SlidingWindowMLASpec",
        ),
        (FullAttentionSpec(non_causal=True, **HEADS), "keys of non-causal attention"),
        (states(Backend.MAMBA1, (3, 128), (128, 16), num_speculative_blocks=2), "2 tensors of MAMBA1 .* after drafts"),
        (
            states(Backend.MAMBA2, (5, 192), (8, 16, 32), (8, 16, 16), dtypes=3 * (F32,), num_speculative_blocks=2),
            "3 tensors of MAMBA2 are not supported after drafts",
        ),
    ],
)
def test_unsafe_layers_are_refused_by_name_with_a_remedy(spec, reason):
    with pytest.raises(Unsupported, match=f"model.layers.0.attn: .*{reason}|model.layers.0.attn: {reason}") as refused:
        describe(config_of({"model.layers.0.attn": spec, "model.layers.1.attn": FULL}))
    assert "; " in str(refused.value), "with a remedy"
