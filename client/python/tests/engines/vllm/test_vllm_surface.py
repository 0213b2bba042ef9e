# SPDX-License-Identifier: Apache-2.0
"""The connector as operators and routers see it: options, identity, statistics, events."""

import types

import pytest
from stub_connector import configured
from tiny_engines import BLOCK, Child, connector, count, prompt, same, saved

import ashlar.vllm.connector as module
from ashlar.vllm.options import Options


def test_an_unknown_option_is_refused_by_name(shared_daemon):
    with pytest.raises(RuntimeError, match="kv_connector_extra_config.lookup_msec: unknown"):
        Child("qwen3", connector(shared_daemon, lookup_msec=3))
    with pytest.raises(ValueError, match="kv_connector_extra_config.call_ms: 'soon' was given; expected int"):
        Options.read(connector(shared_daemon, call_ms="soon"))  # as the connector does
    with pytest.raises(ValueError, match="kv_connector_extra_config.least_tokens: renamed; use min_tokens"):
        Options.read(connector(shared_daemon, least_tokens=2))


SEPARATOR, MESSAGES = {"segment_separator": "<|sep|>"}, {"segment_boundaries": "messages"}


@pytest.mark.parametrize(
    "given, segments",
    [
        ({}, False),
        ({"segments": True}, True),
        (SEPARATOR, True),
        (MESSAGES, True),
        ({"segment_separator": [5, 6]}, True),
        ({"segment_separator": [], "segment_boundaries": ""}, False),
        ({"segments": False} | SEPARATOR, False),
    ],
)
def test_declared_boundaries_turn_segments_on(given, segments):
    assert Options.read(given).segments == segments


@pytest.mark.parametrize(
    "given, config, segments, warnings",
    [
        (SEPARATOR, {}, True, []),
        (SEPARATOR, {"device": "cuda"}, False, ["segments are off: they have never run on cuda; "]),
        (SEPARATOR | {"segments_on_gpu": True}, {"device": "cuda"}, True, []),
        ({"segments": False}, {}, False, []),
        ({"segments": False} | SEPARATOR, {}, False, ["segment_separator: no effect, because segments is false"]),
        (
            {"segments": False} | SEPARATOR | MESSAGES, {}, False,
            ["segment_separator and segment_boundaries: no effect"],
        ),
    ],
)  # fmt: skip
def test_boundaries_that_have_no_effect_are_named(given, config, segments, warnings, monkeypatch):
    options, said = configured(monkeypatch, given, **config)
    assert options.segments == segments and len(said) == len(warnings)
    assert all(one.startswith("Ashlar: " + wanted) for one, wanted in zip(said, warnings)), said


CANNOT_SHARE = [
    ({"segments": True}, {}, None),
    (SEPARATOR, {}, None),
    ({}, {}, "segments are off; set segments, segment_separator or segment_boundaries"),
    ({"segments": True}, {"ranks": 2}, "tensor_parallel_size above 1 is not supported"),
    ({"segments": True}, {"saves": False}, "kv_role kv_consumer stores no segments; set kv_role to kv_both"),
]


@pytest.mark.parametrize("given, config, reason", CANNOT_SHARE)
def test_an_engine_that_cannot_ask_others_says_why(given, config, reason, monkeypatch):
    options, said = configured(monkeypatch, given | {"cold_parallel": True}, **config)
    assert options.cold_parallel == (reason is None)
    assert said == ([] if reason is None else [f"Ashlar: cold_parallel is off: {reason}"])


@pytest.mark.parametrize("given, config, reason", CANNOT_SHARE)
def test_an_engine_that_cannot_serve_others_says_why(given, config, reason, monkeypatch):
    said = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *more: said.append(text % more))
    monkeypatch.setattr(module, "find_wake", lambda: said.clear)
    kind = module.AshlarConnector
    made = kind.__new__(kind)
    made._options = Options.read(given | {"serve_prefill": True})
    made._kv_transfer_config = types.SimpleNamespace(is_kv_producer=config.get("saves", True))
    ranks = types.SimpleNamespace(tensor_parallel_size=config.get("ranks", 1))
    made._vllm_config = types.SimpleNamespace(parallel_config=ranks)
    assert (made._find_wake() is None) == (reason is not None)
    assert said == ([] if reason is None else [f"Ashlar: serve_prefill is off: {reason}"])


def test_other_weights_share_nothing(shared_daemon, engine):
    text = prompt("weights", 600)
    engine("qwen3").generate([text])
    for options in (dict(seed=1), dict(max_model_len=4096)):
        with Child("qwen3", connector(shared_daemon), **options) as child:
            child.generate([text])
            assert (saved(child) > 0) == ("seed" not in options), options
    with Child("qwen3", connector(shared_daemon, weights_digest="finetuned")) as child:
        child.generate([text])
        assert saved(child) == 0


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])
def test_prompts_hit_only_under_their_own_salt(model, engine, expected):
    child, text = engine(model), prompt("salt", 2 * BLOCK[model] + 40)
    plain = expected(model, [text])
    salts = [None, "mine", "theirs"]
    for stored in range(len(salts)):
        for i, each in enumerate(salts[: stored + 1]):
            child.call("erase")
            answer = child.generate([text], salt=each)
            same(answer, plain)
            assert (answer[0][2] >= 2 * BLOCK[model]) == (i < stored), (each, "behind", salts[:stored])


def test_statistics_are_part_of_the_engines(engine, expected):
    child, block = engine("qwen3_5"), BLOCK["qwen3_5"]
    text = prompt("statistics", 2 * block + 40)
    child.generate([text])
    child.call("erase")
    before = child.call("metrics")
    child.generate([text])
    after = child.call("metrics")
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    assert grown["hits", ("dram", "states_and_keys")] == 1
    assert grown["saved_tokens", ("dram", "states_and_keys")] == 2 * block
    assert grown["lookups", ("hit",)] == 1
    assert grown["load_seconds", ()] > 0
    assert count(child, "stores", "kept") > 0
    external = child.call(
        "evaluate", "[m.value for m in llm.get_metrics() if m.name == 'vllm:external_prefix_cache_hits']"
    )
    assert external[0] >= 2 * block, "vLLM's own count of external hits"


def test_events_report_stored_blocks(shared_daemon, engine):
    with Child(
        "qwen3", connector(shared_daemon), kv_events_config=dict(enable_kv_cache_events=True, publisher="null")
    ) as child:
        child.call(
            "execute",
            "half = server.connector()\nserver.seen = []\nserver.real = half.take_events\n"
            "def take():\n    events = list(server.real())\n    server.seen += events\n    return events\n"
            "half.take_events = take",
        )
        text = prompt("events", 600)
        child.generate([text])
        child.call("erase")
        stored = child.call(
            "evaluate", "[(e.medium, e.block_size, e.token_ids, len(e.block_hashes)) for e in server.seen]"
        )
        assert stored == [("ASHLAR", 128, text[:512], 4)]
        child.generate([text], salt="mine")
        child.call("erase")
        keys = child.call("evaluate", "[(e.extra_keys, e.token_ids, e.block_hashes) for e in server.seen]")
        assert [extra for extra, _, _ in keys] == [None, [("mine",), None, None, None]]
        assert keys[0][1] == keys[1][1] and not set(keys[0][2]) & set(keys[1][2]), "other blocks of the same tokens"


def test_engines_that_cannot_be_served_run_without(shared_daemon, expected):
    text = prompt("unsupported", 600)
    with Child("qwen3", connector(shared_daemon), enable_prefix_caching=False) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        assert child.call("metrics") == {}
