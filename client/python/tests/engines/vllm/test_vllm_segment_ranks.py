# SPDX-License-Identifier: Apache-2.0
"""Segments that ranks of tensor parallelism run alone: the model runs on all ranks, or on none."""

import multiprocessing
import time
import types

import daemon_view
import pytest
import torch
from segmented_engines import MODEL, PATIENT, Segmented, texts
from tiny_engines import connector, count, prompt, same, settle
from vllm.distributed import get_tensor_model_parallel_rank

from ashlar.vllm import ranks
from ashlar.vllm.composing import Pages
from ashlar.vllm.connector import AshlarConnector
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.ranks import Ranks, RanksApart
from ashlar.vllm.worker import Worker

LIMIT = 20  # seconds in which a step must end
SHORT, LONG = 10, 600  # tokens; a prompt too short to be stored, and a segment


@pytest.fixture
def start(shared_daemon):
    """Starts an engine of two ranks. The model has run for a prompt."""
    children = []

    def start():
        options = connector(shared_daemon, segments=True, **PATIENT)
        limit = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(LIMIT)}
        given = dict(tensor_parallel_size=2, worker_extension_cls="tiny_engines.Watched")
        children.append(Segmented(MODEL, options, environment=limit, **given))
        children[0].ask(texts("first step", 1), prompt("first step", 20))
        children[0].probe("settle")
        return children[0]

    yield start
    for child in children:
        child.close()


def on_rank(child, name, rank):
    return child.call("evaluate", f"llm.collective_rpc('segment_probe_on', args=({rank}, {name!r}))")


def objects(daemon):
    return daemon_view.scrape(daemon.metrics_socket)["ashlar_objects"]


def test_a_run_that_cannot_begin_on_one_rank_begins_on_none(start):
    child = start()
    settle(child, child.call("free_blocks"))
    free, text, published = child.call("free_blocks"), prompt("cannot begin", 300), count(child, "published_segments")
    wanted = child.probe("ask", text, None, salt="before")[:2]
    for rank in (0, 1):
        on_rank(child, "fail_the_next_preparation", rank)
        child.probe("run_alone", prompt(f"cannot begin {rank}", LONG))
        assert count(child, "published_segments") == published
        settle(child, free)
        same([child.probe("ask", text, None, salt=f"after {rank}")], [wanted])
    child.probe("run_alone", prompt("can begin", LONG))
    assert count(child, "published_segments") == published + 1


@pytest.mark.parametrize("fails", ["fail_the_next_forward", "fail_after_the_next_forward"])
def test_a_run_that_fails_on_all_ranks_is_not_published(fails, start):
    child = start()
    settle(child, child.call("free_blocks"))
    free, text, published = child.call("free_blocks"), prompt("fails", 300), count(child, "published_segments")
    wanted = child.probe("ask", text, None, salt="before")[:2]
    for rank in (0, 1):
        on_rank(child, fails, rank)
    child.probe("run_alone", prompt(f"all {fails}", LONG))
    assert count(child, "published_segments") == published
    settle(child, free)
    same([child.probe("ask", text, None, salt="after")], [wanted])
    child.probe("run_alone", prompt(f"runs {fails}", LONG))
    assert count(child, "published_segments") == published + 1


def test_a_run_that_fails_on_one_rank_in_its_forward_ends_the_engine(start, shared_daemon):
    """The other rank waits for a collective. It must not get that of a later step, nor publish what it computed."""
    child = start()
    stored = objects(shared_daemon)
    on_rank(child, "fail_the_next_forward", 1)
    with pytest.raises(RuntimeError, match="timed out"):
        print("answered:", child.probe("ask_during_run", prompt("during", SHORT), prompt("fails", LONG)))
    again = "server.core().model_executor.collective_rpc('keeps_parts', timeout=5, unique_reply_rank=1)"
    with pytest.raises(RuntimeError, match="timed out"):
        print("rank 1 goes on:", child.call("evaluate", again))
    assert objects(shared_daemon) == stored


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_fails_on_one_rank_at_its_end_ends_the_engine_at_once(rank, start, shared_daemon):
    """As in a forward on a GPU, for which the other rank does not wait."""
    child = start()
    stored = objects(shared_daemon)
    on_rank(child, "fail_after_the_next_forward", rank)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=f"the model failed on {'another' if rank else 'this'} rank"):
        print("answered:", child.probe("ask_during_run", prompt("during", SHORT), prompt(f"ends {rank}", LONG)))
    assert time.monotonic() - begun < LIMIT / 2 and objects(shared_daemon) == stored


@pytest.mark.parametrize(
    "kind, fails, rank",
    [
        (Worker, "__init__", 1),
        (Worker, "register", 1),
        (EngineModel, "__init__", 0),
        (EngineModel, "_ropes_of_tables", 1),
        (EngineModel, "prepare", 1),
        (EngineModel, "_check", 0),
        (EngineModel, "_check", 1),
        (Pages, "__init__", 0),
        (Pages, "__init__", 1),
    ],
)
def test_a_rank_that_cannot_start_turns_segments_off(kind, fails, rank, start, monkeypatch):
    """The other rank could land and publish segments."""
    own, calls = getattr(kind, fails), []

    def on_one_rank(*given):
        calls.append(given)
        if get_tensor_model_parallel_rank() == rank and len(calls) == (2 if fails == "prepare" else 1):
            raise RuntimeError("as a test wants it")
        return own(*given)

    monkeypatch.setattr(kind, fails, on_one_rank)
    child, parts = start(), texts("off", 2)
    answers = [child.ask(parts, prompt("off", 20), salt=str(i)) for i in range(3)]
    same(answers, [answers[0][:2]] * 3)
    child.probe("settle")
    assert [cached for *_, cached in answers] == [0] * 3 and count(child, "published_segments") == 0
    assert child.call("evaluate", "llm.collective_rpc('composes')") == [False, False]


def test_only_ranks_apart_end_the_engine():
    def failing(error):
        def poll_loads(step):
            raise error

        made = AshlarConnector.__new__(AshlarConnector)
        made._worker, made._connector_metadata = types.SimpleNamespace(poll_loads=poll_loads), None
        made._step = lambda: None
        return made

    assert not failing(RuntimeError("a load")).get_transfer_results(set()).finished_recving
    with pytest.raises(RanksApart, match="in a run"):
        failing(RanksApart("in a run")).get_transfer_results(set())


def outcome(fails, collectives=1, inside=False):
    """Returns what happens on a rank whose forward has this error after some collectives, or inside the last one."""
    both = Ranks(2)
    try:
        with both.together():
            for number in range(collectives):
                both.enter(f"collective {number}", is_local=False)
                if not (inside and number == collectives - 1):
                    both.leave()
                    both.enter("local", is_local=True)
            if fails:
                raise fails
    except Exception as error:
        return type(error).__name__
    return "ran"


def agreed(able):
    def make():
        if not able:
            raise KeyError("as a test wants it")
        return "made"

    try:
        return Ranks(2).agree(make)
    except Exception as error:
        return type(error).__name__


def votes(rank, folder, pipe):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    ranks.get_tp_group = lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD)
    error = KeyError("as a test wants it")
    found = [Ranks(2).all(True), Ranks(2).all(rank == 0), Ranks(2).all(False)]
    found += [outcome(None), outcome(error if rank == 1 else None), outcome(error), outcome(error, collectives=0)]
    found += [outcome(error, collectives=1 + rank), outcome(error, inside=rank == 1), outcome(error, inside=True)]
    found += [agreed(True), agreed(rank == 0), agreed(False)]
    pipe.send(found)
    dist.destroy_process_group()


def test_ranks_agree(tmp_path):
    context, pipes, children = multiprocessing.get_context("spawn"), [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        children.append(context.Process(target=votes, args=(rank, tmp_path, theirs), daemon=True))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    assert all(pipe.poll(180) for pipe in pipes)
    first, second = (pipe.recv() for pipe in pipes)
    both = [True, False, False, "ran", "RanksApart", "KeyError", *["RanksApart"] * 4, "made"]
    assert first == [*both, "Unsupported", "KeyError"] and second == [*both, "KeyError", "KeyError"]
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def test_ranks_that_cannot_agree_say_why(monkeypatch):
    def fails():
        raise RuntimeError("timed out")

    monkeypatch.setattr(ranks, "get_tp_group", fails)
    with pytest.raises(RanksApart, match="the ranks cannot agree: timed out"):
        Ranks(2).all(True)


def test_one_rank_keeps_its_error():
    one = Ranks(1)
    assert one.all(True) and not one.all(False)
    with pytest.raises(KeyError), one.together():
        raise KeyError
