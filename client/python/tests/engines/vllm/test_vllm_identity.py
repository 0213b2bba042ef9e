"""How the connector names a model: one name for one checkpoint, wherever it lies, and another one for any other."""

import hashlib
import json
import pathlib
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import vllm
from tiny_engines import CONFIGS, Child, connector, model_folder, prompt, same, saved
from vllm.config import ModelConfig
from vllm.transformers_utils import repo_utils

import ashlar.vllm
from ashlar.vllm.model import Unsupported, _model_id, check_version, tokenizer_digest, weights_digest

COMMITS = ["607a30d783dfa663caf39e06633721c8d4cfcd7e", "0123456789abcdef0123456789abcdef01234567"]


def folder(at, weights=b"weights", tokens="{}"):
    """A checkpoint with a file of weights and a tokenizer."""
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    (at / "model.safetensors").write_bytes(weights * 4096)
    (at / "tokenizer.json").write_text(tokens)
    return str(at)


def names(place, given=""):
    model = ModelConfig(model=place, skip_tokenizer_init=True, dtype="bfloat16")
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto"))
    return _model_id(model), weights_digest(config, given), tokenizer_digest(model)


def test_a_checkpoint_has_one_name_in_every_folder(tmp_path):
    first = names(folder(tmp_path / "here" / "model"))
    assert names(folder(tmp_path / "there" / "model")) == first
    assert names(folder(tmp_path / "model of another name"))[1:] == first[1:], "model_id alone has to be given"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "here" / "model")
    assert names(str(link)) == first
    others = [
        names(folder(tmp_path / "1" / "model", weights=b"weighty")),
        names(folder(tmp_path / "2" / "model", tokens='{"a": 1}')),
        names(str(tmp_path / "here" / "model"), given="finetuned"),
    ]
    assert len({first, *others}) == 4
    assert others[1][2] != first[2] and others[0][2] == first[2]


def test_engines_with_the_model_in_different_folders_share(shared_daemon, engine, expected, tmp_path):
    text = prompt("folders", 600)
    engine("qwen3").generate([text])
    here = pathlib.Path(model_folder("qwen3"))
    shutil.copytree(here, tmp_path / here.name)
    with Child(str(tmp_path / here.name), connector(shared_daemon)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 512


def hub(revision, given=""):
    model = SimpleNamespace(model="org/name", revision=revision, hf_config=SimpleNamespace(to_dict=dict))
    return weights_digest(SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto")), given)


def test_a_hubs_model_is_named_by_the_commit_that_vllm_resolved(tmp_path, monkeypatch):
    """As `vllm serve org/name` has it: a text "main", and its commit beside it."""
    folders = tmp_path / "models--org--name"
    (folders / "refs").mkdir(parents=True)
    found = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in COMMITS:
        (folders / "refs" / "main").write_text(commit)
        (folders / "snapshots" / commit).mkdir(parents=True)
        revision = repo_utils.resolve_revision("org/name", None)
        assert revision == "main" and revision.resolved == commit, "vLLM's own way of resolving"
        found.append(hub(revision))
        assert hub(commit) == found[-1]
        model = SimpleNamespace(tokenizer="org/name", tokenizer_revision=revision)
        assert tokenizer_digest(model) == f"org/name {commit}"
    assert found[0] != found[1]
    for revision in (None, "main"):
        with pytest.raises(Unsupported, match="org/name: no folder, and its revision is no commit"):
            hub(revision)
    assert hub(None, given="1") != hub(None, given="2")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.33.0rc1", "1.0", "dev"])
def test_other_versions_of_vllm_are_served_without_the_cache(version, monkeypatch, shared_daemon, expected):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(Unsupported, match=rf"vllm: version {version} is installed, and ashlar knows 0\.32 to below 0\.33"):
        check_version()
    if version == "0.33.0":
        text = prompt("other vllm", 600)
        with Child("qwen3", connector(shared_daemon)) as child:
            for _ in range(2):
                child.call("forget")
                same(child.generate([text]), expected("qwen3", [text]))
            assert child.call("metrics") == {}


def test_the_versions_that_the_page_names_are_accepted(monkeypatch):
    for version in ("0.32.0", "0.32.4.dev3+cpu", vllm.__version__):
        monkeypatch.setattr(vllm, "__version__", version)
        check_version()


def test_a_vllm_without_the_connectors_interface_is_refused_with_the_range(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.20.0")

    def missing():
        raise ImportError("cannot import name 'SupportsHMA'")

    with pytest.raises(ImportError, match=r"vllm: version 0\.20\.0 is installed, and ashlar knows 0\.32"):
        ashlar.vllm._imported(missing)
    monkeypatch.undo()
    with pytest.raises(ImportError, match="cannot import name 'SupportsHMA'"):
        ashlar.vllm._imported(missing)


# Digests of all that the models' names in the cache are made of.
NAMES = {
    "qwen3": "482e8ee08f9b16e5",
    "qwen3_5": "c6f9d61f604b1795",
    "qwen3_next": "459ced76d547007d",
    "ministral": "26b40e951959da8d",
    "gpt_oss": "db22319b0d9e372d",
    "ministral_whole": "59ce67cf98454268",
    "granite": "b234f0a066dd7346",
    "falcon_h1": "4c307212b8dfa19d",
    "nemotron_h": "d80fd707726466f6",
    "lfm2": "6c806be921ada6dc",
}
DESCRIBE = """
import dataclasses, unittest.mock as mock, torch, vllm
from ashlar.vllm.model import describe
from ashlar.vllm.options import Options
with mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "of any processor"), \\
     mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False), mock.patch.object(vllm, "__version__", "0.32.0"):
    described = describe(llm.llm_engine.vllm_config, server.core().scheduler.kv_cache_config, Options(), 0)
server.name = repr(dataclasses.replace(described.model, flops_per_token=0, flops_per_token_squared=0))
"""


@pytest.mark.parametrize("model", NAMES)
def test_what_is_cached_of_a_model_keeps_its_name(model, engine):
    """Another name, and a release would find nothing of what the one before it had cached."""
    child = engine(model)
    child.call("execute", DESCRIBE)
    text = child.call("evaluate", "server.name")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == NAMES[model], text
