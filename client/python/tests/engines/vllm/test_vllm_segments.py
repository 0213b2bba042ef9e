# SPDX-License-Identifier: Apache-2.0
"""Segments through the connector: composed data is right and separate from exact data; also faults."""

import json
import math
import os
import pathlib
import random
import sys
import threading
import time

import pytest
from segmented_engines import MODEL, OTHER_STEPS, PATIENT, Segmented, texts
from tiny_engines import CLOSE, connector, count, prompt, same

import ashlar.daemon
from ashlar.vllm.segments import NORM_EPSILON

HEAD = TAIL = 8
# Bytes of all segments that an engine has published.
STORED = (
    "__import__('vllm.distributed.kv_transfer', fromlist=['']).get_kv_transfer_group()"
    "._worker._composer._opening.cache.stored_segments()['bytes']"
)


def interiors(*lengths):
    return sum(length - HEAD - TAIL for length in lengths)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_next"])
def test_segments_are_found_in_any_order_and_at_any_position(model, segmented, expected):
    child, query = segmented(model), prompt("query", 20)
    parts = texts(f"order {model}", 4)
    assert child.publish(parts) == 6, "each as one behind others, and the first and the lead as beginnings"
    before, saved = count(child, "jumps"), count(child, "saved_tokens", "dram", "composed")
    first = child.ask(parts, query)
    assert first[2] == 100 + interiors(100, 100, 100), "the first text is exact and taken whole"
    assert count(child, "jumps") - before == 4
    assert count(child, "saved_tokens", "dram", "composed") - saved == first[2]
    child.call("erase")
    again = child.ask(parts, query)
    assert again == first, "landed as it was published"
    child.call("erase")
    others = [parts[i] for i in (3, 0, 1)]
    tokens, logs, cached = child.ask(others, query)
    assert cached == interiors(100, 100), "the first text is not kept as a beginning: it is computed"
    (wanted,) = expected(model, [sum(others, []) + query], 4)
    assert max(abs(a - b) for a, b in zip(logs[:1], wanted[1])) < 0.2, "close to full prefill, not equal"


def test_segments_do_not_depend_on_what_was_in_the_blocks_of_their_runs(segmented, expected):
    child, query = segmented(MODEL), prompt("old blocks", 20)
    parts = texts("old blocks", 3)
    child.call("erase")
    child.probe("fill_free_blocks", "inf")
    try:
        child.publish(parts)
        _, logs, cached = child.ask(parts, query)
    finally:
        child.call("erase")
        child.probe("fill_free_blocks", 0)
    assert cached == 100 + interiors(100, 100)
    (wanted,) = expected(MODEL, [sum(parts, []) + query], 4)
    assert abs(logs[0] - wanted[1][0]) < 0.2


def test_a_prompt_of_new_segments_is_exact_and_kept_as_such(segmented, expected):
    child, parts, query = segmented(MODEL), texts("new", 4, 120), prompt("new query", 20)
    whole = sum(parts, []) + query
    child.probe("settle")
    jumps, published = count(child, "jumps"), count(child, "published_segments")
    same([child.ask(parts, query)], expected(MODEL, [whole], 4))
    assert count(child, "published_segments") == published, "no segment is run before the answer"
    child.probe("settle")
    child.call("erase")
    assert count(child, "published_segments") == published + 4
    plain = child.probe("ask", whole, None)
    assert plain[2] == 384, "a prompt without segments finds its states"
    same([plain], expected(MODEL, [whole], 4))
    child.call("erase")
    again = child.ask(parts, query)
    same([again], expected(MODEL, [whole], 4))
    assert again[2] == 384 and count(child, "jumps") == jumps, "an exact prefix saves more than the segments"


def test_segments_after_an_exact_prefix_are_used(segmented):
    """Covers the engine's own cache and Ashlar's."""
    child, query = segmented(MODEL), prompt("behind", 20)
    parts, others = texts("behind", 4, 200), texts("behind others", 2, 200)
    child.publish(others)
    for asked, found in ((390, 384), (400, 400)):  # the engine finds whole blocks; Ashlar finds a prompt's end
        child.probe("ask", sum(parts[:2], [])[:asked], None)
        jumps = count(child, "jumps")
        *_, cached = child.ask([*parts[:2], *others], query)
        assert count(child, "jumps") - jumps == 2
        assert cached == found + interiors(200, 200)
        child.call("erase")


def test_a_prefix_that_ends_in_a_segment_is_loaded_if_that_saves_more(segmented):
    child, query = segmented(MODEL), prompt("within", 20)
    parts = texts("within", 2, 800)
    child.publish(parts)
    whole = sum(parts, []) + query
    child.probe("ask", whole[:900], None)
    child.call("erase")
    assert child.ask(parts, query)[2] == 800 + interiors(800), "not 900 tokens of the prefix"
    child.probe("ask", whole[:1600], None)
    child.call("erase")
    assert child.ask(parts, query)[2] == 1600


@pytest.mark.parametrize("asked, erased", [(384, True), (385, False)], ids=["loaded", "the engine's own"])
def test_a_segment_is_used_if_an_exact_prefix_ends_where_it_begins(asked, erased, segmented):
    """The first seam ends at a block's end, as the prefix does."""
    child, query, lead = segmented(MODEL), prompt("at", 20), 384 - HEAD
    parts = [prompt(f"at {asked}", lead), *texts(f"at others {asked}", 2, 200)]
    child.publish(parts[1:])
    child.probe("publish", False)
    try:
        wanted = child.ask(parts, query)
        assert wanted[2] == interiors(200, 200)
        child.call("erase")
        child.probe("ask", sum(parts, [])[:asked], None, 1)
        if erased:
            child.call("erase")
        jumps = count(child, "jumps")
        tokens, logs, cached = child.ask(parts, query)
    finally:
        child.probe("publish", True)
    assert count(child, "jumps") - jumps == 2 and cached == lead + HEAD + interiors(200, 200)
    assert tokens == wanted[0] and max(abs(a - b) for a, b in zip(logs, wanted[1])) < 1e-4, "the same states"


def composes_exactly(child, parts):
    """Composition has fp32 errors: the bound is ten times the measured 2.1e-7.

    The engine's kernel, which computes the seams, multiplies in bf16: its states differ by 4e-3, and its inputs are
    first rounded to bf16. If two states differ by 2e-7, some of 16,384 numbers round differently, and the kernel's
    results may differ by up to 1e-4. So each step is compared with the step from the state that the request itself had,
    and the last state with the recurrence in fp64, from which the engine's own run is further away.
    """
    tokens, lengths = sum(parts, []), [len(part) for part in parts]
    cut = child.probe("tuples_against_one_run", tokens, lengths)
    child.publish(parts)
    for number, (one, whole, engines) in enumerate(cut):
        print(
            f"layer {number}: tuples cut from one run {one:.1e}, composed {whole:.1e}; the engine's kernel {engines:.1e}"
        )
    assert len(cut) == 3 and all(one <= 2e-6 and whole <= 2e-6 for one, whole, _ in cut)
    assert all(engines < 2e-2 for *_, engines in cut), "the recurrence is the engine's"
    composed = child.probe("composed_against_one_run", tokens + prompt("query", 10), lengths)
    for number, apart in enumerate(composed):
        print(f"layer {number}: {apart}")
    assert len(composed) == 3
    first = composed[0]  # its inputs have no position: they are the same in a separate run and in the whole prompt
    assert 0 < first.interior <= 2e-6 and first.computed <= 2e-6
    assert first.exact <= first.engine < 2e-2, "seams alone are computed by a kernel that rounds"
    assert all(apart.chain < 0.6 for apart in composed), (
        "deeper layers computed their interiors without what stands before"
    )


@pytest.mark.parametrize("model", [MODEL, "granite", "falcon_h1", "nemotron_h"])
def test_states_are_composed_exactly_where_the_inputs_are_the_same(model, segmented):
    composes_exactly(segmented(model), texts(f"exact {model}", 4))


def test_tuples_of_16_bits_take_fewer_bytes_and_answer_alike(segmented, shared_daemon):
    """The default. float16 states err by 2⁻¹¹ of a head's largest element, transitions by 3e-4."""
    child, parts, query = segmented(MODEL), texts("16 bits", 3, 120), prompt("16 bits query", 20)
    options = connector(shared_daemon, segments=True, **PATIENT | dict(segment_dtype="float16"))
    with Segmented(MODEL, options, max_logprobs=512) as half:
        sizes, answers = [], []
        for each in (child, half):
            before = each.call("evaluate", STORED)
            each.publish(parts)
            sizes.append(each.call("evaluate", STORED) - before)
            answers.append(each.ask(parts, query))
    (whole, logs, cached), (tokens, others, also) = answers
    # After a tie, which each kind of CPU rounds in its own way, the answers differ. The largest log-probabilities do not.
    alike = next((i + 1 for i in range(4) if tokens[i] != whole[i]), 4)
    assert alike > 1 and cached == also > 0
    apart = [abs(a - b) for a, b in zip(logs[:alike], others[:alike])]
    assert max(apart) < 4e-2, "logits are bf16: 2⁻⁵ is one step between 4 and 8"
    assert sizes[1] < 0.7 * sizes[0], "keys have 16 bits in both"


def test_keys_are_normalised_as_the_engine_does(segmented):
    for found in segmented(MODEL).probe("norm_epsilons"):
        assert math.isclose(found, NORM_EPSILON, rel_tol=0.05), "a key's square, 1e-5, is rounded in bf16 by up to 1 %"


def divergence(real, other):
    return sum(math.exp(a) * (a - b) for a, b in zip(real, other))


def test_drift_by_seam_width_is_below_that_of_naive_addition(segmented):
    child = segmented(MODEL)
    prompts = [(texts(f"drift {n}", 4), prompt(f"drift query {n}", 16)) for n in range(3)]
    real = [child.probe("ask", sum(parts, []) + q, None, 1, everything=True, salt="real") for parts, q in prompts]
    found = {}
    try:
        for width in (0, 4, 16, 32):
            for naive in (False, True):
                head = child.probe("set_seams", width, width, naive=naive)
                assert head == max(3, width), "never narrower than the convolution"
                for parts, _ in prompts:
                    child.publish(parts)
                answers = [child.ask(parts, query, 1, everything=True) for parts, query in prompts]
                found[width, naive] = sum(map(divergence, real, answers)) / len(prompts)
                child.call("erase")
            print(f"seams of {width}: KL {found[width, False]:.2e}, naive {found[width, True]:.2e}")
    finally:
        child.probe("set_seams", 8, 8)
    assert all(found[width, False] < found[width, True] for width in (4, 16, 32))
    assert found[32, False] < found[4, False], "wider seams compute more with all that stands before"


def test_composed_data_is_not_used_as_exact(segmented, expected, engine):
    """A prompt without segments gets no composed blocks, neither the engine's nor Ashlar's."""
    child = segmented(MODEL)
    parts, query = texts("apart", 5, 160), prompt("apart", 30)
    whole = sum(parts, []) + query
    wanted = expected(MODEL, [whole], 4)
    child.publish(parts)
    composed = child.ask(parts, query)
    assert composed[2] == 160 + interiors(*[160] * 4) and composed[1] != wanted[0][1]
    plain = child.probe("ask", whole, None)  # the blocks of the composed prompt are still in the engine
    same([plain], wanted)
    assert plain[2] == 0
    child.call("erase")
    plain = child.probe("ask", whole, None)  # now Ashlar has an exact prefix: that of the plain request only
    same([plain], wanted)
    assert plain[2] == 768
    same(engine(MODEL).generate([whole], 4), wanted)
    again = child.ask(parts, query)
    same([again], wanted)
    assert again[2] == 768, "what is exact serves a prompt with segments, too"


def test_decoded_tokens_after_a_jump_are_not_kept_as_exact(segmented, expected):
    """Blocks that decoding fills get names when they are full; the request's end is not offered to the cache."""
    child, parts, query = segmented(MODEL), texts("decoded", 3, 120), prompt("decoded", 10)
    child.publish(parts)
    tokens, *_ = child.ask(parts, query, 60)  # the prompt has 370 tokens, so decoding fills a block at 384
    whole = sum(parts, []) + query + tokens[:-1]
    for erased in (False, True):
        plain = child.probe("ask", [*whole, 1, 2, 3], None, 2)
        same([plain], expected(MODEL, [[*whole, 1, 2, 3]], 2))
        assert plain[2] == (384 if erased else 0)
        child.call("erase")


def test_the_engines_own_cache_serves_only_the_same_segments(segmented):
    child = segmented(MODEL)
    parts, other = texts("own", 4, 192), prompt("another", 192)
    query = prompt("own query", 400)
    child.publish([*parts, other])
    first = child.ask(parts, query)
    jumps = count(child, "jumps")
    again = child.ask(parts, query)
    assert again[0] == first[0] and again[2] >= 768
    assert count(child, "jumps") == jumps, "by the engine's own blocks"
    child.ask([*parts[:3], other], query)
    assert count(child, "jumps") == jumps + 4, "the last segment is another one"
    *_, cached = child.probe("ask", sum(parts, []) + query, [384, 384])  # the same tokens, split into other segments
    assert cached == 0


def test_segments_are_found_only_under_their_own_salt(segmented):
    child, parts, query, answers = segmented(MODEL), texts("salt", 4, 192), prompt("salt query", 30), []
    for salt in (None, "mine", "theirs"):
        assert child.publish(parts, salt) == 6, salt
        answers.append(child.ask(parts, query, salt=salt))
    assert all(answer == answers[0] for answer in answers)


def test_without_separate_names_composed_blocks_would_be_used_as_exact(segmented, expected):
    """The separate names are needed: without them the check above fails."""
    child, parts = segmented(MODEL), texts("mixed", 4, 192)
    whole = sum(parts, []) + prompt("mixed", 30)
    child.publish(parts)
    plain = child.probe("ask_without_names_apart", whole, [192] * 4)
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


def test_declared_segments_are_ignored_without_the_option(engine, expected):
    whole = sum(texts("flag", 4), []) + prompt("flag", 20)
    child = engine(MODEL)
    text = f"__import__('segment_probe').ask(server, {whole!r}, [100] * 4)"
    for cached in (0, 384):
        child.call("erase")
        answer = child.call("evaluate", text)
        same([answer], expected(MODEL, [whole], 4))
        assert answer[2] == cached, "exact, and kept as exact"


def test_segments_of_a_model_with_only_attention(segmented, expected, model="qwen3"):
    child, query = segmented(model), prompt("attention query", 20)
    parts = texts("attention", 4)
    child.publish(parts)
    jumps = count(child, "jumps")
    first = child.ask([parts[i] for i in (2, 0, 3)], query)
    assert count(child, "jumps") - jumps >= 2 and first[2] >= interiors(100, 100)
    whole = sum([parts[i] for i in (2, 0, 3)], []) + query
    (wanted,) = expected(model, [whole], 4)
    assert 0 < abs(first[1][0] - wanted[1][0]) < 0.2, "close to full prefill, not equal"
    again = child.ask([parts[i] for i in (2, 0, 3)], query)
    assert again[0] == first[0] and again[2] > first[2], "by the engine's own blocks"
    same([child.probe("ask", whole, None)], [wanted])


DEFAULTS = {name: value for name, value in PATIENT.items() if name not in ("min_segment_tokens", "segment_dtype")}


@pytest.mark.parametrize("model, close", [(MODEL, CLOSE), ("granite", 1e-3)])
@pytest.mark.parametrize("options, length", [(PATIENT, 120), (DEFAULTS, 300)], ids=["float32", "defaults"])
def test_sixteen_concurrent_prompts_answer_as_one_at_a_time(
    options, length, model, close, shared_daemon, expected, new=8
):
    """The prompts are scheduled together with one that has no segments. By default, tuples have 16 bits, and segments
    that save no time by measured rates are computed; the test fixes these rates.

    On one kind of CPU nothing differed. On others, bf16 products of a higher matrix may round differently, which moves
    logits by a bf16 step: 2⁻⁶ between 2 and 4. So log-probabilities are compared within CLOSE, which is above that step.
    Two tokens can change places if each of them moves by CLOSE: tokens are compared up to the first whose lead is below
    twice that. Granite computes in fp32. Its blocks are short: prompts with the same first segment would share some.
    """
    settings, parts = connector(shared_daemon, segments=True, **options), texts("many", 8, length)
    with Segmented(model, settings, max_num_seqs=17, num_gpu_blocks_override=512) as child:
        child.probe("fix_pace", 10.0, 0.1)  # a step takes as long as 100 tokens
        child.publish(parts)
        chance = random.Random(3)
        prompts = []
        for number in range(16):
            lead = parts[0] if model == MODEL else prompt(f"many lead {number}", length)
            some = [lead, *chance.sample(parts[1:], 3)]
            prompts.append((sum(some, []) + prompt(f"many query {number}", 20), [length] * 4))
        for one in prompts:
            child.probe("ask_together", [one], 1)
            child.probe("settle")  # its first segment is published, too
            child.call("erase")
        alone = []
        for one in prompts:
            alone += child.probe("ask_together", [one], new, margins=True)
            child.call("erase")
        plain, compared = prompt("many plain", 500), 0
        together = child.probe("ask_together", [*prompts, (plain, None)], new, margins=True)
        for one, other in zip(together, alone):
            # The first segment, or a prefix that ends at a block's end within it and saves a step.
            least = interiors(*[length] * 3) + (length if model == MODEL else length - 128)
            assert one[2] == other[2] >= least
            decided = next((i for i, lead in enumerate(other[3]) if lead < 2 * close), new)
            assert one[0][:decided] == other[0][:decided], (one, other)
            # After equal tokens, also the best log-probability of a near tie is comparable.
            apart = max(abs(a - b) for a, b in zip(one[1][: decided + 1], other[1]))
            print(f"{decided} tokens until a near tie, apart by {apart:.1e}")
            assert apart < close, (one, other)
            compared += decided
        assert compared > 16 * new / 2, "most tokens have a clear lead"
        same([together[16][:2]], expected(model, [plain], new), close)
        assert child.probe("state_of", 20)[1] == 0, "nothing is held"


def test_a_prompt_longer_than_a_step_is_taken_in_several(shared_daemon, segmented):
    parts, query = texts("long", 6, 300), prompt("long query", 50)
    child = segmented(MODEL)
    child.publish(parts)
    wanted = child.ask(parts, query)
    with Segmented(MODEL, connector(shared_daemon, segments=True, **PATIENT), max_num_batched_tokens=400) as other:
        answer = other.ask(parts, query)
    assert answer[2] == wanted[2] == 300 + interiors(*[300] * 5)
    assert max(abs(a - b) for a, b in zip(answer[1], wanted[1])) < 2e-2


def test_a_segment_that_saves_no_time_is_computed(shared_daemon, segmented, expected):
    parts, query = texts("even", 4), prompt("even", 20)
    segmented(MODEL).publish(parts)
    options = connector(shared_daemon, segments=True, **dict(PATIENT, min_segment_tokens=90))
    with Segmented(MODEL, options) as child:
        answer = child.ask(parts, query)
        assert answer[2] == 100 and count(child, "segments_refused", "no_gain") == 3
        (wanted,) = expected(MODEL, [sum(parts, []) + query], 4)
        assert abs(answer[1][0] - wanted[1][0]) < OTHER_STEPS, "exact"
        assert child.probe("break_even", 0.010, 0.0001) == [True, False]


def test_segments_that_land_more_slowly_than_they_are_computed_are_computed(tmp_path, expected):
    parts, query = texts("slow tier", 4), prompt("slow tier", 20)
    with ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        with Segmented(MODEL, connector(daemon, segments=True, **PATIENT)) as child:
            child.publish(parts)
            assert child.ask(parts, query)[2] == 100 + interiors(100, 100, 100), "landings are measured"
        fast = connector(daemon, segments=True, **PATIENT, tokens_per_second=1e12)
        with Segmented(MODEL, fast) as child:
            answer = child.ask(parts, query)
            same([answer], expected(MODEL, [sum(parts, []) + query], 4))
            child.probe("settle")
            assert answer[2] == 0 and count(child, "published_segments") == 0, "nor are they stored again"


RATES = (
    "[half.cache.model.tokens_per_second for half in (server.connector()._scheduler._jumps.lookups, "
    "__import__('segment_probe').worker()._composer._opening)]"
)


def test_the_daemon_receives_the_engines_prefill_rate_for_segments(shared_daemon):
    options = connector(shared_daemon, segments=True, **PATIENT, tokens_per_second=0.0)
    with Segmented(MODEL, options) as child:
        deadline, number = time.monotonic() + 120, 0
        while number == 0 or not all(1 < rate < 1e7 for rate in child.call("evaluate", RATES)):
            assert time.monotonic() < deadline
            child.publish(texts(f"rate {number}", 2))
            number += 1


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(segmented):
    child, parts, query = segmented(MODEL), texts("prompt logs", 3), prompt("prompt logs", 20)
    child.publish(parts)
    jumps = count(child, "jumps")
    logs = child.probe("prompt_logs", sum(parts, []) + query, [100] * 3)
    assert len(logs) == 320 and None not in logs[1:] and count(child, "jumps") == jumps


def test_a_segment_that_a_second_request_has_is_run_while_others_are_served(segmented):
    child = segmented(MODEL)
    part, published = prompt("twice", 150), count(segmented(MODEL), "published_segments")
    for number in range(2):
        child.ask([prompt(f"twice lead {number}", 40), part], prompt(f"twice query {number}", 20), 8)
    assert count(child, "published_segments") == published + 1, "the text alone: leads came once"
    child.call("erase")
    *_, cached = child.ask([prompt("twice lead 3", 40), part], prompt("twice query 3", 20))
    assert cached == interiors(150)
    child.probe("settle")


def test_a_segments_run_counts_in_the_budget_of_a_step(shared_daemon, expected):
    """The prefill of other prompts fills every step, except the space that a step reserves for the run."""
    options, part = connector(shared_daemon, segments=True, **PATIENT), prompt("budget", 150)
    prompts = [(prompt(f"budget {i}", 40) + part + prompt(f"budget query {i}", 700), [40, 150]) for i in range(4)]
    with Segmented(MODEL, options, max_num_batched_tokens=400) as child:
        answers, steps = child.probe("ask_together_and_count", prompts)
    print(steps)
    for (_, logs, _), (_, wanted) in zip(answers, expected(MODEL, [tokens for tokens, _ in prompts], 4)):
        assert abs(logs[0] - wanted[0]) < OTHER_STEPS, "exact"
    assert max(map(sum, steps)) <= 400
    assert any(scheduled > 0 and alone == 150 for scheduled, alone in steps)


def test_segments_of_few_tokens_and_prompts_without_a_query(segmented, expected):
    child = segmented(MODEL)
    parts = [prompt("few 0", 2), prompt("few 1", 10), prompt("few 2", 16), prompt("few 3", 17), prompt("few 4", 120)]
    child.publish(parts)
    for number in (1, 2, 5):
        some = parts[:number]
        whole = sum(some, [])
        child.call("erase")
        tokens, logs, cached = child.ask(some, [])
        assert cached <= len(whole) - 1, "the last token is always computed"
        assert abs(logs[0] - expected(MODEL, [whole], 4)[0][1][0]) < 0.2


def test_an_engine_that_only_loads_publishes_nothing(segmented, expected):
    child, query = segmented(MODEL), prompt("alone", 20)
    known, new = texts("known", 3), texts("unknown", 3)
    child.publish(known)
    child.probe("publish", False)
    try:
        assert child.publish(new) == 0
        mixed = child.ask([known[0], new[1], known[2]], query)
        assert mixed[2] == 100 + interiors(100), (
            "the missing one is computed in the prompt, between those that are cached"
        )
    finally:
        child.probe("publish", True)


def preemptions(child):
    return child.call("evaluate", "sum(m.value for m in llm.get_metrics() if m.name == 'vllm:num_preemptions')")


def test_a_preempted_prompt_jumps_again_with_the_same_answer(shared_daemon, segmented):
    """The prompts fit together into the engine's cache. When the first one decodes its 25th token, they do not: the
    last one is preempted, and jumps again. It may be preempted several times before it has made all of its jumps."""
    new, prompts = 60, []
    for number, (lengths, query) in enumerate([([180] * 4, 24), ([120] * 3, 90), ([150] * 3, 60)]):
        parts = [prompt(f"preempt {number} {i}", length) for i, length in enumerate(lengths)]
        segmented(MODEL).publish(parts)
        prompts.append((sum(parts, []) + prompt(f"preempt query {number}", query), lengths))
    wanted = segmented(MODEL).probe("ask_together", prompts, new)
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(MODEL, options, num_gpu_blocks_override=18, max_num_seqs=3, max_model_len=3 * 384) as child:
        child.probe("watch_jumps")
        child.probe("start_together")
        free, state = child.call("free_blocks"), child.probe("state_of")
        answers = child.probe("ask_together", prompts, new)
        child.call("erase")
        assert (child.call("free_blocks"), child.probe("state_of", 20)) == (free, state), "nothing is held"
        assert preemptions(child) > 0
        again = child.probe("jumped_again")
        print("jumped again, and apart by", again)
        assert again and max(again) < 1e-2, "the same states and keys in other blocks"
        for (tokens, logs, cached), (other, others, _), (_, lengths) in zip(answers, wanted, prompts):
            assert cached == lengths[0] + interiors(*lengths[1:])
            # The decoded tokens are computed as part of a prompt, which rounds differently: a later token may differ.
            parting = next((i for i, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), new)
            assert parting >= 3 and max(abs(a - b) for a, b in zip(logs[:parting], others)) < 0.1


def test_a_daemon_that_is_killed_costs_a_recompute(tmp_path, expected):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    parts, query = texts("killed", 4), prompt("killed", 20)
    whole = sum(parts, []) + query
    wanted = expected(MODEL, [whole], 4)
    with ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        waits = connector(
            daemon, segments=True, **dict(PATIENT, call_ms=2000, lookup_ms=2000, land_ms=2000), quiet_ms=200
        )
        with Segmented(MODEL, waits) as child:
            child.publish(parts)
            composed = child.ask(parts, query)
            assert composed[2] == 100 + interiors(100, 100, 100)
            child.call("erase")
            free = child.call("free_blocks")
            daemon.kill()
            same([child.ask(parts, query)], wanted)
            daemon.start()
            for _ in range(int(os.environ.get("ASHLAR_VLLM_KILLS", "6"))):
                child.call("erase")
                killer = threading.Timer(draw.uniform(0, 0.3), daemon.kill)
                killer.start()
                tokens, logs, cached = child.ask(parts, query)
                # Some of the segments may already have been cached.
                assert max(abs(a - b) for a, b in zip(logs[:1], wanted[0][1])) < 0.2
                assert cached or max(abs(a - b) for a, b in zip(logs, wanted[0][1])) < 1e-4
                killer.join()
                daemon.start()
            deadline, other = time.monotonic() + 30, [parts[i] for i in (1, 3, 2)]
            jumps, number = count(child, "jumps"), 0
            while count(child, "jumps") == jumps and time.monotonic() < deadline:
                child.probe("settle")
                child.call("erase")
                child.ask(other, prompt(f"killed {number}", 20))
                number += 1
            assert count(child, "jumps") > jumps, "the restarted daemon is used again"
            child.probe("settle")
            child.call("erase")
            assert child.call("free_blocks") == free


@pytest.mark.skipif(
    "ASHLAR_VLLM_PROCESSES" not in os.environ, reason="minutes on a busy machine: ASHLAR_VLLM_PROCESSES=1"
)
def test_segments_with_the_engine_core_in_a_separate_process(shared_daemon, segmented):
    parts, query = texts("process", 3), prompt("process", 20)
    segmented(MODEL).publish(parts)
    first = segmented(MODEL).ask(parts, query)
    options = connector(shared_daemon, segments=True, **PATIENT)
    with Segmented(MODEL, options, processes=True, worker_extension_cls="tiny_engines.Wide") as child:
        other = child.ask(parts, query)
        assert other[0] == first[0] and other[2] == first[2] == 100 + interiors(100, 100)
        assert max(abs(a - b) for a, b in zip(other[1], first[1])) < 1e-4


def test_a_trained_hybrid_keeps_its_answers_composed_and_loses_them_by_naive_addition(tmp_path, shared_daemon):
    """The model and the task of docs/benchmarks/quality.md. ASHLAR_VLLM_EXAMPLES: number of prompts, with 17 answers
    each."""
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

        def accuracy(prompts, salt=None):
            child.call("erase")
            found = child.probe("next_tokens", prompts, salt)
            return 100 * sum(map(int.__eq__, found, right)) / len(right)

        def publish():
            for one in examples:
                child.publish(one.segments)

        full = accuracy([(tokens, None) for tokens, _ in asked], "full")
        composed = {}
        for head, tail in ((3, 0), (8, 8)):
            child.probe("set_seams", head, tail)
            publish()
            composed[head, tail] = accuracy(asked)
        jumps = count(child, "jumps")
        child.probe("set_seams", 8, 8, naive=True)
        publish()
        naive = accuracy(asked)
        assert count(child, "jumps") > jumps > 0 and count(child, "load_failures") == 0
    print(f"{len(right)} answers: full {full:.1f} %, composed {composed}, naive {naive:.1f} %")
    assert full >= 90, "the kept weights solve the task in bf16"
    assert all(each >= full - 3 for each in composed.values())
    assert naive < min(composed.values()) - 2


def test_the_first_token_comes_sooner_with_eight_cached_segments(tmp_path, monkeypatch):
    """A short run of the program of docs/benchmarks/vllm.md."""
    monkeypatch.syspath_prepend(str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))
    import vllm_segments

    out = tmp_path / "segments.json"
    arguments = "--size small --segments 8 --tokens 384 --runs 3 --json"
    monkeypatch.setattr(sys, "argv", ["vllm_segments.py", *arguments.split(), str(out)])
    vllm_segments.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["segments"] == 8 and row["tokens"] == 8 * 384 + 32
    assert 0 < row["ttft_with_ms"] < 0.8 * row["ttft_without_ms"]


def test_segments_under_load(tmp_path, monkeypatch):
    """A short run of the program of docs/benchmarks/vllm.md."""
    monkeypatch.syspath_prepend(str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))
    import vllm_segments_load

    out = tmp_path / "load.json"
    arguments = (
        "--size small --ways none,segments --rates 2 --seconds 2 --turns 2 --documents 6 --cold 512 --repeats 2 --json"
    )
    monkeypatch.setattr(sys, "argv", ["vllm_segments_load.py", *arguments.split(), str(out)])
    vllm_segments_load.main()
    found = json.loads(out.read_text())
    none, segments = found["runs"]
    assert none["way"] == "none" and none["reused"] == 0 and segments["way"] == "segments" and segments["reused"] > 0.5
    assert 0 < segments["ttft_p50_ms"] < none["ttft_p50_ms"] and segments["tokens_per_s"] > 0
    assert [(cold["way"], cold["tokens"]) for cold in found["cold"]] == [("prefixes", 512), ("segments", 512)]
    for cold in found["cold"]:
        assert cold["low_percent"] <= cold["added_percent"] <= cold["high_percent"]
