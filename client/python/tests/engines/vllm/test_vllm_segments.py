# SPDX-License-Identifier: Apache-2.0
"""Prompts set from segments through the connector: what is composed, that it stays apart from what is exact, and faults."""

import json
import math
import os
import pathlib
import random
import sys
import threading
import time

import pytest
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt, same

import ashlar.daemon
from ashlar.vllm.segments import NORM_EPSILON


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_next"])
def test_segments_are_found_in_any_order_and_at_any_position(model, segmented, expected):
    child, query = segmented(model), prompt("query", 20)
    parts = texts(f"order {model}", 4)
    before = count(child, "published_segments")
    first = child.ask(parts, query)
    assert count(child, "published_segments") - before == 4
    assert first[2] == 400, "no multiple of the engine's block: the state stands where the segments end"
    child.call("erase")
    again = child.ask(parts, query)
    assert again == first, "landed as it was published"
    assert count(child, "published_segments") - before == 4
    child.call("erase")
    others = [parts[i] for i in (0, 3, 1)]
    saved = count(child, "saved_tokens", "dram", "composed")
    tokens, logs, cached = child.ask(others, query)
    assert count(child, "published_segments") - before == 4, "the same first text; interiors at other positions"
    assert count(child, "saved_tokens", "dram", "composed") - saved == 100 + 2 * 84 and cached == 300
    child.call("erase")
    child.ask([parts[i] for i in (2, 0, 1, 3)], query)
    assert count(child, "published_segments") - before == 6, "as a first text, and as one behind others: two objects"
    (wanted,) = expected(model, [sum(others, []) + query], 4)
    assert max(abs(a - b) for a, b in zip(logs[:1], wanted[1])) < 0.2, "close to full prefill, not equal"


def test_states_are_composed_exactly_where_the_inputs_are_the_same(segmented):
    """Composing errs as fp32 does: the bound is ten times what was measured, 2.1e-7.

    The engine's kernel, which takes the seams, multiplies bf16: its states are 4e-3 off, and whatever it is given is
    rounded to bf16 first. Where two states differ by 2e-7, of 16,384 numbers some are rounded to the other side, and what
    the kernel makes of them is apart by up to 1e-4, or as little as before: as the numbers lie. So each step is held to
    what it makes of the state that the request itself had, and the last state to the recurrence in fp64, from which the
    engine's own run is further away.
    """
    child = segmented(MODEL)
    parts = texts("exact", 4)
    tokens, lengths = sum(parts, []), [len(part) for part in parts]
    cut = child.probe("tuples_against_one_run", tokens, lengths)
    for number, (one, whole, engines) in enumerate(cut):
        print(
            f"layer {number}: tuples cut from one run {one:.1e}, composed {whole:.1e}; the engine's kernel {engines:.1e}"
        )
    assert len(cut) == 3 and all(one <= 2e-6 and whole <= 2e-6 for one, whole, _ in cut)
    assert all(engines < 2e-2 for *_, engines in cut), "the recurrence is the engine's"
    composed = child.probe("composed_against_one_run", tokens + prompt("query", 10), lengths)
    for number, apart in enumerate(composed):
        print(f"layer {number}: {apart}")
    first = composed[0]  # its inputs stand nowhere: they are the same alone and in the whole prompt
    assert 0 < first.interior <= 2e-6 and first.computed <= 2e-6
    assert first.exact <= first.engine < 2e-2, "seams alone are computed by a kernel that rounds"
    assert all(apart.chain < 0.6 for apart in composed), (
        "deeper layers computed their interiors without what stands before"
    )


def test_keys_are_normalised_as_the_engine_does(segmented):
    for found in segmented(MODEL).probe("norm_epsilons"):
        assert math.isclose(found, NORM_EPSILON, rel_tol=0.05), "a key's square, 1e-5, is rounded in bf16 by up to 1 %"


def divergence(real, other):
    return sum(math.exp(a) * (a - b) for a, b in zip(real, other))


def test_drift_by_seam_width_is_below_that_of_naive_addition(segmented):
    child = segmented(MODEL)
    prompts = [(texts(f"drift {n}", 5), prompt(f"drift query {n}", 16)) for n in range(4)]
    real = [child.probe("ask", sum(parts, []) + query, None, 1, everything=True) for parts, query in prompts]
    found = {}
    try:
        for width in (0, 4, 8, 16, 32):
            for naive in (False, True):
                head = child.probe("set_seams", width, width, naive=naive)
                assert head == max(3, width), "never narrower than the convolution"
                child.call("erase")
                answers = [child.ask(parts, query, 1, everything=True) for parts, query in prompts]
                found[width, naive] = sum(map(divergence, real, answers)) / len(prompts)
            print(f"seams of {width}: KL {found[width, False]:.2e}, naive {found[width, True]:.2e}")
    finally:
        child.probe("set_seams", 8, 8)
    assert all(found[width, False] < found[width, True] for width in (4, 8, 16, 32))
    assert found[32, False] < found[4, False], "wider seams compute more with all that stands before"


def test_nothing_composed_is_taken_for_exact(segmented, expected, engine):
    """A prompt without segments gets neither blocks of the engine's nor of Ashlar's that were composed."""
    child = segmented(MODEL)
    parts, query = texts("apart", 5, 160), prompt("apart", 30)
    whole = sum(parts, []) + query
    wanted = expected(MODEL, [whole], 4)
    composed = child.ask(parts, query)
    assert composed[2] == 800 and composed[1] != wanted[0][1]
    plain = child.probe("ask", whole, None)  # the composed one's blocks are still in the engine
    same([plain], wanted)
    assert plain[2] == 0
    child.call("erase")
    plain = child.probe("ask", whole, None)  # now Ashlar has an exact prefix: of the plain request alone
    same([plain], wanted)
    assert plain[2] == 768
    same(engine(MODEL).generate([whole], 4), wanted)
    again = child.ask(parts, query)
    assert again[1] == composed[1], "and the other way round: composed, as its request declares"


def test_the_engines_own_cache_serves_the_same_segments_alone(segmented):
    child = segmented(MODEL)
    parts = texts("own", 4, 192)
    query = prompt("own query", 400)
    first = child.ask(parts, query)
    hits = count(child, "hits", "dram", "composed")
    again = child.ask(parts, query)
    assert again[0] == first[0] and again[2] >= 768
    assert count(child, "hits", "dram", "composed") == hits, "by the engine's own blocks"
    other = child.ask([*parts[:3], prompt("another", 192)], query)
    assert count(child, "hits", "dram", "composed") == hits + 1 and other[2] == 768
    other = child.probe("ask", sum(parts, []) + query, [384, 384])  # the same tokens, parted otherwise
    assert count(child, "hits", "dram", "composed") == hits + 2 and other[2] == 768


def test_segments_are_found_under_their_own_salt_alone(segmented):
    child, parts, query, answers = segmented(MODEL), texts("salt", 4, 192), prompt("salt query", 30), []
    for published in (4, 0):
        for salt in (None, "mine", "theirs"):
            before = count(child, "published_segments")
            answers.append(child.ask(parts, query, salt=salt))
            assert count(child, "published_segments") - before == published, salt
        child.call("erase")
    assert all(answer == answers[0] for answer in answers)


def test_without_names_of_their_own_composed_blocks_would_be_taken_for_exact(segmented, expected):
    """The names are there for this, and the check above can fail."""
    whole = sum(texts("mixed", 4, 192), []) + prompt("mixed", 30)
    plain = segmented(MODEL).probe("ask_without_names_apart", whole, [192] * 4)
    assert plain[2] == 768 and plain[1] != expected(MODEL, [whole], 4)[0][1]


@pytest.mark.parametrize(
    "given, reason",
    [
        ([100, 0], "was given; expected a list of positive lengths"),
        ("100", "was given; expected a list of positive lengths"),
        ([100, True], "was given; expected a list of positive lengths"),
        ([300, 300], "the lengths add up to 600; the prompt has 420 tokens"),
    ],
)
def test_a_wrong_declaration_is_named_and_changes_nothing(given, reason, segmented, expected):
    child, whole = segmented(MODEL), sum(texts("wrong", 4), []) + prompt("wrong", 20)
    child.call("erase")
    answer, heard = child.probe("ask_and_hear", whole, given)
    same([answer], expected(MODEL, [whole], 4))
    assert any("kv_transfer_params.ashlar_segments" in line and reason in line for line in heard), heard


def test_without_the_flag_declared_segments_are_a_prompt_like_any_other(engine, expected):
    whole = sum(texts("flag", 4), []) + prompt("flag", 20)
    child = engine(MODEL)
    text = f"__import__('segment_probe').ask(server, {whole!r}, [100] * 4)"
    for cached in (0, 384):
        child.call("erase")
        answer = child.call("evaluate", text)
        same([answer], expected(MODEL, [whole], 4))
        assert answer[2] == cached, "exact, and kept as exact"


def test_prompts_of_both_kinds_beside_each_other(segmented, expected):
    child, query = segmented(MODEL), prompt("beside", 20)
    parts = texts("beside", 6)
    sets = [parts[:3], parts[3:], [parts[0], parts[5], parts[2]]]
    alone = []
    for some in sets:
        child.call("erase")
        alone.append(child.ask(some, query))
    plain = sum(parts, []) + query
    child.call("erase")
    prompts = [(sum(some, []) + query, [100] * 3) for some in sets] + [(plain, None)]
    together = child.probe("ask_together", prompts)
    for one, other in zip(together, alone):
        assert one[2] == other[2] == 300
        assert max(abs(a - b) for a, b in zip(one[1][:1], other[1][:1])) < 2e-2
    same(together[3:], expected(MODEL, [plain], 4), 2e-2)


def test_segments_of_few_tokens_and_prompts_without_a_query(segmented, expected):
    child = segmented(MODEL)
    parts = [prompt("few 0", 2), prompt("few 1", 10), prompt("few 2", 16), prompt("few 3", 17), prompt("few 4", 120)]
    for number in (1, 2, 5):
        some = parts[:number]
        whole = sum(some, [])
        child.call("erase")
        tokens, logs, cached = child.ask(some, [])
        assert cached <= len(whole) - 1, "the last token is always computed"
        assert abs(logs[0] - expected(MODEL, [whole], 4)[0][1][0]) < 0.2


def test_an_engine_that_loads_alone_publishes_nothing(segmented, expected):
    child, query = segmented(MODEL), prompt("alone", 20)
    known, new = texts("known", 3), texts("new", 3)
    composed = child.ask(known, query)
    published = count(child, "published_segments")
    child.probe("publish", False)
    try:
        child.call("erase")
        assert child.ask(known, query) == composed
        child.call("erase")
        same([child.ask(new, query)], expected(MODEL, [sum(new, []) + query], 4))
        child.call("erase")
        mixed = child.ask([known[0], new[1], known[2]], query)
        assert mixed[2] == 300, "the missing one is computed in the prompt, between those that are cached"
    finally:
        child.probe("publish", True)
    assert count(child, "published_segments") == published


def preemptions(child):
    return child.call("evaluate", "sum(m.value for m in llm.get_metrics() if m.name == 'vllm:num_preemptions')")


def test_a_preempted_prompt_is_set_again_with_the_same_answer(shared_daemon, segmented):
    """The prompts fit into the cache together. The first one's 25th token does not: the last one gives way, and is set
    from its segments again."""
    new, prompts = 60, []
    for number, (lengths, query) in enumerate([([180] * 4, 24), ([120] * 3, 90), ([150] * 3, 60)]):
        parts = [prompt(f"preempt {number} {i}", length) for i, length in enumerate(lengths)]
        prompts.append((sum(parts, []) + prompt(f"preempt query {number}", query), lengths))
    wanted = segmented(MODEL).probe("ask_together", prompts, new)
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(MODEL, options, num_gpu_blocks_override=18, max_num_seqs=3, max_model_len=3 * 384) as child:
        child.probe("watch_settings")
        free, state = child.call("free_blocks"), child.probe("state_of")

        def serve():
            """Where loads take long beside steps, requests may end before others have begun, and none gives way."""
            for _ in range(5):
                before = preemptions(child)
                answers = child.probe("ask_together", prompts, new)
                child.call("erase")
                assert (child.call("free_blocks"), child.probe("state_of", 20)) == (free, state), "nothing is held"
                if preemptions(child) > before:
                    return answers
            raise AssertionError("none was preempted")

        hits = count(child, "hits", "dram", "composed")
        answers = serve()
        again = child.probe("set_again")
        print("set again, and apart by", again)
        assert again and max(again) < 1e-3, "the same states and keys in other blocks"
        assert count(child, "hits", "dram", "composed") - hits > len(prompts)
        assert count(child, "published_segments") == 0, "the other engine had published them"
        for (tokens, logs, cached), (other, others, _), (_, lengths) in zip(answers, wanted, prompts):
            assert cached == sum(lengths)
            # Decoded tokens are computed as a prompt, which rounds in another way: a later token may differ.
            parting = next((i for i, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), new)
            assert parting >= 3 and max(abs(a - b) for a, b in zip(logs[:parting], others)) < 0.1
        # A setting that fails then is computed.
        failures = count(child, "load_failures")
        child.probe("fail_the_next", "_compose", after=len(prompts))
        assert all(len(tokens) == new for tokens, *_ in serve())
        assert count(child, "load_failures") == failures + 1


def test_a_daemon_that_is_killed_costs_a_recompute(tmp_path, expected):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    parts, query = texts("killed", 4), prompt("killed", 20)
    whole = sum(parts, []) + query
    wanted = expected(MODEL, [whole], 4)
    with ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        waits = connector(daemon, segments=True, call_ms=2000, land_ms=2000, quiet_ms=200, compose_ms=20000)
        with Segmented(MODEL, waits) as child:
            composed = child.ask(parts, query)
            assert composed[2] == 400
            child.call("erase")
            free = child.call("free_blocks")
            daemon.kill()
            same([child.ask(parts, query)], wanted)
            daemon.start()
            for _ in range(int(os.environ.get("ASHLAR_VLLM_KILLS", "6"))):
                child.call("erase")
                killer = threading.Timer(draw.uniform(0, 0.3), daemon.kill)
                killer.start()
                answer = child.ask(parts, query)
                close = [
                    max(abs(a - b) for a, b in zip(answer[1], each)) < 1e-4 for each in (wanted[0][1], composed[1])
                ]
                assert any(close), (answer, wanted, composed)
                killer.join()
                daemon.start()
            deadline = time.monotonic() + 20
            hits = count(child, "hits", "dram", "composed")
            while count(child, "hits", "dram", "composed") == hits and time.monotonic() < deadline:
                child.call("erase")
                child.ask(parts, query)
            assert count(child, "hits", "dram", "composed") > hits, "the restarted daemon is used again"
            child.call("erase")
            assert child.call("free_blocks") == free


@pytest.mark.skipif(
    "ASHLAR_VLLM_PROCESSES" not in os.environ, reason="minutes on a busy machine: ASHLAR_VLLM_PROCESSES=1"
)
def test_segments_with_the_engine_core_in_a_process_of_its_own(shared_daemon, segmented):
    parts, query = texts("process", 3), prompt("process", 20)
    first = segmented(MODEL).ask(parts, query)
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(MODEL, options, processes=True, worker_extension_cls="tiny_engines.Wide") as child:
        other = child.ask(parts, query)
        assert other[0] == first[0] and other[2] == first[2] == 300
        assert max(abs(a - b) for a, b in zip(other[1], first[1])) < 1e-4


def test_a_trained_hybrid_keeps_its_answers_composed_and_loses_them_by_naive_addition(tmp_path, shared_daemon):
    """docs/benchmarks/quality.md's model and task. ASHLAR_VLLM_EXAMPLES: prompts of 17 answers."""
    quality = pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python" / "quality"
    sys.path.append(str(quality))
    import task
    import train
    import trained_hybrid

    trained_hybrid.convert(quality / "hybrid.safetensors", train.config(), tmp_path)
    chance = random.Random(1000 * 4 + 64)
    examples = [
        task.example(chance, 4, 64, 8, 3, 8, 3) for _ in range(int(os.environ.get("ASHLAR_VLLM_EXAMPLES", "6")))
    ]
    asked, right = [], []
    for one in examples:
        for place in one.answers:
            asked.append((sum(one.segments, []) + one.query[:place], [len(segment) for segment in one.segments]))
            right.append(one.query[place])
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(str(tmp_path), options, load_format="safetensors") as child:

        def accuracy(prompts):
            child.call("erase")
            found = child.probe("next_tokens", prompts)
            return 100 * sum(map(int.__eq__, found, right)) / len(right)

        full = accuracy([(tokens, None) for tokens, _ in asked])
        composed = {}
        for head, tail in ((3, 0), (8, 8)):
            child.probe("set_seams", head, tail)
            composed[head, tail] = accuracy(asked)
        hits = count(child, "hits", "dram", "composed")
        child.probe("set_seams", 8, 8, naive=True)
        naive = accuracy(asked)
        assert count(child, "hits", "dram", "composed") > hits > 0 and count(child, "load_failures") == 0
    print(f"{len(right)} answers: full {full:.1f} %, composed {composed}, naive {naive:.1f} %")
    assert full >= 90, "the kept weights solve the task in bf16"
    assert all(each >= full - 3 for each in composed.values())
    assert naive < min(composed.values()) - 2


def test_the_first_token_comes_sooner_with_eight_cached_segments(tmp_path, monkeypatch):
    """The program of docs/benchmarks/vllm.md, in little."""
    monkeypatch.syspath_prepend(str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))
    import vllm_segments

    out = tmp_path / "segments.json"
    arguments = "--size small --segments 8 --tokens 384 --runs 3 --json"
    monkeypatch.setattr(sys, "argv", ["vllm_segments.py", *arguments.split(), str(out)])
    vllm_segments.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["segments"] == 8 and row["tokens"] == 8 * 384 + 32
    assert 0 < row["ttft_with_ms"] < 0.8 * row["ttft_without_ms"]
