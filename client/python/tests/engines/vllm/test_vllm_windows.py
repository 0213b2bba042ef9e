# SPDX-License-Identifier: Apache-2.0
"""Models with several groups of attention layers: full attention, and windows whose older blocks the engine frees."""

import os
import random
import signal
import threading

import pytest
from tiny_engines import (
    BLOCK,
    CLOSE,
    WINDOWED,
    Child,
    connector,
    count,
    prompt,
    repeated,
    same,
    saved,
    serves_again,
    settle,
)  # fmt: skip

import ashlar.daemon

PAIR = ["ministral", "gpt_oss"]  # windows that extend over two blocks, and over one


@pytest.mark.parametrize("model", WINDOWED)
def test_prompts_of_every_length_are_resumed_with_the_same_answer(model, engine, expected, shared_daemon):
    child, window = engine(model), WINDOWED[model]
    assert child.call("block_size") == BLOCK[model]
    lengths = [130, window + 1, 257, 385, 5 * window, 5 * window + 259]
    texts = [prompt(f"lengths {model} {length}", length) for length in lengths]
    wanted = expected(model, texts)
    for text, answer in zip(texts, wanted):
        same(child.generate([text]), [answer])
        for _ in range(2):
            before = saved(child)
            child.call("erase")
            same(child.generate([text]), [answer])
            assert saved(child) - before == repeated(model, len(text))
    with Child(model, connector(shared_daemon)) as other:  # a new engine finds only what is in the daemon
        for text, answer in zip(texts, wanted):
            before = saved(other)
            same(other.generate([text]), [answer])
            assert saved(other) - before == repeated(model, len(text))
        assert count(other, "load_failures") == 0
        assert count(other, "hits", "dram", "keys") == len(lengths)


@pytest.mark.parametrize("model", PAIR)
def test_a_window_that_is_not_loaded_is_detected(model, engine, expected):
    """Shows that the values compared in the other tests distinguish a window of zeros from the right one."""
    child = engine(model)
    text = prompt(f"zeros {model}", 700)
    ((tokens, logs),) = expected(model, [text])
    same(child.generate([text]), [(tokens, logs)])
    fill = "import ashlar.vllm.memory as memory\n"
    child.call("execute", fill + "server.fill = memory.Window.fill\nmemory.Window.fill = lambda *_: None")
    child.call("erase")
    ((wrong, others, _),) = child.generate([text])
    child.call("execute", fill + "memory.Window.fill = server.fill")
    assert wrong != tokens or max(abs(a - b) for a, b in zip(logs, others)) > 1e-3
    child.call("erase")
    same(child.generate([text]), [(tokens, logs)])


@pytest.mark.parametrize("model", PAIR)
def test_blocks_that_the_engine_freed_are_not_needed(model, engine, expected, shared_daemon):
    """A prompt of many chunks: its windows have no first blocks at the end, and it is found at the end of each window."""
    text = prompt(f"let go {model}", 2000)
    with Child(model, connector(shared_daemon), max_num_batched_tokens=256, max_num_seqs=1) as child:
        child.call(
            "execute",
            "offers = server.connector()._scheduler._offers\nserver.gone = []\nreal = offers.offer\n"
            "def offer(*given):\n"
            "    save = real(*given)\n"
            "    if save is not None:\n"
            "        server.gone.append([table.count(0) for table in save.blocks])\n"
            "    return save\n"
            "offers.offer = offer",
        )
        same(child.generate([text]), expected(model, [text]), CLOSE)
        gone = child.call("evaluate", "server.gone")
        assert max(gone[-1]) >= 10 and min(gone[-1]) == 0, gone
    other = engine(model)
    for tokens in (2000, 1600, 900):
        part = text[:tokens]
        other.call("erase")
        before = saved(other)
        same(other.generate([part]), expected(model, [part]), CLOSE)
        assert tokens - (saved(other) - before) <= 256


@pytest.mark.parametrize("model", WINDOWED)
def test_a_longer_prefix_than_the_engines_own_is_loaded_after_it(model, engine, expected):
    child = engine(model)
    first = prompt(f"own {model}", 257)
    longer = first[:256] + prompt("behind", 300)
    same(child.generate([longer]), expected(model, [longer]))
    child.call("erase")
    same(child.generate([first]), expected(model, [first]))
    before = saved(child)
    same(child.generate([longer]), expected(model, [longer]))
    assert saved(child) - before == repeated(model, len(longer)) - 256


@pytest.mark.parametrize("model", WINDOWED)
def test_chunked_prefill_of_several_requests_in_flight(model, shared_daemon, expected):
    lengths = [400, 1000, 260, 40, 511]
    texts = [prompt(f"chunks {model} {i}", length) for i, length in enumerate(lengths)]
    with Child(model, connector(shared_daemon), max_num_batched_tokens=256, max_num_seqs=3) as child:
        wanted = expected(model, texts)
        same(child.generate(texts), wanted, CLOSE)
        child.call("erase")
        before = saved(child)
        same(child.generate(texts), wanted, CLOSE)
        assert saved(child) - before >= sum(lengths) - 8 * len(lengths) - 256  # on a busy machine a lookup may be late
        assert count(child, "load_failures") == 0
        child.call("erase")
        assert child.call("free_blocks") == 255, "all but the null block"


@pytest.mark.parametrize("model, blocks", [("ministral", 39), ("ministral_whole", 42)])
def test_preempted_requests_resume_with_the_same_answer(model, blocks, shared_daemon, expected):
    """The prompts fit together, with 12 blocks each, but not with their decoded tokens: 13 and 16 blocks each."""
    texts = [prompt(f"preempt {model} {i}", 376) for i in range(3)]
    limits = dict(num_gpu_blocks_override=blocks, max_num_seqs=3, max_num_batched_tokens=2048, max_model_len=512)
    with Child(model, connector(shared_daemon), **limits) as child:
        wanted = expected(model, texts, 24)
        for _ in range(2):
            same(child.generate(texts, 24), wanted, CLOSE)
        preempted = child.call(
            "evaluate", "sum(m.value for m in llm.get_metrics() if m.name == 'vllm:num_preemptions')"
        )
        assert preempted > 0
        child.call("erase")
        assert child.call("free_blocks") == blocks - 1, "nothing is held that is not used"


@pytest.mark.parametrize("model", WINDOWED)
def test_daemons_that_are_killed_or_frozen(model, tmp_path, expected):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    texts = [prompt(f"killed {model} {i}", 600 + i) for i in range(3)]
    wanted = expected(model, texts)
    with (
        ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as daemon,
        Child(model, connector(daemon, call_ms=400, land_ms=600, quiet_ms=200, lookup_ms=100)) as child,
    ):
        same(child.generate(texts), wanted, CLOSE)
        child.call("erase")
        free = child.call("free_blocks")
        for harm in (daemon.kill, lambda: os.kill(daemon.pid, signal.SIGSTOP), daemon.kill):
            child.call("erase")
            timer = threading.Timer(draw.uniform(0, 0.25), harm)
            timer.start()
            same(child.generate(texts), wanted, CLOSE)
            timer.join()
            same(child.generate(texts), wanted, CLOSE)
            if harm == daemon.kill:
                daemon.start()
            else:
                os.kill(daemon.pid, signal.SIGCONT)
        serves_again(child, texts, wanted, CLOSE)
        settle(child, free)


@pytest.mark.parametrize("model", PAIR)
def test_a_restarted_daemon_serves_from_its_disk(model, tmp_path, expected):
    text = prompt(f"disk {model}", 700)
    with ashlar.daemon.start(
        dram="128MiB", arena="8MiB", ssd="256MiB", admission="all", folder=str(tmp_path)
    ) as daemon:
        with Child(model, connector(daemon)) as child:
            same(child.generate([text]), expected(model, [text]))
            daemon.stop()
            daemon.start()
            child.call("evaluate", "__import__('time').sleep(2)")
            child.call("erase")
            same(child.generate([text]), expected(model, [text]))
            assert count(child, "hits", "ssd", "keys") == 1


def test_every_rank_has_its_own_windows(shared_daemon):
    text, wanted = prompt("ranks", 700), None
    for number, options in enumerate((None, connector(shared_daemon), connector(shared_daemon))):
        with Child("ministral", options, tensor_parallel_size=2) as child:
            answers = child.generate([text])
            wanted = wanted or [each[:2] for each in answers]  # a single rank adds in a different order
            same(answers, wanted)
            child.call("erase")
            same(child.generate([text]), wanted)
            assert saved(child) == number * repeated("ministral", 700), (
                "once by the engine that saved it, twice by the next one"
            )


def test_a_plan_of_another_version_is_computed_instead(engine, expected):
    child = engine("ministral")
    text = prompt("version ministral", 600)
    same(child.generate([text]), expected("ministral", [text]))
    child.call("erase")
    child.call(
        "execute",
        "import ashlar\nserver.real = ashlar.Request.plan_bytes\n"
        "ashlar.Request.plan_bytes = lambda self: server.real(self)[:4] + b'\\x63' + server.real(self)[5:]",
    )
    failures, before = count(child, "load_failures"), saved(child)
    same(child.generate([text]), expected("ministral", [text]))
    child.call("execute", "import ashlar\nashlar.Request.plan_bytes = server.real")
    assert count(child, "load_failures") == failures + 1 and saved(child) == before


def test_a_model_with_only_windows_is_served(shared_daemon, expected):
    text = prompt("windows alone", 600)
    with Child("ministral_windows", connector(shared_daemon)) as child:
        same(child.generate([text]), expected("ministral_windows", [text]))
        child.call("erase")
        same(child.generate([text]), expected("ministral_windows", [text]))
        assert saved(child) == 592


def test_an_engine_that_keeps_all_blocks_of_windows_is_served(shared_daemon, engine, expected):
    """Without vLLM's hybrid allocator, windows are groups of full attention, and share nothing with real windows."""
    text = prompt("no hybrid allocator", 800)
    engine("ministral").generate([text])
    with Child("ministral", connector(shared_daemon), disable_hybrid_kv_cache_manager=True) as child:
        assert child.call("evaluate", "len(server.core().scheduler.kv_cache_config.kv_cache_groups)") == 1
        same(child.generate([text]), expected("ministral", [text]))
        assert saved(child) == 0
        child.call("erase")
        same(child.generate([text]), expected("ministral", [text]))
        assert saved(child) == 792
        child.call("erase")
        same(child.generate([text[:600]]), expected("ministral", [text[:600]]))
        assert saved(child) == 792 + 512
