# SPDX-License-Identifier: Apache-2.0
"""Counts of `attach`: tokens and seconds saved, by tier and kind."""

import time

import tiny_transformers as tiny
import torch

import ashlar
import ashlar.daemon

SEGMENTS = [tiny.tokens(100, seed) for seed in range(3)]
QUERY = tiny.tokens(12, 99)
PROMPT = torch.tensor([tiny.tokens(300, 7)])
GREEDY = {"max_new_tokens": 2, "do_sample": False}


def test_tokens_and_seconds_are_counted_by_tier_and_kind(tmp_path):
    model = tiny.build("qwen3_next")
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", ssd="128MiB", admission="all", folder=str(tmp_path)) as daemon:
        with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
            model.generate(PROMPT, **GREEDY)
            assert reuse.last.tiers == {} and reuse.last.seconds_saved == 0
            model.generate(PROMPT, **GREEDY)
            assert reuse.last.tiers == {"dram": 292} and reuse.tokens_saved == {("dram", "exact"): 292}
            prompt = ashlar.Prompt(SEGMENTS, QUERY)
            model.generate(prompt, **GREEDY)
            model.generate(prompt, **GREEDY)
            assert reuse.last.published == 0 and reuse.last.tiers == {"dram": reuse.last.cached_tokens}
            assert reuse.tokens_saved["dram", "composed"] == 2 * (100 + 2 * 84)
            daemon.stop()
            daemon.start()
            deadline = time.monotonic() + 60
            while reuse.last.tiers != {"ssd": 292} and time.monotonic() < deadline:
                model.generate(PROMPT, **GREEDY)
            assert reuse.last.tiers == {"ssd": 292} and reuse.tokens_saved["ssd", "exact"] == 292


def test_seconds_saved_are_prefill_minus_cache_time(daemon):
    model = tiny.build("qwen3_next")
    with ashlar.cache_for(model, daemon, tokens=1024) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(PROMPT, **GREEDY)
        assembler = reuse.assembler
        assert 0 < assembler.seconds_per_token < 1
        assembler.seconds_per_token = 1.0  # a model that takes one second per token
        began = time.perf_counter()
        model.generate(PROMPT, **GREEDY)
        took = time.perf_counter() - began
        assert 292 - took <= reuse.last.seconds_saved <= 292
        assert reuse.seconds_saved == reuse.last.seconds_saved
        assembler.seconds_per_token = 1e-9
        model.generate(PROMPT, **GREEDY)
        assert reuse.last.seconds_saved == 0, "the cache took longer"
