# SPDX-License-Identifier: Apache-2.0
"""Engines that operators change while they run: other weights in place, pauses, an end with requests in progress."""

import time

from segmented_engines import PATIENT, Segmented
from tiny_engines import Child, connector, count, prompt, same, saved

OTHER_WEIGHTS = """
def other(model):
    for each in model.parameters():
        if each.dim() > 1:
            each.data.copy_(each.data.flip(0))
llm.apply_model(other)
"""
# Begins a request of these tokens, up to a part of its answer.
BEGIN = """
import vllm
sampling = vllm.SamplingParams(max_tokens={tokens}, temperature=0, ignore_eos=True, detokenize=False)
llm.llm_engine.add_request({name!r}, {{"prompt_token_ids": {text}}}, sampling)
for _ in range({steps}):
    llm.llm_engine.step()
"""


def test_nothing_of_earlier_weights_is_found_after_a_reset(shared_daemon, engine, expected):
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
        assert saved(child) == before + 592, "objects stored after it are found"
    other = engine("qwen3")
    other.call("erase")
    same(other.generate([text]), expected("qwen3", [text]))  # and no other engine does


def test_a_request_that_continues_over_a_reset_is_not_saved(shared_daemon):
    with Child("qwen3", connector(shared_daemon)) as child:
        text = prompt("reset within", 100)
        child.call("execute", BEGIN.format(name="long", text=text, tokens=200, steps=3))
        kept = "sum(len(save[1].tokens) for save in half._under_way.values()) + half._number"
        before = child.call("evaluate", f"(lambda half: {kept})(server.connector()._scheduler._offers)")
        assert not child.call("evaluate", "server.connector().reset_cache()"), "its keys are of two sets of weights"
        child.call("execute", "while llm.llm_engine.has_unfinished_requests():\n    llm.llm_engine.step()")
        assert child.call("evaluate", f"(lambda half: {kept})(server.connector()._scheduler._offers)") == before
        child.call("erase")
        assert child.call("evaluate", "server.connector().reset_cache()")


def of_segments(daemon):
    return connector(daemon, segments=True, **PATIENT)


def test_segments_that_land_during_a_reset_are_dropped(shared_daemon):
    parts, query = [prompt(f"reset segments {i}", 100) for i in range(3)], prompt("reset query", 20)
    options = of_segments(shared_daemon)
    with Segmented("qwen3_5", options) as child:
        assert child.publish(parts) == 5
        child.probe("begin_to_land", "over", sum(parts, []) + query, [100] * 3)
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        child.call("execute", OTHER_WEIGHTS)
        child.probe("go_on")
        assert count(child, "jumps") == 0
        assert child.publish(parts) == 5, "later ones are of the new weights, by their own name"
        assert child.ask(parts, query)[2] > 0
    with Segmented("qwen3_5", options) as child:
        assert child.publish(parts) == 0, "nothing was kept in place of what the former weights had published"


def test_segments_that_landed_before_a_reset_are_dropped(shared_daemon):
    parts, query = [prompt(f"landed before a reset {i}", 100) for i in range(3)], prompt("reset query", 20)
    with Segmented("qwen3_5", of_segments(shared_daemon)) as child:
        child.publish(parts)
        child.probe("begin_to_land", "over", sum(parts, []) + query, [100] * 3)
        child.probe("land_unseen")
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        child.call("execute", OTHER_WEIGHTS)
        child.probe("go_on")
        assert count(child, "jumps") == 0


def test_a_jump_is_made_although_a_step_fails(shared_daemon):
    """The scheduler has already moved the request: without the jump its answer would be wrong."""
    parts, query = [prompt(f"wrong step {i}", 100) for i in range(3)], prompt("wrong step query", 20)
    with Segmented("qwen3_5", of_segments(shared_daemon)) as child:
        child.publish(parts)
        wanted = child.ask(parts, query, 1)
        child.call("erase")
        child.call(
            "execute",
            "half = server.connector()._scheduler\nown = half.step\n"
            "def step(output):\n"
            "    if any(prompt.jumping for prompt in half._jumps._prompts.values()):\n"
            "        server.failed = True\n"
            "        raise RuntimeError('as a test wants it')\n"
            "    return own(output)\n"
            "half.step = step",
        )
        assert child.ask(parts, query, 1)[:2] == wanted[:2]
        assert child.call("evaluate", "server.failed")


def test_a_failed_step_is_not_a_reset(shared_daemon):
    parts, query = [prompt(f"no reset {i}", 100) for i in range(3)], prompt("reset query", 20)
    with Segmented("qwen3_5", of_segments(shared_daemon)) as child:
        child.publish(parts)
        assert child.call("evaluate", "llm.reset_prefix_cache(reset_connector=True)")
        child.publish(parts)
        child.probe("begin_to_land", "over", sum(parts, []) + query, [100] * 3)
        child.call(
            "execute",
            "from unittest import mock\nhalf = server.connector()._scheduler\n"
            "with mock.patch.object(half, 'step', side_effect=RuntimeError('as a test wants it')) as step:\n"
            "    llm.llm_engine.step()\nassert step.called",
        )
        child.probe("go_on")
        assert count(child, "load_failures") == 0 and count(child, "jumps") == 3


def test_an_engine_ends_with_requests_in_progress(shared_daemon):
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
    """Makes saves take this long, while steps do not wait for them."""
    child.call(
        "execute",
        "import time\nfrom vllm.distributed.kv_transfer import get_kv_transfer_group\nhalf = get_kv_transfer_group()._worker\n"
        f"real = half._saves.commit\nhalf._saves.commit = lambda *given: (time.sleep({seconds}), real(*given))[1]",
    )


def test_an_idle_engine_steps_on_until_its_saves_have_ended(shared_daemon):
    with Child("qwen3", {**connector(shared_daemon), "wait_for_saves": False}) as child:
        slowly(child, 3)  # seconds, so that a busy machine asks while the blocks are being saved
        child.generate([prompt("idle", 600)])
        assert not child.call("evaluate", "llm.reset_prefix_cache()"), "its blocks are being saved"
        assert child.call("evaluate", "server.core().scheduler.has_requests()")
        child.call("execute", "while server.core().scheduler.has_requests():\n    llm.llm_engine.step()")
        child.call("execute", "server.core().pause_scheduler('abort', clear_cache=True)")  # raises if blocks are held
        assert child.call("free_blocks") == 255


def test_an_idle_engine_does_not_wait_for_a_hung_daemon(daemon):
    """The engine's blocks are released when the daemon returns."""
    options = connector(daemon, call_ms=200, land_ms=200, quiet_ms=100)
    with Child("qwen3", options) as child:
        text = prompt("hangs", 600)
        child.generate([text])
        child.call("erase")
        child.call(
            "execute",
            "import ashlar\nserver.real = ashlar.Request.poll_finish\n"
            "ashlar.Request.poll_finish = lambda self: ashlar.Verdict.PENDING\n"
            "server.quiet = ashlar.Request.poll_quiesced\nashlar.Request.poll_quiesced = ashlar.Request.poll_finish",
        )
        child.generate([text])
        began = time.monotonic()
        child.call("execute", "while server.core().scheduler.has_requests():\n    llm.llm_engine.step()")
        assert time.monotonic() - began < 5 and child.call("free_blocks") < 255
        child.call(
            "execute",
            "import ashlar\nashlar.Request.poll_finish = server.real\nashlar.Request.poll_quiesced = server.quiet",
        )
        child.generate([prompt("behind it", 20)])
        child.call("erase")
        assert child.call("free_blocks") == 255
