# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of docs/vllm-segments.md to the page's server. Segments are found in text and between messages, or
declared, and reused in another order. Prompts of new segments are answered as by an engine without the connector."""

import json
import re
import shlex
import time

import installed
import tiny_checkpoint
import torch
import yaml
from test_vllm_boundaries import CHATML
from test_vllm_quick_start import PAGE as QUICK_START
from test_vllm_quick_start import START, Terminals, commands, prints, wait_for
from tiny_engines import Child, same

PAGE = "docs/vllm-segments.md"
COMPUTED = 8 + 8  # tokens at the ends of a segment that every prompt computes
TEXT = 140  # characters; prompts of three texts fill no block of vLLM's own prefix cache, of 256 tokens
# Tiny models compute sooner than they load, and the machine may be busy.
PATIENT = dict(min_segment_tokens=16, tokens_per_second=1.0, call_ms=10000, land_ms=60000, lookup_ms=10000)


def texts(count):
    """Different passages of the licence."""
    whole = " ".join((installed.SOURCE / "LICENSE").read_text().split())
    return [whole[TEXT * i : TEXT * (i + 1)].strip() for i in range(10, 10 + count)]


def page_options():
    """The connector's options on the page: those of its server, and those in its text, such as `segments: true`."""
    (server,) = commands(PAGE, START["server"])
    found = json.loads(transfer_of(server.text)[1:-1])["kv_connector_extra_config"]
    for each in re.findall(r"`(segment\w*: [^`]+)`", (installed.SOURCE / PAGE).read_text()):
        found |= yaml.safe_load(each)
    return found


def transfer_of(line):
    """The transfer configuration of a server's command, in its quotes."""
    return re.search(r" --kv-transfer-config ('[^']*')", line)[1]


def body_of(line):
    """The JSON document that a `curl` command sends, in its quotes."""
    return re.search(r" -d ('[^']*')", line)[1]


class Asker:
    """Runs the page's `curl` commands, with other texts in their bodies."""

    def __init__(self, terminals, model):
        self._terminals, self._model, self._file = terminals, str(model), terminals.folder / "text.tokens"
        self._complete, self.metrics, self._declare, self._tokenize = commands(PAGE, "curl ")
        assert (
            json.loads(body_of(self._complete.text)[1:-1])["prompt"] == "TEXT<|file_sep|>OTHER TEXT<|file_sep|>QUESTION"
        )

    def _run(self, line, drop=(), **fields):
        body = json.loads(body_of(line)[1:-1])
        body = {name: value for name, value in body.items() if name not in drop} | {"model": self._model} | fields
        return self._terminals.run(line.replace(body_of(line), shlex.quote(json.dumps(body))))

    def tokens(self, text):
        self._run(self._tokenize.text.replace("text.tokens", str(self._file)), prompt=text)
        return json.loads(self._file.read_text())

    def complete(self, prompt):
        """Returns (tokens, log-probabilities, cached tokens). `prompt`: text or token ids."""
        choice, cached = self._ask(self._complete.text, prompt=prompt, logprobs=1)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached

    def declare(self, prompt, lengths):
        """Returns the number of cached tokens of a request that declares its segments' lengths."""
        (name,) = json.loads(body_of(self._declare.text)[1:-1])["kv_transfer_params"]
        return self._ask(self._declare.text, prompt=prompt, kv_transfer_params={name: lengths})[1]

    def chat(self, messages):
        line = self._complete.text.replace("/v1/completions", "/v1/chat/completions")
        choice, cached = self._ask(line, ["prompt"], messages=messages, logprobs=True)
        return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]], cached

    def _ask(self, line, drop=(), **fields):
        found = json.loads(self._run(line, drop, temperature=0, ignore_eos=True, return_token_ids=True, **fields))
        (choice,) = found["choices"]
        return choice, (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def wait_for_reuse(ask, wanted, seconds=240):
    """Asks new questions until this number of tokens comes from the cache: the server publishes while it is idle."""
    deadline, number = time.monotonic() + seconds, 0
    while (found := ask(f"Question {number}: what does it say?")[2]) != wanted:
        assert found < wanted and time.monotonic() < deadline, f"{found} cached tokens; expected {wanted}"
        number += 1
        time.sleep(0.5)


def test_the_pages_requests_reuse_segments_in_text_and_messages(tmp_path):
    model = tmp_path / "tiny"
    torch.manual_seed(0)
    special = ["<|file_sep|>", "<|im_start|>", "<|im_end|>"]
    for part in tiny_checkpoint.parts("qwen3_5", special, CHATML, initializer_range=0.1):
        part.save_pretrained(model)
    (daemon,), (server,) = commands(QUICK_START, START["daemon"]), commands(PAGE, START["server"])
    line = server.text.replace("MODEL", str(model)) + " --enable-prompt-tokens-details"
    line = line.replace("--gpu-memory-utilization 0.5", "--gpu-memory-utilization 0.2")
    transfer, options = transfer_of(line), page_options()
    assert options == {"segment_separator": "<|file_sep|>", "segment_boundaries": "messages"}, "they turn segments on"
    given = json.loads(transfer[1:-1]) | {"kv_connector_extra_config": options | PATIENT}

    terminals = Terminals(tmp_path)
    asker = Asker(terminals, model)
    system, one, other, new = texts(4)
    roles = {system: "system", one: "user", other: "assistant"}

    def text(parts, question):
        return asker.complete("<|file_sep|>".join([*parts, question]))

    def chat(parts, question):
        messages = [{"role": roles[each], "content": each} for each in parts]
        return asker.chat([*messages, {"role": "user", "content": question}])

    begun = {each: f"<|im_start|>{role}\n{each}<|im_end|>\n" for each, role in roles.items()}
    question = "Which licence?"
    rendered = "".join([*begun.values(), f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"])
    try:
        _, log = terminals.open("daemon", daemon.text)
        wait_for(log, "rpc_socket", None)
        process, log = terminals.open("server", line.replace(transfer, shlex.quote(json.dumps(given))))
        wait_for(log, "Application startup complete", process, 1500)
        exact = [ask([system, one, other], question) for ask in (text, chat)] + [asker.complete(f"{new} {one}")]
        assert [answer[2] for answer in exact] == [0, 0, 0]
        prompts = ["<|file_sep|>".join([system, one, other, question]), rendered, f"{new} {one}"]
        prompts = [asker.tokens(each) for each in prompts]

        lengths = {each: len(asker.tokens(f"{each}<|file_sep|>")) for each in roles}
        wanted = sum(lengths.values()) - 2 * COMPUTED
        wait_for_reuse(lambda question: text([system, other, one], question), wanted)
        assert text([new, one], "And this?")[2] == lengths[one] - COMPUTED, "at another position"
        ids = [
            asker.tokens(each)
            for each in (f"{system}<|file_sep|>", f"{other}<|file_sep|>", f"{one}<|file_sep|>", "As ids?")
        ]
        assert asker.complete(sum(ids, []))[2] == wanted, "token ids are those of the text"
        declared = "<|file_sep|>".join([system, other, one, "Declared?"])
        assert asker.declare(declared, [lengths[system], lengths[other]]) == wanted - lengths[one] + COMPUTED
        assert text([one, system], "Swapped?")[2] == 0, "a prompt's first text is cached separately"

        wanted = sum(len(asker.tokens(each)) for each in begun.values()) - 2 * COMPUTED
        wait_for_reuse(lambda question: chat([system, other, one], question), wanted)
        metrics = terminals.run(asker.metrics.text)
        assert prints(asker.metrics.output, metrics) and float(metrics.split()[-1]) > 0, metrics
        assert "expected one special or added token" not in log.read_text()
    finally:
        terminals.close()
    with Child(str(model), load_format="safetensors") as bare:
        same(exact, [bare.generate([tokens], 8)[0][:2] for tokens in prompts])
    assert len({tuple(tokens) for tokens, *_ in exact}) == 3, "an answer depends on its prompt"
