# SPDX-License-Identifier: Apache-2.0
"""An engine only finds pages of the same weights, with a known name, in the same form."""

import dataclasses
import json
from types import SimpleNamespace

import prometheus_client
import pytest

sglang = pytest.importorskip("sglang", reason="sglang is not installed (tools/engines-environment)")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups.fields.model import Model  # noqa: E402
from sglang.srt.arg_groups.fields.spec import Spec  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from test_hicache import PAGE, chain, kv_host, make, mamba_host, pages_of, store, trailing  # noqa: E402

from ashlar.pages import PageStore  # noqa: E402
from ashlar.sglang import storage  # noqa: E402
from ashlar.sglang.engine import FROM_FOLDER, Draft, Engine  # noqa: E402

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.fixture
def pools():
    return [(PoolName.KV, kv_host()), (PoolName.MAMBA, mamba_host())]


@pytest.fixture
def running(monkeypatch):
    """Publishes a model's configuration as SGLang's launcher does."""

    def publish(**fields):
        monkeypatch.setattr(runtime_context, "get_model", lambda: SimpleNamespace(**fields))

    return publish


def checkpoint(at, weights=b"1"):
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (at / "model.safetensors").write_bytes(weights)
    return str(at)


def found(daemon, pools, hashes, **options):
    options.setdefault("extra", {"weights_digest": ""})
    return make(daemon, pools, **options).batch_exists(hashes)


def test_names_match_sglangs_configuration():
    assert {field.name for field in dataclasses.fields(Engine)} <= set(Model.__struct_fields__)
    assert {field.name for field in dataclasses.fields(Draft)} <= set(Spec.__struct_fields__)
    assert Engine.here() == Engine() and Draft.here() == Draft(), "nothing is published in this process"


def test_only_the_same_checkpoint_is_shared_between_folders(daemon, pools, running, tmp_path):
    hashes = chain(range(PAGE * 2))
    running(model_path=checkpoint(tmp_path / "here" / "m"))
    store(make(daemon, pools, model="served as this", extra={"weights_digest": ""}), pools, hashes)
    assert found(daemon, pools, hashes, model="served as that") == 2
    running(model_path=checkpoint(tmp_path / "there" / "m"))
    assert found(daemon, pools, hashes) == 2, "neither the folder nor times of files name it"
    running(model_path=checkpoint(tmp_path / "other" / "m", weights=b"2"))
    assert found(daemon, pools, hashes) == 0


def test_unidentified_weights_store_nothing(daemon, pools, running):
    hashes = chain(range(PAGE * 2))
    for fields in (dict(model_path="org/name", revision=None), dict(model_path="org/name", revision="main"), {}):
        running(**fields)
        backend = make(daemon, pools, extra={"weights_digest": ""})
        assert backend.batch_set_v1(hashes, pages_of([0, 1])) == [False, False]
        assert backend.batch_exists(hashes) == 0
    running(model_path="org/name", revision=COMMIT)
    store(make(daemon, pools, extra={"weights_digest": ""}), pools, hashes)
    assert found(daemon, pools, hashes) == 2
    running(model_path="org/name", revision=COMMIT[::-1])
    assert found(daemon, pools, hashes) == 0


@pytest.mark.parametrize("load_format", ["dummy", "remote_instance", "ipc_cache", "presharded", "a_later_one"])
def test_weights_from_elsewhere_need_weights_digest(daemon, pools, running, tmp_path, load_format):
    running(model_path=checkpoint(tmp_path / "m"), load_format=load_format)
    backend = make(daemon, pools, extra={"weights_digest": ""})
    assert backend.batch_set_v1(chain(range(PAGE)), pages_of([0])) == [False]
    assert make(daemon, pools).batch_set_v1(chain(range(PAGE)), pages_of([0])) == [True], "by weights_digest"


def test_load_formats_match_sglangs():
    from sglang.srt.configs.load_config import LoadFormat

    assert FROM_FOLDER - {""} <= {each.value for each in LoadFormat}


def test_versions_and_quantisations_share_no_pages(daemon, pools, running, tmp_path, monkeypatch):
    hashes, place = chain(range(PAGE * 2)), checkpoint(tmp_path / "m")
    running(model_path=place, quantization=None, dtype="auto")
    store(make(daemon, pools, extra={"weights_digest": ""}), pools, hashes)
    for changed in (
        dict(quantization="fp8"),
        dict(dtype="float16"),
        dict(kv_cache_dtype="fp8_e4m3"),
        dict(modelopt_quant="fp8"),
        dict(modelopt_checkpoint_restore_path="/m"),
        dict(model_loader_extra_config='{"qlora_adapter_name_or_path": "/a"}'),
    ):
        running(**{**dict(model_path=place, quantization=None, dtype="auto"), **changed})
        assert found(daemon, pools, hashes) == 0, changed
    running(model_path=place, quantization=None, dtype="auto")
    assert found(daemon, pools, hashes) == 2
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    assert found(daemon, pools, hashes) == 0


@pytest.mark.parametrize("digest", ["", "1"])
def test_only_the_same_draft_model_shares_its_pages(daemon, pools, running, tmp_path, monkeypatch, digest):
    hashes = chain(range(PAGE * 2))
    pools = [pools[0], (PoolName.DRAFT, kv_host())]
    running(model_path=checkpoint(tmp_path / "m"))

    def backend(draft, **options):
        fields = dict(speculative_draft_model_path=draft)
        monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(**fields))
        return make(daemon, pools, extra={"weights_digest": digest}, **options)

    def pages(draft, **options):
        transfer = PoolTransfer(name=PoolName.DRAFT)
        return backend(draft, **options).batch_exists_v2(hashes, [transfer]).kv_hit_pages

    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other", weights=b"2")
    for options in ({}, dict(tp_size=2, is_mla_model=True)):
        transfers = [PoolTransfer(name, host_indices=pages_of([0, 1]), keys=hashes) for name, _ in pools]
        stored = backend(one, **options).batch_set_v2(transfers)
        assert stored == {PoolName.KV: [True] * 2, PoolName.DRAFT: [True] * 2}
        assert pages(one, **options) == 2 and pages(other, **options) == 0
        assert backend(other, **options).batch_exists(hashes) == 2, "the model's own pages"
    assert pages(one, tp_size=2, tp_rank=1, is_mla_model=True) == 0, "the draft model has no latents"


def test_the_models_configuration_gives_its_flops(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2}
    for config in (shape, {"model_type": "vision", "hidden_size": 8, "text_config": shape}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Engine(model_path=str(tmp_path)).flops_per_token("m") == 24 * 2 * 64**2
        assert Engine().flops_per_token(str(tmp_path)) == 24 * 2 * 64**2
    overrides = json.dumps({"text_config": {**shape, "num_hidden_layers": 3}})
    assert Engine(model_path=str(tmp_path), json_model_override_args=overrides).flops_per_token("m") == 24 * 3 * 64**2
    for unknown in ("org/never-loaded", "", "not/a/name", str(tmp_path / "none")):
        assert Engine(model_path=unknown).flops_per_token("") == 0
    for text in ("{", "[]", '{"hidden_size": "wide"}', '{"text_config": []}'):
        (tmp_path / "config.json").write_text(text)
        assert Engine(model_path=str(tmp_path)).flops_per_token("m") == 0


def test_each_pool_declares_the_flops_of_its_ranks_part(daemon, pools, running, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2}))
    running(model_path=str(tmp_path))
    declared = []

    def opened(*arguments, **options):
        declared.append(options["flops_per_token"])
        return PageStore(*arguments, **options)

    monkeypatch.setattr(storage, "PageStore", opened)
    for options in ({}, dict(tp_size=2), dict(tp_size=2, is_mla_model=True)):
        backend = make(daemon, pools, **options)
        for name, _ in pools:
            assert backend._store(name) is not None
    whole = 24 * 2 * 64**2
    assert declared == [whole, whole, whole / 2, whole / 2, whole, whole / 2], "all ranks have the same latents"


def test_counts_of_tokens_time_tier_and_kind(daemon, pools):
    backend = make(daemon, pools, extra={"tokens_per_second": 1e-3})
    hashes = chain(range(PAGE * 3))
    store(backend, pools, hashes, states=[2])
    backend.batch_get_v1([*hashes, "unknown"], pages_of(range(4)))
    backend._get_pages(PoolName.MAMBA, [hashes[2]], pools[1][1], [0])
    assert backend.batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 3
    counted = backend.get_stats().ashlar
    assert counted["loaded_pages", "dram", "keys"] == 3 and counted["loaded_pages", "dram", "states"] == 1
    assert counted["saved_tokens", "dram", "keys"] == 3 * PAGE and counted["saved_tokens", "dram", "states"] == 0
    assert counted["missed_pages", "never_seen"] == 1 and counted["stored_pages", "published"] == 4
    assert counted["load_seconds",] > 0 and counted["saved_seconds",] > 3 * PAGE * 900
    labels = dict(tp_rank="0", pp_rank="0", dp_rank="0", tier="dram", kind="keys")
    value = prometheus_client.REGISTRY.get_sample_value("sglang:ashlar_saved_tokens_total", labels)
    assert value >= 3 * PAGE, "where SGLang's Prometheus endpoint gathers it"
    assert backend.get_stats().ashlar == {}
