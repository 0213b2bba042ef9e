# SPDX-License-Identifier: Apache-2.0
"""vLLM's HTTP server with a tiny hybrid model, in a process of its own."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import tokenizers
from tiny_engines import model_folder, prompt


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    """`line`: the server's command, without the options that all tests share."""

    def __init__(self, environment, line, folder):
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        self._log = open(folder / "serve.log", "w")
        (folder / "own").mkdir()
        (folder / "own" / "sitecustomize.py").write_text(WIDE)
        paths = [str(folder / "own"), str(pathlib.Path(__file__).parent), environment.get("PYTHONPATH", "")]
        changed = dict(PYTHONPATH=":".join(filter(None, paths)), ASHLAR_WIDE_WEIGHTS="1", VLLM_SERVER_DEV_MODE="1")
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

    def signal(self, number):
        os.killpg(self._process.pid, number)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
