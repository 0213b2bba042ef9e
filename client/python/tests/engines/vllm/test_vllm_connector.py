# SPDX-License-Identifier: Apache-2.0
"""What the connector reports to the engine, the daemon and the log."""

import time

from tiny_engines import BLOCK, Child, connector, count, prompt, same, saved

import ashlar.vllm.model

SAID = (
    "import logging\nserver.said = []\n"
    "logging.getLogger('vllm.ashlar').handle = lambda record: server.said.append(record.getMessage())"
)
OTHER_PLANS = (
    "import ashlar\nreal = ashlar.Request.plan_bytes\n"
    "ashlar.Request.plan_bytes = lambda self: real(self)[:4] + b'\\x63' + real(self)[5:]"
)


def within_multi(daemon):
    ours = dict(kv_connector="AshlarConnector", kv_connector_module_path="ashlar.vllm", kv_role="kv_both",
                kv_connector_extra_config=connector(daemon))  # fmt: skip
    return dict(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [ours]})


def test_a_failed_load_is_computed_within_multi_connector(shared_daemon, expected):
    """vLLM's default ends the request without tokens, and the engine reads MultiConnector's configuration."""
    text = prompt("multi", 600)
    with Child("qwen3", transfer=within_multi(shared_daemon)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        child.call("erase")
        same(child.generate([text]), expected("qwen3", [text]))
        child.call("execute", OTHER_PLANS)
        child.call("erase")
        same(child.generate([text]), expected("qwen3", [text]))
        assert child.call("evaluate", "server.core().scheduler.recompute_kv_load_failures")


def test_engines_of_other_lengths_share_nothing_under_longrope(shared_daemon):
    """Phi-3 uses different frequencies below and above its training length."""
    text = prompt("longrope", 600)
    with Child("phi3", connector(shared_daemon), max_model_len=1024) as child:
        short = child.generate([text])
        child.call("erase")
        same(child.generate([text]), [each[:2] for each in short], 2e-2)
        assert saved(child) == 592
    with Child("phi3", connector(shared_daemon), max_model_len=4096) as child:
        long = child.generate([text])
        assert saved(child) == 0 and long[0][1] != short[0][1]


def test_a_model_that_writes_into_its_configuration_is_found_across_processes(shared_daemon, monkeypatch):
    """MiniMax-M2 and Llama-4 do this while they are loaded, and the scheduler's process does not see it."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    own = Qwen3ForCausalLM.__init__

    def write(self, *, vllm_config, prefix=""):
        vllm_config.model_config.hf_config.max_model_len = vllm_config.model_config.max_model_len
        own(self, vllm_config=vllm_config, prefix=prefix)

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", write)
    text = prompt("writes", 600)
    with Child("qwen3", connector(shared_daemon), tensor_parallel_size=2) as child:
        child.generate([text])
        child.call("erase")
        child.generate([text])
        assert saved(child) == 592


def test_halves_with_different_model_names_are_reported(shared_daemon, expected, monkeypatch):
    own, names = ashlar.vllm.model.identify, iter(["one", "two", "three"])
    monkeypatch.setattr(ashlar.vllm.model, "identify", lambda *args: own(*args[:2], {**args[2], "form": next(names)}))
    text = prompt("different names", 600)
    with Child("qwen3", connector(shared_daemon)) as child:
        child.call("execute", SAID)
        for _ in range(2):
            child.call("erase")
            same(child.generate([text]), expected("qwen3", [text]))
        said = [text for text in child.call("evaluate", "server.said") if "differ" in text]
        wanted = "Ashlar (scheduler): the cache is off in this engine (disagreement): scheduler and worker differ in layout.form"
        assert len(said) == 1 and said[0].startswith(wanted)
        assert saved(child) == 0


def test_lookups_after_a_late_one_are_counted(shared_daemon):
    with Child("qwen3", connector(shared_daemon, lookup_ms=50)) as child:
        child.call("execute", SAID)
        child.call(
            "execute",
            "import ashlar\nserver.real = ashlar.Request.poll_plan\n"
            "ashlar.Request.poll_plan = lambda self: ashlar.Verdict.PENDING",
        )
        child.generate([prompt("late 0", 300)], 1)
        child.generate([prompt(f"late {i}", 300) for i in range(1, 4)], 1)
        child.call("execute", "import ashlar\nashlar.Request.poll_plan = server.real")
        assert (count(child, "lookups", "timed_out"), count(child, "lookups", "paused")) == (1, 3)
        said = child.call("evaluate", "server.said")
        assert len([text for text in said if "a lookup took longer than lookup_ms (50 ms)" in text]) == 1


def test_the_daemon_receives_the_engines_prefill_rate(shared_daemon):
    with Child("qwen3", connector(shared_daemon, tokens_per_second=0.0)) as child:
        half = "server.connector()._scheduler"
        deadline = time.monotonic() + 20
        while child.call("evaluate", f"{half}._opening.cache.model.tokens_per_second") == 0:
            assert time.monotonic() < deadline
            child.generate([prompt(f"pace {time.monotonic()}", 300)], 2)
        model = child.call("evaluate", f"{half}._opening.cache.model")
        assert 1 < model.tokens_per_second < 1e7 and model.flops_per_token == 0, (
            "the daemon derives these from the layout"
        )
        before = count(child, "stores", "kept")
        while count(child, "stores", "kept") == before:
            assert time.monotonic() < deadline, "the cache goes on"
            child.generate([prompt(f"after the pace {time.monotonic()}", 300)], 1)


COMMITS = """
import ashlar
server.commits, own = [], ashlar.Cache.commit
def commit(self, tokens, *args, prompt_tokens=None, **kwargs):
    server.commits.append((len(tokens), prompt_tokens))
    return own(self, tokens, *args, prompt_tokens=prompt_tokens, **kwargs)
ashlar.Cache.commit = commit
"""


def test_a_steps_end_is_distinguished_from_a_prompts_end(shared_daemon):
    block = BLOCK["qwen3_5"]
    with Child("qwen3_5", connector(shared_daemon), max_num_batched_tokens=block, max_model_len=2048) as child:
        child.call("execute", COMMITS)
        child.generate([prompt("ends", 2 * block + 50)], block)
        child.call("erase")
        prompt_end = 2 * block + 50
        assert child.call("evaluate", "server.commits") == [
            (depth, prompt_end) for depth in (block, 2 * block, prompt_end, 3 * block, prompt_end + block - 1)
        ]
