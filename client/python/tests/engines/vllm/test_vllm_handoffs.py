# SPDX-License-Identifier: Apache-2.0
"""A prefill engine on one node hands prompts off to a decode engine on another one."""

import contextlib
import os
import pathlib
import shutil
import sys
import time

import pytest
from tiny_engines import Child, connector, prompt, same

import ashlar.daemon
from ashlar.vllm.handoffs import handed_depths

sys.path.insert(0, str(pathlib.Path(os.environ["ASHLAR_SOURCE"], "tests/deploy")))
import fleet
import monitoring

TOKENS = 600
REQUEST = """
import vllm
def handed(prompts, node):
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=1,
                                   extra_args={"kv_transfer_params": {"ashlar_handoff": node}})
    llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
server.handed = handed
"""


@contextlib.contextmanager
def two_nodes(folder):
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    etcd = fleet.Etcd(folder)
    try:
        with contextlib.ExitStack() as stack:
            nodes = []
            for name in ("prefill", "decode"):
                cluster = {
                    "node": name,
                    "control_address": f"127.0.0.1:{monitoring.free_port()}",
                    "transport_address": f"127.0.0.1:{monitoring.free_port()}",
                    "tls": {"insecure": True},
                    "etcd": {"endpoints": [etcd.address]},
                }
                options = dict(dram="128MiB", arena="8MiB", folder=str(folder / name), config={"cluster": cluster})
                nodes.append(stack.enter_context(ashlar.daemon.start(**options)))
            yield nodes
    finally:
        etcd.stop()


def outcomes(child):
    return {labels[0]: value for (name, labels), value in child.call("metrics").items() if name == "handoffs"}


def handoff(child, text, node, wanted, seconds=60):
    """Sends the prompt until the outcome is as wanted. Returns the outcomes."""
    deadline = time.monotonic() + seconds
    while True:
        child.call("erase")
        child.call("evaluate", f"server.handed([{text}], {node!r})")
        child.call("erase")  # steps while the connector has work
        settled = time.monotonic() + 3
        while not outcomes(child) and time.monotonic() < settled:
            time.sleep(0.05)
            child.generate([[1, 2, 3]], 1)
        if wanted in outcomes(child) or time.monotonic() > deadline:
            return outcomes(child)


def test_the_prompt_and_its_continuations_resume():
    assert handed_depths([256, 512, 592, 600, 640], 600) == [592, 600, 640]
    assert handed_depths([600], 600) == [600]
    assert handed_depths([384, 384], 600) == [384]
    assert handed_depths([], 600) == []


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])
def test_a_decode_engine_resumes_what_a_prefill_engine_handed_off(model, tmp_path, expected):
    text = prompt(f"{model} handed", TOKENS)
    answer = expected(model, [text])
    with two_nodes(tmp_path) as (first, second), Child(model, connector(first)) as prefill:
        prefill.call("execute", REQUEST)
        with Child(model, connector(second)) as decode:
            assert "completed" in (found := handoff(prefill, text, "decode", "completed")), found
            first.kill()  # nothing can be fetched any more: what resumes is in the decode node's memory
            found = decode.generate([text])
            same(found, answer)
            assert found[0][2] >= TOKENS // 2, "the prompt resumes"
            hits = [labels for name, labels in decode.call("metrics") if name == "hits"]
            assert hits and all("dram" in labels for labels in hits), hits


def test_a_handoff_that_fails_changes_no_answer(tmp_path, expected):
    text = prompt("handed off to an unknown node", TOKENS)
    answer = expected("qwen3", [text])
    with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        with Child("qwen3", connector(daemon)) as child:
            child.call("execute", REQUEST)
            found = handoff(child, text, "nowhere", "unavailable")
            assert set(found) == {"unavailable"}
            child.call("evaluate", f"server.handed([{text}], 3)")  # a warning, and no handoff
            same(child.generate([text]), answer)
