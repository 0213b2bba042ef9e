# SPDX-License-Identifier: Apache-2.0
"""Engines that operators change while they run: other weights in place, pauses, an end with requests under way."""

import time

from tiny_engines import Child, connector, count, prompt, same, saved

OTHER_WEIGHTS = """
def other(model):
    for each in model.parameters():
        if each.dim() > 1:
            each.data.copy_(each.data.flip(0))
llm.apply_model(other)
"""
# A request of these tokens, as far as some of its answer.
BEGIN = """
import vllm
sampling = vllm.SamplingParams(max_tokens={tokens}, temperature=0, ignore_eos=True, detokenize=False)
llm.llm_engine.add_request({name!r}, {{"prompt_token_ids": {text}}}, sampling)
for _ in range({steps}):
    llm.llm_engine.step()
"""


def test_behind_a_reset_nothing_of_former_weights_is_found(shared_daemon, engine, expected):
    text = prompt("reset", 600)
    with Child("qwen3", connector(shared_daemon)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        child.call("erase")
        child.generate([text])
        before = saved(child)
        assert before == 592
        child.call("execute", OTHER_WEIGHTS)
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        answer = child.generate([text])
        assert saved(child) == before and answer[0][1] != expected("qwen3", [text])[0][1]
        child.call("erase")
        same(child.generate([text]), [each[:2] for each in answer])
        assert saved(child) == before + 592, "what was stored behind it is found"
    other = engine("qwen3")
    other.call("erase")
    same(other.generate([text]), expected("qwen3", [text]))  # and by nobody else


def test_a_request_that_goes_on_over_a_reset_is_not_saved(shared_daemon):
    with Child("qwen3", connector(shared_daemon)) as child:
        text = prompt("reset within", 100)
        child.call("execute", BEGIN.format(name="long", text=text, tokens=200, steps=3))
        kept = "sum(len(save[1].tokens) for save in half._under_way.values()) + half._number"
        before = child.call("evaluate", f"(lambda half: {kept})(server.connector()._scheduler)")
        assert not child.call("evaluate", "server.connector().reset_cache()"), "its keys are of two sets of weights"
        child.call("execute", "while llm.llm_engine.has_unfinished_requests():\n    llm.llm_engine.step()")
        assert child.call("evaluate", f"(lambda half: {kept})(server.connector()._scheduler)") == before
        child.call("erase")
        assert child.call("evaluate", "server.connector().reset_cache()")


def probe(child, name, *args):
    return child.call("evaluate", f"__import__('segment_probe').{name}(server, *{args!r})")


def of_segments(daemon):
    return connector(daemon, segments=True, call_ms=10000, land_ms=20000, compose_ms=60000)


def test_segments_that_are_set_over_a_reset_are_left(shared_daemon):
    parts, query = [prompt(f"reset segments {i}", 100) for i in range(3)], prompt("reset query", 20)
    options = of_segments(shared_daemon)
    with Child("qwen3_5", options) as child:
        probe(child, "begin_to_set", "over", sum(parts, []) + query, [100] * 3)
        assert not child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)"), (
            "its blocks are being written"
        )
        child.call("execute", OTHER_WEIGHTS)
        probe(child, "go_on")
        assert count(child, "published_segments") == 0 and count(child, "load_failures") == 1
        child.call("erase")
        probe(child, "ask", sum(parts, []) + query, [100] * 3)
        assert count(child, "published_segments") == 3, "later ones are of the new weights, by their own name"
    with Child("qwen3_5", options) as child:
        probe(child, "ask", sum(parts, []) + query, [100] * 3)
        assert count(child, "published_segments") == 3, "nothing was kept by the name of the former weights"


def test_segments_that_were_set_when_the_reset_came_are_left(shared_daemon):
    parts, query = [prompt(f"set before a reset {i}", 100) for i in range(3)], prompt("reset query", 20)
    with Child("qwen3_5", of_segments(shared_daemon)) as child:
        probe(child, "begin_to_set", "over", sum(parts, []) + query, [100] * 3)
        probe(child, "end_unseen")
        assert not child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)"), "its blocks are in use"
        child.call("execute", OTHER_WEIGHTS)
        probe(child, "go_on")
        assert count(child, "load_failures") == 1 and count(child, "hits", "dram", "composed") == 0


def test_a_step_that_goes_wrong_is_no_reset(shared_daemon):
    parts, query = [prompt(f"no reset {i}", 100) for i in range(3)], prompt("reset query", 20)
    with Child("qwen3_5", of_segments(shared_daemon)) as child:
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        probe(child, "begin_to_set", "over", sum(parts, []) + query, [100] * 3)
        child.call(
            "execute",
            "from unittest import mock\nhalf = server.connector()._scheduler\n"
            "with mock.patch.object(half, 'step', side_effect=RuntimeError('as a test wants it')) as step:\n"
            "    llm.llm_engine.step()\nassert step.called",
        )
        probe(child, "go_on")
        assert count(child, "load_failures") == 0 and count(child, "hits", "dram", "composed") == 1


def test_an_engine_ends_with_requests_under_way(shared_daemon):
    with Child("qwen3", connector(shared_daemon)) as child:
        for i in range(3):
            text = prompt(f"shutdown {i}", 300)
            child.call("execute", BEGIN.format(name=f"under way {i}", text=text, tokens=200, steps=2))
        assert len(child.call("evaluate", "list(server.connector()._scheduler._followed)")) == 3
        said = "logging.getLogger('vllm.ashlar').handle = lambda record: server.said.append(record.getMessage())"
        child.call("execute", f"import logging\nserver.said = []\n{said}\nserver.connector().shutdown()")
        assert child.call("evaluate", "(server.said, server.connector()._scheduler)") == ([], None)
        child.call("execute", "while llm.llm_engine.has_unfinished_requests():\n    llm.llm_engine.step()")


def slowly(child, seconds):
    """Saves take so long, and steps do not wait for them."""
    child.call(
        "execute",
        "import time\nfrom vllm.distributed.kv_transfer import get_kv_transfer_group\nhalf = get_kv_transfer_group()._worker\n"
        f"real = half._commit\nhalf._commit = lambda *given: (time.sleep({seconds}), real(*given))[1]",
    )


def test_an_idle_engine_steps_on_until_its_saves_have_ended(shared_daemon):
    with Child("qwen3", {**connector(shared_daemon), "wait_for_saves": False}) as child:
        slowly(child, 0.3)
        child.generate([prompt("idle", 600)])
        assert not child.call("evaluate", "llm.reset_prefix_cache()"), "its blocks are being saved"
        assert child.call("evaluate", "server.core().scheduler.has_requests()")
        child.call("execute", "while server.core().scheduler.has_requests():\n    llm.llm_engine.step()")
        child.call(
            "execute", "server.core().pause_scheduler('abort', clear_cache=True)"
        )  # raises where blocks are held
        assert child.call("free_blocks") == 255


def test_an_idle_engine_waits_for_no_daemon_that_hangs(daemon):
    """Its blocks come back when the daemon does."""
    options = connector(daemon, call_ms=200, land_ms=200, quiet_ms=100)
    with Child("qwen3", options) as child:
        text = prompt("hangs", 600)
        child.generate([text])
        child.call("erase")
        child.call(
            "execute",
            "import ashlar\nserver.real = ashlar.Request.poll_finish\n"
            "ashlar.Request.poll_finish = lambda self: ashlar.Verdict.PENDING\n"
            "server.quiet = ashlar.Request.poll_quiet\nashlar.Request.poll_quiet = ashlar.Request.poll_finish",
        )
        child.generate([text])
        began = time.monotonic()
        child.call("execute", "while server.core().scheduler.has_requests():\n    llm.llm_engine.step()")
        assert time.monotonic() - began < 5 and child.call("free_blocks") < 255
        child.call(
            "execute",
            "import ashlar\nashlar.Request.poll_finish = server.real\nashlar.Request.poll_quiet = server.quiet",
        )
        child.generate([prompt("behind it", 20)])
        child.call("erase")
        assert child.call("free_blocks") == 255
