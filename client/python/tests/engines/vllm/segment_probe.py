# SPDX-License-Identifier: Apache-2.0
"""Calls that the tests of segments make inside an engine's process: `Child.call("evaluate", ...)` calls these."""

import contextlib
import dataclasses
import logging
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import vllm
import vllm._custom_ops as engine_ops
from vllm.distributed.kv_transfer import get_kv_transfer_group

import ashlar
from ashlar.request import StepKind
from ashlar.tensors import MATRIX, compose, segment_tuple
from ashlar.vllm import composing, runs
from ashlar.vllm.cold_segments import _Cold
from ashlar.vllm.composing import Composer
from ashlar.vllm.landed_tuples import state_shape, transition_shape
from ashlar.vllm.lookups import SegmentLookups, await_plan
from ashlar.vllm.messages import Alone, Fetched
from ashlar.vllm.runs import Run
from ashlar.vllm.segments import NORM_EPSILON, Names


def worker():
    return get_kv_transfer_group()._worker


def ask(server, tokens, lengths, count=4, everything=False, salt=None):
    """Returns (tokens, log-probabilities, cached tokens); `everything`: log-probabilities of the whole vocabulary for
    the first token."""
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}} if lengths is not None else None
    sampling = vllm.SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, logprobs=512 if everything else 1, max_tokens=count,
        extra_args=extra,
    )  # fmt: skip
    asked = {"prompt_token_ids": tokens} if salt is None else {"prompt_token_ids": tokens, "cache_salt": salt}
    output = server.llm.generate([asked], sampling, use_tqdm=False)[0]
    best = output.outputs[0]
    if everything:
        return [best.logprobs[0][token].logprob for token in range(512)]
    logs = [each[token].logprob for each, token in zip(best.logprobs, best.token_ids)]
    return list(best.token_ids), logs, output.num_cached_tokens


def ask_together(server, prompts, count=4, salt=None, margins=False):
    """Like `ask`, for several (tokens, lengths) that are served at once. `margins`: also returns, for each token, how much
    its log-probability exceeds that of the second one."""
    sampling = [
        vllm.SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, logprobs=2 if margins else 1, max_tokens=count,
            extra_args=None if lengths is None else {"kv_transfer_params": {"ashlar_segments": lengths}},
        )
        for _, lengths in prompts
    ]  # fmt: skip
    salted = {} if salt is None else {"cache_salt": salt}
    asked = [{"prompt_token_ids": tokens, **salted} for tokens, _ in prompts]
    outputs = server.llm.generate(asked, sampling, use_tqdm=False)
    found = []
    for output in outputs:
        best = output.outputs[0]
        logs = [each[token].logprob for each, token in zip(best.logprobs, best.token_ids)]
        found.append((list(best.token_ids), logs, output.num_cached_tokens))
        if margins:
            ranked = [sorted((one.logprob for one in each.values()), reverse=True) for each in best.logprobs]
            found[-1] += ([first - second for first, second, *_ in ranked],)
    return found


def start_together(server):
    """Makes prompts wait until the segments of all waiting prompts have landed. Otherwise one could end before another
    starts."""
    half = server.connector()._scheduler

    def match(*given, own=half.match):
        found = own(*given)
        return found if all(prompt.ready for prompt in half._jumps._prompts.values()) else (None, False)

    half.match = match


def prompt_logs(server, tokens, lengths):
    """Log-probabilities of a prompt's tokens; None: not computed."""
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}}
    sampling = vllm.SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=1, prompt_logprobs=0, extra_args=extra
    )
    (output,) = server.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    return [None if each is None else each[token].logprob for token, each in zip(tokens, output.prompt_logprobs)]


class Naive(Composer):
    """Adds a segment's state instead of composing it: the transition is omitted."""

    def _take_tuple(self, request, number, step, *given):
        taken = super()._take_tuple(request, number, step, *given)
        if taken is not None and step.kind is not StepKind.CHECKPOINT:
            taken.transition = torch.eye(taken.transition.shape[-1]).expand_as(taken.transition)
        return taken


def run_alone(server, tokens):
    """Runs these tokens alone, like another engine's segment."""
    server.connector()._scheduler._jumps.cold._segments[b"given"] = _Cold(
        b"given", np.array(tokens, np.int32), True, ""
    )
    settle(server)


def fill_free_blocks(server, value):
    """Fills the keys and values of all blocks that no request uses with a number, which may be "inf"."""
    blocks = server.connector()._scheduler._pool.blocks
    free = [block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null]
    with torch.inference_mode():
        for layer in worker()._composer._engine._attention.values():
            layer.kv_cache[free] = float(value)


def runs_of(server, tokens):
    """Returns how often the model runs for a segment of these tokens."""
    engine, ran = worker()._composer._engine, []

    def prepare(*arguments, own=engine.prepare, **named):
        ran.append(arguments)
        return own(*arguments, **named)

    engine.prepare = prepare
    try:
        run_alone(server, tokens)
    finally:
        del engine.prepare
    return len(ran)


def set_seams(server, head, tail, naive=False):
    """Replaces the composer: other seam widths are another layout, of which nothing is cached yet."""
    old = worker()._composer
    old.close()
    options = dataclasses.replace(old._options, seam_head=head, seam_tail=tail)
    kind = Naive if naive else Composer
    states = [held for _, held in old._states.values()]
    composer = worker()._composer = kind(
        old._engine, old._described, options, states, old._most, old._publishes, old._pace, old._order
    )
    jumps = server.connector()._scheduler._jumps
    jumps.lookups.close()
    jumps.lookups = SegmentLookups(old._described, options)
    jumps.lookups.open(composer.model)
    return composer.model.head


def ask_without_names_apart(server, tokens, lengths):
    """Asks with segments and then without, while blocks of composed prompts are named like all others."""
    with mock.patch.object(Names, "set", lambda names, jumps: None):
        ask(server, tokens, lengths)
        answer = ask(server, tokens, None)
    server.erase()
    return answer


# ---- states compared with a reference


def _rows_of(core, composer, block, count):
    rows = core.run_seen(count, block)
    layer = composer.model.layers[composer._states[core.name][0].layer]
    found = {name: row.double().cpu() for name, row in rows.items()}
    k = found["k"]
    if layer.family in MATRIX:
        found["transposed"] = layer.order is ashlar.StateOrder.VALUE_FIRST
        if not core.normalized:
            k = k / (k.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
    else:
        found["A"] = torch.tensor(list(layer.decay_table), dtype=torch.float64)
    found["k"] = k.repeat_interleave(layer.value_heads // layer.key_heads, 1)
    return rows, found


def _zero(layer):
    return torch.zeros(state_shape(layer), dtype=torch.float64)


def _recur(state, rows, begin, end):
    """Returns the state after all tokens, one by one, in fp64, in the order of the engine's states."""
    if rows.get("transposed"):
        return _recur(state.transpose(1, 2), rows | {"transposed": False}, begin, end).transpose(1, 2)
    for t in range(begin, end):
        k, v = rows["k"][t], rows["v"][t]
        if "A" in rows:
            steps = rows["beta"][t][:, None, None]
            state = state * (rows["A"][:, None, None] * steps).exp() + steps * v[:, :, None] * k[:, None, :]
            continue
        state = state * rows["g"][t].exp()[:, None, None]
        write = rows["beta"][t][:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * write[:, None, :]
    return state


def _spare(composer, tokens):
    """Returns blocks that no request uses while the engine is idle: pages, and one per group of linear layers."""
    described = composer._described
    count = -(-len(tokens) // described.block)
    begins = {group: 200 + number * count for number, group in enumerate(described.key_groups)}
    pages = {group: list(range(begin, begin + count)) for group, begin in begins.items()}
    return pages, {place.group: 230 + place.group for place in described.linear}


def _apart(state, other):
    return float((state.double() - other).norm() / other.norm())


def tuples_against_one_run(server, tokens, lengths):
    """Returns relative errors by layer: of the state that the kernels compose from tuples of parts of a run, and of the
    engine's own end state, whose kernel multiplies in bf16."""
    composer = worker()._composer
    cache, (pages, blocks) = composer._opening.cache, _spare(composer, tokens)
    table = composer._pages.take(len(tokens) + 1, time.monotonic() + 1, lambda: True)
    request = cache.begin(np.array([*tokens, 0], np.int32), lengths, table, fill=True)
    runs = [(number, run) for number, run in enumerate(request.missing) if run.transition]
    assert len(runs) == len(lengths) - 1
    found = {}

    def at_linear(core):
        place, states = composer._states[core.name]
        block = blocks[place.group]
        given, rows = _rows_of(core, composer, block, len(tokens))
        layer = composer.model.layers[place.layer]
        state = _zero(layer)
        at, errors = 0, []
        whole = _recur(state, rows, 0, len(tokens))
        for number, run in runs:
            start = sum(lengths[: run.segment])
            part = {name: row[start : start + len(run.tokens)].contiguous() for name, row in given.items()}
            if core.normalized:
                inside = {name: row[run.capture_begin : run.capture_end] for name, row in part.items()}
                made = segment_tuple(layer, inside, composer._engine.decays(core.name))
                end, transition = (each.cpu() for each in made[:2])
            else:
                end, transition = torch.empty(state_shape(layer)), torch.empty(transition_shape(layer))
                scales = dict(norm_epsilon=NORM_EPSILON, q_scale=layer.d_k**-0.5)
                cache.compute_alone(request, number, place.layer, end, transition=transition, **scales, **part)
            state = _recur(state, rows, at, start + run.capture_begin)
            before = state
            at = start + run.capture_end
            composed = state.float()
            compose(composed, transition, end, layer)
            state = composed.double()
            errors.append(_apart(state, _recur(before, rows, start + run.capture_begin, at)))
        state = _recur(state, rows, at, len(tokens))
        engines = composer._state(states, block, place).cpu()
        found[core.name] = (max(errors), _apart(state, whole), _apart(engines, whole))

    try:
        composer._engine.run(np.array(tokens, np.int32), pages, at_linear)
    finally:
        request.end()
        composer._pages.give(table.tolist())
    return list(found.values())


def _run_of(tokens, cuts, first):
    """Runs tokens alone, in parts that end at these positions. Returns the run, with tuples of all layers."""
    composer = worker()._composer
    (pages, states), run = _spare(composer, tokens), Run(composer._states, composer.model)
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)]):
        part = Alone(1, np.array(tokens, np.int32), begin, end, first, "", pages, states)
        run.prepare(part, composer._engine, lambda: True)()
        run.release_device(composer._order)
    for name, rows in run.rows.items():
        layer = composer.model.layers[composer._states[name][0].layer]
        inside = {key: row[slice(*run.interior)] for key, row in rows.items()}
        norm = (inside["k"].square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        run.tuples[name] = segment_tuple(layer, inside | {"k": inside["k"] * norm})
    return run


def parts_against_one_run(server, tokens, cuts, first=False):
    """Returns relative errors of what a run of several parts leaves, against one part: by layer, of keys and values, or of
    the convolution's inputs and the tuple. A first segment has a state instead of a tuple."""
    with torch.inference_mode():
        parts, whole = (_run_of(tokens, each, first) for each in (cuts, []))
        found = [
            [_apart(torch.cat(one), torch.cat(other).double())
             for one, other in zip(zip(*parts.keys[name]), zip(*whole.keys[name]))]
            for name in whole.keys
        ]  # fmt: skip
        for name in whole.inputs:
            pairs = [(parts.inputs[name], whole.inputs[name])]
            if first:
                pairs.append((parts.ends[name], whole.ends[name]))
            else:
                pairs += zip(parts.tuples[name], whole.tuples[name])
            found.append([_apart(one, other.double()) for one, other in pairs])
    return found


def begin_parts(server, tokens, asked=2):
    """Begins to run tokens alone, like a segment that this number of requests contained. Returns the number of computed
    tokens, between two parts."""
    cold = server.connector()._scheduler._jumps.cold
    cold.add(tokens, [1, len(tokens) - 1], "", [1], asked)
    deadline = time.monotonic() + 60
    while ((run := cold._running) is None or run.computing) and time.monotonic() < deadline:
        server.llm.llm_engine.step()
    return run.end


def kept(server):
    """Returns whether a worker keeps computed parts of a run."""
    return worker()._composer._kept is not None


def remember_jumps(composer, seen):
    """Records, for each jump, its begin and end, and every layer's state in fp64 before and after it."""
    own = composer.apply

    def states(jump):
        found = {}
        for name, (place, states) in composer._states.items():
            found[name] = composer._state(states, jump.blocks[place.group][jump.state_block], place).double().cpu()
        return found

    def apply(jump):
        before = states(jump)
        own(jump)
        seen.append((jump.begin, jump.end, before, states(jump)))

    return mock.patch.object(composer, "apply", apply)


@dataclasses.dataclass
class Apart:
    """Relative errors of one layer's states after a request, compared with one run of the whole prompt."""

    interior: float = 0.0  # error of a composed step against the recurrence in fp64 from the state before it
    computed: float = 0.0  # error of any other step against the engine's kernel from the state before it
    chain: float = 0.0  # error of the last state against all steps in sequence, each from the previous one
    exact: float = 0.0  # compared with the fp64 recurrence over the whole prompt
    engine: float = 0.0  # error of the engine's own run against the same recurrence


def composed_against_one_run(server, tokens, lengths):
    """Returns the differences between a request's states and those of one run of the whole prompt, by layer."""
    composer, seen = worker()._composer, []
    with remember_jumps(composer, seen):
        *_, cached = ask(server, tokens, lengths, 1)
    assert cached == sum(end - begin for begin, end, *_ in seen) > 0
    return jumps_against_one_run(composer, seen, tokens)


def jumps_against_one_run(composer, seen, tokens):
    """Returns the differences by layer. `seen`: a request's jumps, as `remember_jumps` records them."""
    most = seen[-1][1]
    (pages, blocks), found = _spare(composer, tokens[:most]), []

    def at_linear(core):
        place, states = composer._states[core.name]
        block, layer = blocks[place.group], composer.model.layers[place.layer]
        _, rows = _rows_of(core, composer, block, most)
        inputs = core.inputs()
        engines = composer._state(states, block, place)
        zero = _zero(layer)
        exact, own_run = _recur(zero, rows, 0, most), engines.double().cpu()

        def run(begin, end, state):
            """Runs the engine's kernel."""
            if begin == end:
                return state
            engines.copy_(state)
            taps = layer.conv_kernel - 1
            if begin:
                states.tail(block).copy_(inputs[begin - taps : begin].reshape(states.tail(block).shape))
            core.run(begin, end, block)
            return engines.double().cpu()

        last, state, chain, apart = 0, zero, zero, Apart(engine=_apart(own_run, exact))
        for begin, end, before, after in seen:
            if begin > last:
                apart.computed = max(apart.computed, _apart(before[core.name], run(last, begin, state)))
            chain = _recur(run(last, begin, chain), rows, begin, end) if begin else run(begin, end, chain)
            state = after[core.name]
            if begin:
                apart.interior = max(apart.interior, _apart(state, _recur(before[core.name], rows, begin, end)))
            else:  # the first segment's end state is the engine's own
                apart.computed = max(apart.computed, _apart(state, run(begin, end, zero)))
            last = end
        apart.chain, apart.exact = _apart(state, chain), _apart(state, exact)
        found.append(apart)
        core.run(0, most, block)  # so that deeper layers get the inputs of the whole run

    composer._engine.run(np.array(tokens[:most], np.int32), pages, at_linear)
    return found


def norm_epsilons(server):
    """Returns what the engine's two kernels, for prompts and for decoding, add to the squares of a key. Measured by the
    state after one token whose key has squares of 1e-5 in total."""
    key, value = torch.full((1, 1, 4, 64), (1e-5 / 64) ** 0.5).bfloat16(), torch.ones(1, 1, 4, 64).bfloat16()
    half, none = torch.full((1, 1, 4), 0.5).bfloat16(), torch.zeros(1, 4).bfloat16()
    one = dict(cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), use_qk_l2norm_in_kernel=True)
    at = torch.tensor([1], dtype=torch.int32)
    states = torch.zeros(2, 2, 4, 64, 64)
    engine_ops.chunk_gated_delta_rule_cpu(
        query=key, key=key, value=value, g=torch.zeros(1, 1, 4), beta=half, initial_state=states[0],
        output_final_state=True, head_first=False, initial_state_indices=at, **one,
    )  # fmt: skip
    engine_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=torch.full((4,), -30.0), dt_bias=none[0], q=key, k=key, v=value, a=none, b=none,
        initial_state_source=states[1], initial_state_indices=at, **one,
    )  # fmt: skip
    # The state is half the key, divided by the root of its squares plus the addend, times a value of ones.
    key, state = key.double(), states[:, 1].double()
    return ((key.mean() / (2 * state.mean((1, 2, 3)))).square() - key.square().sum(-1).mean()).tolist()


@contextlib.contextmanager
def warnings_of(name):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield seen
    finally:
        logging.getLogger(name).removeHandler(handler)


def ask_and_hear(server, tokens, lengths):
    with warnings_of("vllm.ashlar") as seen:
        answer = ask(server, tokens, lengths)
    return answer, seen


def ask_and_count(server, tokens, lengths):
    """Returns the answer, and the number of steps without tokens that it took."""
    half, steps = worker(), []
    with mock.patch.object(half, "begin_step", lambda step, own=half.begin_step: (steps.append(step), own(step))):
        answer = ask(server, tokens, lengths, 1)
    return answer, sum(step.scheduled_tokens == 0 for step in steps)


def ask_together_and_count(server, prompts):
    """Returns the answers, and each step's numbers of tokens: of requests, and of a segment that runs alone."""
    half, steps = worker(), []
    with mock.patch.object(half, "begin_step", lambda step, own=half.begin_step: (steps.append(step), own(step))):
        answers = ask_together(server, prompts)
    parts = [None if step.alone is None else (step.alone.begin, step.alone.end) for step in steps]
    return answers, [
        (step.scheduled_tokens, 0 if part is None else part[1] - part[0]) for step, part in zip(steps, parts)
    ]


def settle(server, seconds=60):
    """Steps like an idle engine, until no segment remains to be computed separately."""
    jumps, deadline = server.connector()._scheduler._jumps, time.monotonic() + seconds
    while jumps.cold.pending and time.monotonic() < deadline:
        server.llm.llm_engine.step()


def fail_the_next(server, what, after=0):
    """Makes one call of the composer fail, after some that succeed."""
    composer = worker()._composer
    own, left = getattr(composer, what), [after]

    def once(*args):
        if left[0] > 0:
            left[0] -= 1
            return own(*args)
        setattr(composer, what, own)
        raise RuntimeError("as a test wants it")

    setattr(composer, what, once)


def fail_the_next_preparation():
    """Makes the next run of a segment fail before the model's forward."""
    engine = worker()._composer._engine

    def once(*_):
        del engine.metadata
        raise RuntimeError("as a test wants it")

    engine.metadata = once


def fail_the_next_forward():
    """Makes the next run of a segment fail in the model's forward, at its second linear layer."""
    own, left = runs.linear_of, [1]

    def once(*given):
        if left[0] == 0:
            runs.linear_of = own
            raise RuntimeError("as a test wants it")
        left[0] -= 1
        return own(*given)

    runs.linear_of = once


def fail_after_the_next_forward():
    """Makes the next run of a segment fail once the model has run."""
    composer = worker()._composer
    own = composer._order

    def once():
        composer._order = own
        raise RuntimeError("as a test wants it")

    composer._order = SimpleNamespace(mark=once, copies=own.copies)


def ask_during_run(server, tokens, segment):
    """Asks without segments, while a segment that two requests need is run alone."""
    cold = _Cold(b"given", np.array(segment, np.int32), True, "", 2)
    server.connector()._scheduler._jumps.cold._segments[cold.name] = cold
    return ask(server, tokens, None, 8)


def begin_alone(server, tokens):
    """Runs these tokens alone, and leaves the publishing to the composer's thread."""
    cold = server.connector()._scheduler._jumps.cold
    cold._segments[b"given"] = _Cold(b"given", np.array(tokens, np.int32), True, "")
    deadline = time.monotonic() + 60
    while ((run := cold._running) is None or not run.complete) and time.monotonic() < deadline:
        server.llm.llm_engine.step()


def stall_the_next(server, seconds, prompts=1):
    """Delays each of the next lookups by this time."""
    composer = worker()._composer
    own, left = composer._land, [prompts]

    def late(landing):
        time.sleep(seconds)
        left[0] -= 1
        if left[0] == 0:
            composer._land = own
        return own(landing)

    composer._land = late


def set_patience(server, lookup_ms, land_ms=20000):
    jumps, composer = server.connector()._scheduler._jumps, worker()._composer
    jumps._paused_until = 0.0
    for each in (jumps, composer):
        each._options = dataclasses.replace(each._options, lookup_ms=lookup_ms, land_ms=land_ms)


def hang_lookups(server, hangs):
    """Makes a worker's lookups time out if `hangs`; otherwise lets them get answers again."""

    def unanswered(handle, deadline):
        time.sleep(max(0.0, deadline - time.monotonic()))
        return ashlar.Verdict.PENDING

    composing.await_plan = unanswered if hangs else await_plan


def take_pages(server, left=0):
    """Takes all pages but this number."""
    pages = worker()._composer._pages
    return pages.take((pages.free - left) * composing.PAGE_TOKENS, time.monotonic(), lambda: True).tolist()


def give_pages(server, taken):
    worker()._composer._pages.give(taken)


def wait_for_pages(server, seconds):
    """Sets the time that a complete run waits for pages."""
    composing._PAGES_WAIT = seconds


def publish_waits(server):
    return worker()._composer._unpublished is not None


def settle_landings(server):
    """Waits until the composer's thread has no more work."""
    deadline = time.monotonic() + 60
    while worker()._composer.busy and time.monotonic() < deadline:
        worker()._hear_composer()
        time.sleep(0.01)
    server.erase()


def begin_to_land(server, name, tokens, lengths):
    """Begins a request whose segments stay in flight: none of them has landed before `go_on`."""
    composer, engine = worker()._composer, server.llm.llm_engine
    own, server.go = composer._land, threading.Event()

    def late(landing):
        composer._land = own
        composer._fetched.put((landing.fetch.number, Fetched(ended=False)))  # the segments have been found
        server.go.wait(60)
        return own(landing)

    composer._land = late
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}}
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=2, extra_args=extra)
    engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    deadline = time.monotonic() + 60
    while composer._land is late and time.monotonic() < deadline:
        engine.step()
    assert len(composer._landings) == 1


def land_unseen(server):
    """Finishes the landings in flight without a step that reports them."""
    composer = worker()._composer
    (landing,) = composer._landings.values()
    server.go.set()
    deadline = time.monotonic() + 60
    while not landing.tuples and time.monotonic() < deadline:
        time.sleep(0.001)
    assert landing.tuples


def go_on(server):
    """Steps until no request is left, and the composer's thread has no more work."""
    server.go.set()
    while server.llm.llm_engine.has_unfinished_requests():
        server.llm.llm_engine.step()
    settle_landings(server)


def abort(server, name):
    """Steps like an engine without other requests. Returns the reason for which the request has ended, if there is one."""
    engine, scheduler = server.llm.llm_engine, server.core().scheduler
    engine.abort_request([name])
    ended = [output.outputs[0].finish_reason for output in engine.step()]
    deadline = time.monotonic() + 10
    while scheduler.requests and time.monotonic() < deadline:
        engine.step()
    assert not scheduler.requests, "its blocks are free while the composer's thread still waits"
    return ended


def publish(server, publishes):
    """Publishes as in an engine whose role is only to load."""
    server.connector()._scheduler._jumps.cold.publishes = publishes


def state_of(server, patience=0):
    """Returns (free pages of the composer, its landings). Pages of a failed landing may be unresolved for a moment."""
    composer = worker()._composer
    pages, until = composer._pages, time.monotonic() + patience
    while pages.free < pages.count and not composer._landings and time.monotonic() < until:
        quiesced = composer._opening.cache.take_quiesced_pages(pages.count, 100)
        pages.kept -= len(quiesced)
        pages.give(quiesced)
    return pages.free, len(composer._landings)


def watch_jumps(server):
    """Records what the jumps of each request leave in the engine's blocks: states, keys and values."""
    composer = worker()._composer
    server.jumps, own, block = {}, composer.apply, composer._described.block

    def apply(jump):
        own(jump)
        left = [
            composer._state(held, jump.blocks[place.group][jump.state_block], place)
            for place, held in composer._states.values()
        ]
        pages = jump.blocks[composer._described.key_groups[0]]
        whole = pages[-(-jump.begin // block) : jump.end // block]
        left += [layer.kv_cache[whole] for layer in composer._engine._attention.values() if whole]
        tokens = composer._landings[jump.fetch].fetch.tokens
        server.jumps.setdefault((tokens.tobytes(), jump.end), []).append([each.double() for each in left])

    composer.apply = apply


def jumped_again(server):
    """Returns the relative differences between repeated jumps of a request, and erases all records."""
    kept, server.jumps = server.jumps, {}
    several = [each for each in kept.values() if len(each) > 1]
    return [max(_apart(new, old) for old, new in zip(each[0], each[-1])) for each in several]


def next_tokens(server, prompts, salt=None):
    """Returns the most likely next token for each (tokens, lengths). Requests are served four at a time."""
    return [tokens[0] for tokens, *_ in ask_together(server, prompts, 1, salt)]


def fix_pace(server, seconds_per_step, seconds_per_token):
    """Replaces the measured rates, also those of later steps."""
    pace = worker()._pace
    pace.seconds_per_step, pace.seconds_per_token = seconds_per_step, seconds_per_token
    pace.begin = pace.end = lambda *given: None


def break_even(server, seconds_per_step, seconds_per_token):
    """Returns whether hits pay that save twice and half the time of a step, by measured rates."""
    composer = worker()._composer
    composer._options = dataclasses.replace(composer._options, min_segment_tokens=0)
    composer._pace.seconds_per_step, composer._pace.seconds_per_token = seconds_per_step, seconds_per_token
    return [composer._pays(round(each * seconds_per_step / seconds_per_token)) for each in (2, 0.5)]


def saved(server, sockets, tokens, lengths, model_id):
    """Returns (tokens of the prefix, of segments, both) that a probe of the daemon expects. Not in the tests' process:
    a process that has connected cannot fork engines."""
    with ashlar.Prober(*sockets) as prober:
        node = prober.probe(tokens, lengths, model_id=model_id).nodes[0]
    return node.prefix_tokens, node.segment_tokens, node.saved_tokens


def begin_and_abort(server, tokens):
    """Begins a request, and aborts it after a step."""
    engine = server.llm.llm_engine
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=20)
    engine.add_request("2000000", {"prompt_token_ids": tokens}, sampling)
    engine.step()
    engine.abort_request(["2000000"])
