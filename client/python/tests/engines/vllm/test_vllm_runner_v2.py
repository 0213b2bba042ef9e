# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2, the default on GPUs: tests of prefixes and segments with engines that use it."""

import os

import engine_fixtures
import pytest
import test_vllm_faults
import test_vllm_prefixes
import test_vllm_segments
from model_runner_v2 import ENVIRONMENT
from tiny_engines import BLOCK, CLOSE, PAIR, Child, connector, count, prompt, same, saved

import ashlar.daemon


@pytest.fixture(scope="module", autouse=True)
def runner():
    """Sets environment variables that later engines inherit."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    yield
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def shared_daemon(runner, tmp_path_factory):
    with ashlar.daemon.start(dram="512MiB", arena="8MiB", folder=str(tmp_path_factory.mktemp("daemon"))) as running:
        yield running


@pytest.fixture(scope="module")
def expected(runner):
    yield from engine_fixtures.answers()


@pytest.fixture(scope="module")
def engine(shared_daemon):
    yield from engine_fixtures.cached(shared_daemon)


@pytest.fixture(scope="module")
def segmented(shared_daemon):
    yield from engine_fixtures.segmented(shared_daemon)


def test_engines_use_the_runner(engine):
    child = engine("qwen3")
    used = child.call("evaluate", "type(server.core().model_executor.driver_worker.worker.model_runner).__mro__[1]")
    assert used.__module__ == "vllm.v1.worker.gpu.model_runner"
    assert child.call("evaluate", "server.core().batch_queue_size") == 2, "steps are scheduled ahead"


@pytest.mark.parametrize("model", [*PAIR, "ministral", "granite", "lfm2"])
def test_prefixes(model, engine, expected):
    test_vllm_prefixes.test_the_second_request_is_resumed_with_the_same_answer(model, engine, expected)


def test_failed_loads(engine, expected):
    test_vllm_faults.test_a_plan_of_another_version_is_computed_instead("qwen3_5", engine, expected)


def test_decoded_tokens(engine, expected, shared_daemon, model="granite", new=20):
    """The state after decoded tokens is saved when the request ends. Another engine resumes from it."""
    text = prompt("decoded", BLOCK[model] + 20)
    ((answer, logs),) = expected(model, [text], new)
    same(engine(model).generate([text], new), [(answer, logs)])
    engine(model).call("erase")  # steps until the save has ended
    longer = text + answer + prompt("next turn", 25)
    with Child(model, connector(shared_daemon)) as other:
        same(other.generate([longer]), expected(model, [longer]), CLOSE)
        assert saved(other) == len(text + answer) - 1


def test_chunked_prefill(shared_daemon, expected, model="qwen3_5"):
    texts = [prompt(f"chunks {i}", 2 * BLOCK[model] + 20 * i) for i in range(3)]
    wanted = expected(model, texts)
    with Child(model, connector(shared_daemon), max_num_batched_tokens=BLOCK[model]) as child:
        for rounds in range(2):
            before = saved(child)
            same(child.generate(texts), wanted, CLOSE)
            assert (saved(child) - before >= 3 * BLOCK[model]) == (rounds > 0)
            child.call("erase")
        assert count(child, "load_failures") == 0


def test_preemption(shared_daemon, expected):
    test_vllm_prefixes.test_preempted_requests_resume_with_the_same_answer("qwen3_5", shared_daemon, expected)


def test_segments(segmented, expected):
    test_vllm_segments.test_segments_are_found_in_any_order_and_at_any_position("qwen3_5", segmented, expected)


def test_segments_in_several_steps(shared_daemon, segmented):
    test_vllm_segments.test_a_prompt_longer_than_a_step_is_taken_in_several(shared_daemon, segmented)
