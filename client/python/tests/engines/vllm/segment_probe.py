"""Calls that the tests of segments make inside an engine's process: `Child.call("evaluate", ...)` calls these."""

import contextlib
import dataclasses
import logging
import time

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group

from ashlar.request import StepKind
from ashlar.vllm import scheduler as scheduler_module
from ashlar.vllm.composing import Composer
from ashlar.vllm.messages import Compose


def worker():
    return get_kv_transfer_group()._worker


def ask(server, tokens, lengths, count=4, everything=False):
    """(tokens, log-probabilities, cached tokens); `everything`: of the first token, those of the whole vocabulary."""
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}} if lengths is not None else None
    sampling = vllm.SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, logprobs=512 if everything else 1, max_tokens=count,
        extra_args=extra,
    )  # fmt: skip
    output = server.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
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
        (list(one.token_ids), [each[token].logprob for each, token in zip(one.logprobs, one.token_ids)], out.num_cached_tokens)
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
        server.forget()


# ---- states held to a reference


def _rows_of(core, composer, block, count):
    rows = core.run_seen(0, count, block, fresh=True)
    layer = composer.model.layers[composer._states[core.name][0].layer]
    found = {name: row.double() for name, row in rows.items()}
    k = found["k"]
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
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
                request, number, place.layer, end, transition=transition, norm_epsilon=1e-6,
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


def composed_against_one_run(server, tokens, lengths):
    """Relative errors by layer of the state that a request got: against the same steps taken in one run of the whole
    prompt (interiors by the recurrence in fp64, the rest by the engine's kernel), and against the engine's own run."""
    composer = worker()._composer
    seen, own = {}, composer._into_blocks

    def into_blocks(compose, request, plan, landed, table):
        done = own(compose, request, plan, landed, table)
        seen["steps"], seen["states"] = plan.steps, {}
        for name, (place, states) in composer._states.items():
            seen["states"][name] = composer._state(states, composer._state_block(compose, place), place).double()
        return done

    composer._into_blocks = into_blocks
    try:
        *_, cached = ask(server, tokens, lengths, 1)
    finally:
        composer._into_blocks = own
    most = sum(lengths)
    assert cached == most
    compose, errors = _spare(composer, tokens[:most]), []

    def at_linear(core):
        place, states = composer._states[core.name]
        block, name = composer._state_block(compose, place), core.name
        layer = composer.model.layers[place.layer]
        _, rows = _rows_of(core, composer, block, most)
        engines = composer._state(states, block, place)
        whole = engines.double().clone()
        engines.zero_()
        state = torch.zeros(layer.value_heads, layer.d_k, layer.d_v, dtype=torch.float64)
        for step in seen["steps"]:
            end = min(step.end, most)
            if step.kind is StepKind.INTERIOR:
                state = _recur(state, rows, step.begin, end)
                continue
            engines.copy_(state.float())
            states.tail(block).copy_(core.inputs_before(step.begin, layer.conv_kernel - 1).reshape(states.tail(block).shape))
            core.run(step.begin, end, block, fresh=step.begin == 0)
            state = engines.double().clone()
        errors.append((_apart(seen["states"][name], state), _apart(seen["states"][name], whole)))
        core.run(0, most, block, fresh=True)  # what deeper layers see is the whole run's

    pages = compose.blocks[composer._described.attention_group]
    composer._engine.run(np.array(tokens, np.int32), [(0, most)], pages, at_linear)
    return errors


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


def stall_the_next(server, seconds):
    """Its segments are looked up, and then nothing happens for so long."""
    composer = worker()._composer
    options, own = composer._options, composer._fill
    composer._options = dataclasses.replace(options, compose_ms=200, call_ms=100)

    def late(*args):
        time.sleep(seconds)
        composer._fill, composer._options = own, options
        return own(*args)

    composer._fill = late


def leave_while_it_is_set(server, tokens, lengths):
    """A request that is given up while its segments are set. Returns how many were under way then."""
    composer, engine = worker()._composer, server.llm.llm_engine
    own = composer._fill

    def late(*args):
        composer._fill = own
        time.sleep(0.5)
        return own(*args)

    composer._fill = late
    extra = {"kv_transfer_params": {"ashlar_segments": lengths}}
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=2, extra_args=extra)
    engine.add_request("1000000", {"prompt_token_ids": tokens}, sampling)
    deadline = time.monotonic() + 60
    while not composer._under_way and time.monotonic() < deadline:
        engine.step()
    found = len(composer._under_way)
    engine.abort_request(["1000000"])
    ended = [output.outputs[0].finish_reason for output in engine.step()]
    assert not engine.has_unfinished_requests()
    return found, ended


def publish(server, publishes):
    """As of an engine whose role is to load alone."""
    worker()._composer._publishes = publishes


def state_of(server):
    """(free pages of the composer, its work under way)."""
    composer = worker()._composer
    return len(composer._pages.free), len(composer._under_way)


def watch_settings(server):
    """Keeps what each setting leaves in the engine's blocks: states, and keys and values of whole blocks."""
    composer = worker()._composer
    server.settings, own, block = {}, composer._into_blocks, composer._described.block

    def into_blocks(compose, *args):
        done = own(compose, *args)
        pages = compose.blocks[composer._described.attention_group][: compose.tokens_loaded // block]
        left = [composer._state(held, composer._state_block(compose, place), place) for place, held in composer._states.values()]
        left += [layer.kv_cache[pages] for layer in composer._engine._attention.values() if pages]
        server.settings.setdefault(compose.request, []).append([each.double() for each in left])
        return done

    composer._into_blocks = into_blocks


def set_again(server):
    """Of requests that were set more than once: how far what was left is apart, relatively. Forgets all of them."""
    kept, server.settings = server.settings, {}
    several = [each for each in kept.values() if len(each) > 1]
    return [max(_apart(new, old) for old, new in zip(each[0], each[-1])) for each in several]


def next_tokens(server, prompts):
    """The likeliest token behind each (tokens, lengths): requests are served four at a time."""
    return [tokens[0] for tokens, *_ in ask_together(server, prompts, 1)]
