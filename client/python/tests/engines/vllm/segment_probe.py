# SPDX-License-Identifier: Apache-2.0
"""Calls that the tests of segments make inside an engine's process: `Child.call("evaluate", ...)` calls these."""

import contextlib
import dataclasses
import logging
import threading
import time
from unittest import mock

import numpy as np
import torch
import vllm
import vllm._custom_ops as engine_ops
from vllm.distributed.kv_transfer import get_kv_transfer_group

from ashlar.request import StepKind
from ashlar.vllm import scheduler as scheduler_module
from ashlar.vllm.composing import Composer
from ashlar.vllm.forward import Core
from ashlar.vllm.messages import Compose
from ashlar.vllm.segments import NORM_EPSILON


def worker():
    return get_kv_transfer_group()._worker


def ask(server, tokens, lengths, count=4, everything=False, salt=None):
    """(tokens, log-probabilities, cached tokens); `everything`: of the first token, those of the whole vocabulary."""
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


def ask_together(server, prompts, count=4):
    """As `ask`, of (tokens, lengths) that are served at once."""
    sampling = [
        vllm.SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=count,
            extra_args=None if lengths is None else {"kv_transfer_params": {"ashlar_segments": lengths}},
        )
        for _, lengths in prompts
    ]  # fmt: skip
    outputs = server.llm.generate([{"prompt_token_ids": tokens} for tokens, _ in prompts], sampling, use_tqdm=False)
    best = [output.outputs[0] for output in outputs]
    return [
        (
            list(one.token_ids),
            [each[token].logprob for each, token in zip(one.logprobs, one.token_ids)],
            out.num_cached_tokens,
        )
        for one, out in zip(best, outputs)
    ]


class Naive(Composer):
    """Adds a segment's state where it should compose: the transition is left out."""

    def _take_step(self, request, number, step, place, state):
        alone = torch.zeros_like(state)
        done = super()._take_step(request, number, step, place, alone)
        if step.begin == 0:
            state.copy_(alone)
        else:
            state += alone
        return done


def set_seams(server, head, tail, naive=False):
    """Another composer: other widths are another layout, of which nothing is cached yet."""
    old = worker()._composer
    old.close()
    options = dataclasses.replace(old._options, seam_head=head, seam_tail=tail)
    kind = Naive if naive else Composer
    states = [held for _, held in old._states.values()]
    worker()._composer = kind(old._engine, old._described, options, states, old._most, old._publishes)
    return worker()._composer.model.head


def ask_without_names_apart(server, tokens, lengths):
    """As if blocks of composed prompts were named like all others: this one, and then one without segments."""
    own = scheduler_module.name_apart
    scheduler_module.name_apart = lambda request, lengths: None
    try:
        ask(server, tokens, lengths)
        return ask(server, tokens, None)
    finally:
        scheduler_module.name_apart = own
        server.erase()


# ---- states held to a reference


def _rows_of(core, composer, block, count):
    rows = core.run_seen(0, count, block, fresh=True)
    layer = composer.model.layers[composer._states[core.name][0].layer]
    found = {name: row.double() for name, row in rows.items()}
    k = found["k"]
    k = k / (k.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
    found["k"] = k.repeat_interleave(layer.value_heads // layer.key_heads, 1)
    return rows, found


def _recur(state, rows, begin, end):
    """[heads, d_k, d_v] in fp64, token by token."""
    for t in range(begin, end):
        k, v = rows["k"][t], rows["v"][t]
        state = state * rows["g"][t].exp()[:, None, None]
        write = rows["beta"][t][:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * write[:, None, :]
    return state


def _spare(composer, tokens):
    """Blocks that no request has while the engine rests, as of a request."""
    described = composer._described
    count, blocks = -(-len(tokens) // described.block), []
    for group in range(described.groups):
        if group == described.attention_group:
            blocks.append(list(range(200, 200 + count)))
        else:
            blocks.append([0] * (count - 1) + [230 + group])
    return Compose("probe", np.array([*tokens, 0], np.int32), [], tuple(blocks))


def _apart(state, other):
    return float((state.double() - other).norm() / other.norm())


def tuples_against_one_run(server, tokens, lengths):
    """Relative errors by layer: the whole run's state composed from tuples cut out of it, by the kernels; and the
    engine's own end state, whose kernel multiplies bf16."""
    composer = worker()._composer
    cache, compose = composer._opening.cache, _spare(composer, tokens)
    table = composer._take(cache, len(tokens) + 1)
    request = cache.begin(np.array([*tokens, 0], np.int32), lengths, table, fill=True)
    runs = [(number, run) for number, run in enumerate(request.missing) if run.transition]
    assert len(runs) == len(lengths) - 1
    found = {}

    def at_linear(core):
        place, states = composer._states[core.name]
        block = composer._state_block(compose, place)
        given, rows = _rows_of(core, composer, block, len(tokens))
        layer = composer.model.layers[place.layer]
        state = torch.zeros(layer.value_heads, layer.d_k, layer.d_v, dtype=torch.float64)
        at, errors = 0, []
        whole = _recur(state, rows, 0, len(tokens))
        for number, run in runs:
            start = sum(lengths[: run.segment])
            part = {name: row[start : start + len(run.tokens)].contiguous() for name, row in given.items()}
            end = torch.empty(layer.value_heads, layer.d_k, layer.d_v)
            transition = torch.empty(layer.value_heads, layer.d_k, layer.d_k)
            cache.compute_alone(
                request, number, place.layer, end, transition=transition, norm_epsilon=NORM_EPSILON,
                q_scale=layer.d_k**-0.5, **part,
            )  # fmt: skip
            state = _recur(state, rows, at, start + run.capture_begin)
            before = state
            at = start + run.capture_end
            state = transition.double() @ state + end.double()
            errors.append(_apart(state, _recur(before, rows, start + run.capture_begin, at)))
        state = _recur(state, rows, at, len(tokens))
        engines = composer._state(states, block, place)
        found[core.name] = (max(errors), _apart(state, whole), _apart(engines, whole))

    try:
        pages = compose.blocks[composer._described.attention_group]
        composer._engine.run(np.array(tokens, np.int32), [(0, len(tokens))], pages, at_linear)
    finally:
        request.end()
        composer._pages.free += table.tolist()
    return list(found.values())


def _remember(composer, seen):
    """Keeps the steps of a request that is set, and every layer's state in fp64 before and behind each of them."""
    own = composer._into_blocks

    def into_blocks(compose, request, plan, landed, table):
        seen.update(steps=plan.steps, states={name: [] for name in composer._states})
        take, run = composer._take_step, Core.run

        def taken(request, number, step, place, state):
            before = state.double()
            done = take(request, number, step, place, state)
            seen["states"][place.name].append((before, state.double()))
            return done

        def ran(core, begin, end, block, fresh):
            place, states = composer._states[core.name]
            state = composer._state(states, composer._state_block(compose, place), place)
            before = state.double()
            run(core, begin, end, block, fresh)
            seen["states"][core.name].append((before, state.double()))

        with mock.patch.object(composer, "_take_step", taken), mock.patch.object(Core, "run", ran):
            return own(compose, request, plan, landed, table)

    return mock.patch.object(composer, "_into_blocks", into_blocks)


@dataclasses.dataclass
class Apart:
    """Relative errors of the states of one layer that a request left, by what one run of the whole prompt takes."""

    interior: float = 0.0  # of a composed step, against the recurrence in fp64 from the state that it had been given
    computed: float = 0.0  # of any other, against the engine's kernel from that state
    chain: float = 0.0  # of the last one, against all steps in turn, each from the one before
    exact: float = 0.0  # against the recurrence in fp64 of the whole prompt
    engine: float = 0.0  # of the engine's own run, against the same


def composed_against_one_run(server, tokens, lengths):
    """How far a request's states are apart from what one run of the whole prompt takes, by layer."""
    composer, seen = worker()._composer, {}
    with _remember(composer, seen):
        *_, cached = ask(server, tokens, lengths, 1)
    most = sum(lengths)
    assert cached == most
    compose, found = _spare(composer, tokens[:most]), []

    def at_linear(core):
        place, states = composer._states[core.name]
        block, layer = composer._state_block(compose, place), composer.model.layers[place.layer]
        _, rows = _rows_of(core, composer, block, most)
        engines = composer._state(states, block, place)
        zero = torch.zeros(layer.value_heads, layer.d_k, layer.d_v, dtype=torch.float64)
        exact, own_run = _recur(zero, rows, 0, most), engines.double()

        def take(step, end, state):
            if step.kind is StepKind.INTERIOR:
                return _recur(state, rows, step.begin, end)
            engines.copy_(state)
            states.tail(block).copy_(
                core.inputs_before(step.begin, layer.conv_kernel - 1).reshape(states.tail(block).shape)
            )
            core.run(step.begin, end, block, fresh=step.begin == 0)
            return engines.double()

        state, apart = zero, Apart(engine=_apart(own_run, exact))
        for step, (before, after) in zip(seen["steps"], seen["states"][core.name]):
            end = min(step.end, most)
            error, kind = (
                _apart(after, take(step, end, before)),
                "interior" if step.kind is StepKind.INTERIOR else "computed",
            )
            setattr(apart, kind, max(getattr(apart, kind), error))
            state = take(step, end, state)
        assert end == most
        apart.chain, apart.exact = _apart(after, state), _apart(after, exact)
        found.append(apart)
        core.run(0, most, block, fresh=True)  # what deeper layers see is the whole run's

    pages = compose.blocks[composer._described.attention_group]
    composer._engine.run(np.array(tokens, np.int32), [(0, most)], pages, at_linear)
    return found


def norm_epsilons(server):
    """What the engine's two kernels, for prompts and for decoding, add to a key's squares: by the state that one token
    leaves, of a key whose squares add up to 1e-5."""
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
    # The state is half the key, divided by the root of its squares and of what is added, times a value of ones.
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


def fail_the_next(server, what, after=0):
    """One call of the composer goes wrong, once, behind so many that do not."""
    composer = worker()._composer
    own, left = getattr(composer, what), [after]

    def once(*args):
        if left[0] > 0:
            left[0] -= 1
            return own(*args)
        setattr(composer, what, own)
        raise RuntimeError("as a test wants it")

    setattr(composer, what, once)


def stall_the_next(server, seconds, compose_ms=200, prompts=1):
    """Their segments are looked up, and then nothing happens for so long, each time."""
    composer = worker()._composer
    options, own, left = composer._options, composer._fill, [prompts]
    composer._options = dataclasses.replace(options, compose_ms=compose_ms, call_ms=100)

    def late(*args):
        time.sleep(seconds)
        left[0] -= 1
        if left[0] == 0:
            composer._fill, composer._options = own, options
        return own(*args)

    composer._fill = late


def begin_to_set(server, name, tokens, lengths):
    """A request whose segments are being set: none of them is computed before `go_on`."""
    composer, engine = worker()._composer, server.llm.llm_engine
    own, server.go = composer._fill, threading.Event()

    def late(*args):
        composer._fill = own
        server.go.wait(60)
        return own(*args)

    composer._fill = late
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}}
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=2, extra_args=extra)
    engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    deadline = time.monotonic() + 60
    while composer._serving is None and time.monotonic() < deadline:
        engine.step()
    assert len(composer._under_way) == 1


def go_on(server):
    """Until no request is left, and the composer's thread has nothing more to do."""
    server.go.set()
    while server.llm.llm_engine.has_unfinished_requests():
        server.llm.llm_engine.step()
    deadline = time.monotonic() + 60
    while worker()._composer._serving is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def end_unseen(server):
    """Sets the prompt under way to its end, without a step that sees it."""
    composer = worker()._composer
    (work,) = composer._under_way
    server.go.set()
    deadline = time.monotonic() + 60
    while work.result is None and time.monotonic() < deadline:
        composer._advance(work)
        time.sleep(0.001)
    assert work.result.done


def abort(server, name):
    """Steps as an engine without other requests does. Returns why the request has ended, as far as it is said."""
    engine, scheduler = server.llm.llm_engine, server.core().scheduler
    engine.abort_request([name])
    ended = [output.outputs[0].finish_reason for output in engine.step()]
    deadline = time.monotonic() + 10
    while scheduler.requests and time.monotonic() < deadline:
        engine.step()
    assert not scheduler.requests, "its blocks are free while the composer's thread still waits"
    return ended


def publish(server, publishes):
    """As of an engine whose role is to load alone."""
    worker()._composer._publishes = publishes


def state_of(server, patience=0):
    """(free pages of the composer, its work under way). Pages of a setting that failed may be in doubt for a moment."""
    composer = worker()._composer
    pages, until = composer._pages, time.monotonic() + patience
    while len(pages.free) < pages.count and not composer._under_way and time.monotonic() < until:
        pages.free += composer._opening.cache.take_quiesced_pages(pages.count, 100)
    return len(composer._pages.free), len(composer._under_way)


def watch_settings(server):
    """Keeps what each setting leaves in the engine's blocks: states, and keys and values of whole blocks."""
    composer = worker()._composer
    server.settings, own, block = {}, composer._into_blocks, composer._described.block

    def into_blocks(compose, *args):
        done = own(compose, *args)
        pages = compose.blocks[composer._described.attention_group][: compose.tokens_loaded // block]
        left = [
            composer._state(held, composer._state_block(compose, place), place)
            for place, held in composer._states.values()
        ]
        left += [layer.kv_cache[pages] for layer in composer._engine._attention.values() if pages]
        server.settings.setdefault(compose.request, []).append([each.double() for each in left])
        return done

    composer._into_blocks = into_blocks


def set_again(server):
    """Of requests that were set more than once: how far what was left is apart, relatively. Erases all of them."""
    kept, server.settings = server.settings, {}
    several = [each for each in kept.values() if len(each) > 1]
    return [max(_apart(new, old) for old, new in zip(each[0], each[-1])) for each in several]


def next_tokens(server, prompts):
    """The likeliest token behind each (tokens, lengths): requests are served four at a time."""
    return [tokens[0] for tokens, *_ in ask_together(server, prompts, 1)]
