# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2, the default on GPUs: tests of prefixes and segments with engines that use it."""

import os

import engine_fixtures
import pytest
import test_vllm_adapters
import test_vllm_faults
import test_vllm_images
import test_vllm_prefixes
import test_vllm_ranks
import test_vllm_reloads
import test_vllm_resets
import test_vllm_segment_families
import test_vllm_segment_images
import test_vllm_segments
import test_vllm_windows
from model_runner_v2 import ENVIRONMENT
from test_vllm_speculative import COMMITTED, drafts
from tiny_engines import BLOCK, CLOSE, PAIR, Child, connector, count, prompt, repeated, same, saved, settle

import ashlar.daemon

EXACT = dict(dtype="float32")  # steps of several tokens round differently
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
MTP = dict(method="mtp", num_speculative_tokens=2)


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


@pytest.mark.parametrize("model", [*PAIR, "ministral", "granite"])
def test_prefixes_of_runner_v1(model, shared_daemon, engine, expected):
    """vLLM still chooses V1 for some engines. Their identity is the same, and so are their blocks and states."""
    text = prompt(f"both runners {model}", 2 * BLOCK[model] + 100)
    with Child(model, connector(shared_daemon), environment=dict.fromkeys(ENVIRONMENT, "")) as former:
        used = former.call(
            "evaluate", "type(server.core().model_executor.driver_worker.worker.model_runner).__mro__[1]"
        )
        assert used.__module__ == "vllm.v1.worker.gpu_model_runner"
        same(former.generate([text]), expected(model, [text]))
        before = saved(engine(model))
        same(engine(model).generate([text]), expected(model, [text]))
        assert saved(engine(model)) - before == repeated(model, len(text))


@pytest.mark.parametrize("model", [*PAIR, "ministral", "granite", "lfm2"])
def test_prefixes(model, engine, expected):
    test_vllm_prefixes.test_the_second_request_is_resumed_with_the_same_answer(model, engine, expected)


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


@pytest.mark.parametrize("model", ["qwen3", "granite"])
def test_stop_tokens(model, engine, expected):
    """A step after the stop token has been scheduled already. No token that follows it is saved."""
    text = prompt(f"stop {model}", 2 * BLOCK[model] - 20)
    ((answer, _),) = expected(model, [text], 40)
    stop = max(answer[:30], key=answer.index)
    child = engine(model)
    child.call("execute", COMMITTED)
    sampling = f"vllm.SamplingParams(temperature=0, detokenize=False, max_tokens=40, stop_token_ids=[{stop}])"
    run = f"import vllm\nserver.best = llm.generate([dict(prompt_token_ids={text})], {sampling}, use_tqdm=False)[0].outputs[0]"
    child.call("execute", run)
    stopped = answer[: answer.index(stop) + 1]
    assert child.call("evaluate", "list(server.best.token_ids)") == stopped
    child.call("erase")
    texts = child.call("evaluate", "server.committed")
    assert texts and all(each == (text + stopped)[: len(each)] for each in texts)
    longer = text + stopped + prompt("after a stop", 25)
    same(child.generate([longer]), expected(model, [longer]), CLOSE)


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


def test_sliding_windows(shared_daemon, engine, expected):
    test_vllm_windows.test_blocks_that_the_engine_freed_are_not_needed("ministral", engine, expected, shared_daemon)


# ---- requests that end or start over while something is in progress


def test_preemption(shared_daemon, expected):
    test_vllm_prefixes.test_preempted_requests_resume_with_the_same_answer("qwen3_5", shared_daemon, expected)


def test_failed_loads(engine, expected):
    test_vllm_faults.test_a_plan_of_another_version_is_computed_instead("qwen3_5", engine, expected)


def test_unresolved_loads(engine, expected):
    test_vllm_faults.test_blocks_that_the_daemon_may_still_write_to_are_not_computed_into(engine, expected)


@pytest.mark.parametrize("model", PAIR)
def test_aborts_during_loads(model, engine, expected):
    test_vllm_faults.test_an_aborted_request_keeps_its_blocks_until_its_load_has_ended(model, engine, expected)


def test_aborts_during_saves(shared_daemon, expected, model="qwen3_5"):
    text, other = (prompt(f"aborted save {i}", 2 * BLOCK[model] + 40) for i in range(2))
    with Child(model, {**connector(shared_daemon), "wait_for_saves": False}) as child:
        test_vllm_resets.slowly(child, 3)
        abort = "llm.llm_engine.abort_request(['aborted'])\nfor _ in range(4):\n    llm.llm_engine.step()"
        child.call("execute", test_vllm_resets.BEGIN.format(name="aborted", text=text, tokens=20, steps=4) + abort)
        assert child.call("free_blocks") < 255, "its blocks are being saved"
        same(child.generate([other]), expected(model, [other]))
        settle(child, 255)
        before = saved(child)
        same(child.generate([text]), expected(model, [text]))
        assert saved(child) - before >= repeated(model, len(text))


MIXED = """
import random, vllm
def mixed(texts, seed, tokens):
    draw, engine, found, names = random.Random(seed), llm.llm_engine, {}, iter(range(1000))
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=tokens)
    left, under_way = [text for text in texts for _ in range(3)], {}
    draw.shuffle(left)
    while left or engine.has_unfinished_requests():
        if left and draw.random() < 0.5:
            name, text = str(next(names)), left.pop()
            engine.add_request(name, dict(prompt_token_ids=text), sampling)
            under_way[name] = text
        if under_way and draw.random() < 0.1:
            name = draw.choice(sorted(under_way))
            engine.abort_request([name])
            under_way.pop(name)
        for output in engine.step():
            if output.finished and output.request_id in under_way:
                best = output.outputs[0]
                logs = [each[token].logprob for each, token in zip(best.logprobs, best.token_ids)]
                found.setdefault(tuple(under_way.pop(output.request_id)), []).append((list(best.token_ids), logs))
    return found
server.mixed = mixed
"""


@pytest.mark.parametrize("model", ["qwen3", "granite"])
def test_mixed_requests(model, shared_daemon, expected):
    """Requests come, are aborted and are preempted at random moments."""
    texts = [prompt(f"mixed {model} {i % 3}", 130 + 60 * i) for i in range(6)]  # three pairs share beginnings
    answers = dict(zip(map(tuple, texts), expected(model, texts, 8)))
    blocks = {"qwen3": 10, "granite": 40}[model]  # too few for all requests together
    limits = dict(num_gpu_blocks_override=blocks, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512)
    with Child(model, connector(shared_daemon), **limits) as child:
        child.call("execute", MIXED)
        for seed in range(3):
            found = child.call("evaluate", f"server.mixed({texts!r}, {seed}, 8)")
            assert found, "some requests are not aborted"
            for text, several in found.items():
                for each in several:
                    same([each], [answers[text]], CLOSE)
            settle(child, blocks - 1)
        assert saved(child) > 0 and count(child, "load_failures") == 0


# ---- weights and adapters


@pytest.mark.parametrize("model", PAIR)
def test_changed_weights(model, shared_daemon, engine, expected):
    test_vllm_reloads.test_a_change_without_a_reset_is_detected(model, shared_daemon, engine, expected)


def test_resets(shared_daemon, engine, expected):
    test_vllm_resets.test_nothing_of_earlier_weights_is_found_after_a_reset(shared_daemon, engine, expected)
    test_vllm_resets.test_a_request_that_continues_over_a_reset_is_not_saved(shared_daemon)


@pytest.fixture(scope="module")
def adapters(runner, tmp_path_factory):
    return test_vllm_adapters.three(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def wanted(adapters):
    yield from test_vllm_adapters.answers(adapters)


def test_adapters(shared_daemon, adapters, wanted, engine, expected, tmp_path):
    given = shared_daemon, adapters, wanted, engine, expected, tmp_path
    test_vllm_adapters.test_adapters_share_no_cached_prompts(*given)


def test_changed_adapters(shared_daemon, adapters, wanted, tmp_path):
    test_vllm_adapters.test_changed_content_under_the_same_name_is_not_reused(shared_daemon, adapters, wanted, tmp_path)


# ---- drafts


@pytest.mark.parametrize(
    "model, settings", [("qwen3", NGRAM), ("mimo", dict(MTP, num_speculative_tokens=1))], ids=["ngram", "mtp"]
)
def test_drafts(model, settings, shared_daemon):
    first = prompt(f"drafts {model}", 200)
    with Child(model, **EXACT) as plain:
        ((answer, *_),) = plain.generate([first], 80)
        second = first + answer + prompt("next turn", 30)
        plain.call("erase")
        wanted = [each[:2] for each in plain.generate([second], 10)]
    for restarted in (False, True):
        with Child(model, connector(shared_daemon), speculative_config=settings, **EXACT) as child:
            child.call("execute", COMMITTED)
            if not restarted:
                assert child.generate([first], 80)[0][0] == answer
                proposed, accepted = drafts(child)
                assert proposed > accepted
                child.call("erase")
            same(child.generate([second], 10), wanted, 1e-3)
            assert saved(child) >= 256, "decoded tokens are kept, too"
            texts = child.call("evaluate", "server.committed")
            assert all(text == (second + wanted[0][0])[: len(text)] for text in texts), "of no rejected draft"


@pytest.mark.parametrize("settings", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_drafts_of_a_hybrid(settings, shared_daemon, model="qwen3_5"):
    """vLLM's kernels that move states of drafts run as they are. With drafts, its CPU kernels round differently."""
    first = prompt(f"hybrid drafts {settings['method']}", 2 * BLOCK[model] + 100)
    with Child(model, speculative_config=settings) as plain:
        ((answer, logs, _),) = plain.generate([first], 30)
        second = first + answer + prompt("next turn", 40)
        plain.call("erase")
        wanted = [each[:2] for each in plain.generate([second], 4)]
    for restarted in (False, True):
        with Child(model, connector(shared_daemon), speculative_config=settings) as child:
            if not restarted:
                same(child.generate([first], 30), [(answer, logs)])
                assert drafts(child)[0] > 0
                child.call("erase")
            same(child.generate([second], 4), wanted, 5e-2)
            assert saved(child) >= 2 * BLOCK[model]


# ---- media and ranks


def test_images(shared_daemon, tmp_path):
    test_vllm_images.test_prompts_with_the_same_images_are_resumed("qwen3_vl", shared_daemon, tmp_path)


def test_ranks(shared_daemon, model="qwen3_5"):
    text, depth = prompt("ranks", 2 * BLOCK[model] + 20), 2 * BLOCK[model]
    with Child(model, tensor_parallel_size=2) as plain:
        wanted = [each[:2] for each in plain.generate([text])]
    for _ in range(2):
        with test_vllm_ranks.two_ranks(shared_daemon) as child:
            test_vllm_ranks.by_rank(child, "watch")
            before = saved(child)
            same(child.generate([text]), wanted)
            child.call("erase")
            same(child.generate([text]), wanted)
            ranks = test_vllm_ranks.by_rank(child, "watched")
            assert ranks[0]["states"] != ranks[1]["states"] and all(each["states"] for each in ranks)
            assert saved(child) - before >= depth


# ---- segments


def test_segments(segmented, expected):
    test_vllm_segments.test_segments_are_found_in_any_order_and_at_any_position("qwen3_5", segmented, expected)


def test_segments_of_mamba2(segmented, expected):
    test_vllm_segment_families.test_segments_are_found_in_any_order("granite", segmented, expected)


def test_segments_of_models_that_take_images(shared_daemon, tmp_path):
    with test_vllm_segment_images.pair_of_engines("qwen3_5", shared_daemon, tmp_path) as pair:
        test_vllm_segment_images.test_texts_are_composed_as_by_the_text_only_class(pair)
        test_vllm_segment_images.test_prompts_with_images_are_computed(pair)


def test_segments_in_several_steps(shared_daemon, segmented):
    test_vllm_segments.test_a_prompt_longer_than_a_step_is_taken_in_several(shared_daemon, segmented)


WITHOUT_CONTEXT = """
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
server.own = own = ActiveKVConnector.pre_forward
def pre_forward(self, *given, **named):
    with override_forward_context(None):
        own(self, *given, **named)
ActiveKVConnector.pre_forward = pre_forward
"""


def test_segments_before_full_graphs(segmented, model="qwen3_5"):
    """The runner calls the connector without a forward context before it replays a CUDA graph of the whole step."""
    child, parts, query = segmented(model), [prompt(f"graphs {i}", 100) for i in range(3)], prompt("graphs query", 20)
    child.publish(parts)
    wanted, jumps = child.ask(parts, query), count(child, "jumps")
    child.call("erase")
    child.call("execute", WITHOUT_CONTEXT)
    try:
        assert child.ask(parts, query) == wanted and count(child, "jumps") == jumps + 3
    finally:
        child.call(
            "execute",
            "from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector as active\nactive.pre_forward = server.own",
        )
