#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a small benchmark of several nodes and checks the JSON that it writes: its fields, and what holds on any
machine. It does not check speed.

usage: nodes_bench_smoke.py mirror|remote|router|traffic|transfer BINARY
"""

import shutil
import sys

from tools_smoke import SKIPPED, run


def positive(case, *names):
    for name in names:
        assert case[name] > 0, (name, case)


def check_fields(figures, *lists):
    """Checks that the figures name the machine, and that all cases of a list have the same fields."""
    assert figures["machine"]["cores"] > 0 and figures["machine"]["cpu"]
    for each in lists:
        fields = set(figures[each][0])
        for case in figures[each]:
            assert set(case) == fields, (each, set(case) ^ fields)


def transfer(binary):
    figures = run(binary, "transfer", "--quick")
    check_fields(figures, "cases")
    # Without root there are no namespaces.
    links = list(dict.fromkeys(case["link"] for case in figures["cases"]))
    assert links in (["loopback"], ["loopback", "netns"]), links
    assert [(case["link"], case["op"], case["bytes"]) for case in figures["cases"]] == [
        (link, "fetch", size) for link in links for size in (64 << 10, 4 << 20)
    ]
    for case in figures["cases"]:
        assert {"op", "link", "bytes", "gbps", "p50_us", "p99_us", "cpu_s_per_gb", "ratio", "ratio_perftest"} <= set(
            case
        )
        positive(case, "gbps", "p50_us", "cpu_s_per_gb", "ratio", "raw_gbps", "raw_cpu_s_per_gb")
        assert case["p50_us"] <= case["p99_us"], case
        if shutil.which("ucx_perftest") is None:
            assert case["ratio_perftest"] is None and case["perftest_gbps"] is None, case
        else:
            positive(case, "ratio_perftest", "perftest_gbps")


def router(binary):
    figures = run(binary, "router", "--quick")
    check_fields(figures, "cases", "mixed_cases")
    rate = figures["tokens_per_second"]
    lengths = {"cases": [figures["segment_tokens"]] * figures["segments"], "mixed_cases": figures["mixed_tokens"]}
    for name, segments in lengths.items():
        assert [case["workers"] for case in figures[name]] == [1, 2], figures[name]
        for case in figures[name]:
            assert {"workers", "ttft_ms", "bound_ms", "combine_ms", "transfer_ms", "of_it"} <= set(case)
            positive(case, "ttft_ms", "bound_ms", "combine_ms", "of_it", "speed_up")
            # No engine computes faster than the engines sleep, and in the end every segment comes from the cache.
            least = sum(segments) / rate / case["workers"] * 1e3
            assert case["bound_ms"] >= 0.999 * least and case["combine_ms"] < case["ttft_ms"], case
            assert case["ttft_ms"] >= 0.999 * least and case["landed"] == len(segments), case
            together = case["workers"] > 1
            assert (case["elsewhere"] > 0) == together and (case["transfer_ms"] > 0) == together, case


def remote(binary):
    figures = run(binary, "remote", "--quick")
    check_fields(figures, "cases")
    # The tool fails if a hit is from a different tier than the case's name says.
    assert [(case["source"], case["segments"]) for case in figures["cases"]] == [
        (source, 1) for source in ("dram", "remote", "ssd", "compute")
    ], figures
    for case in figures["cases"]:
        positive(case, "bytes", "landed_ms", "gbps", "p10_ms")
        assert case["p10_ms"] <= case["landed_ms"] <= case["p90_ms"], case


def traffic(binary):
    figures = run(binary, "traffic", "--quick")
    check_fields(figures, "cases")
    alone, under = figures["cases"]
    assert (alone["traffic"], under["traffic"]) == ("none", "both ways")
    for case in (alone, under):
        positive(case, "landings", "p50_ms")
        assert case["p50_ms"] <= case["p99_ms"], case
    assert alone["in_gbps"] == alone["out_gbps"] == 0, alone
    positive(under, "in_gbps", "out_gbps")  # bytes of remote hits
    positive(figures, "p99_ratio", "engines", "landings_per_second")
    assert figures["far_errors"] == 0, figures
    assert alone["misses"] >= 0 <= under["misses"], figures


def mirror(binary):
    figures = run(binary, "mirror", "--quick")
    check_fields(figures)
    assert figures["daemons"] == 2 and figures["entries"] == 8000 and figures["lookup_tokens"] == 128 * 1024
    positive(
        figures,
        "announce_seconds",
        "announcements_per_second",
        "mirror_seconds",
        "mirror_bytes",
        "resident_bytes_before",
        "resident_bytes",
        "etcd_resident_bytes",
        "lookup_ratio",
    )
    for state in ("empty", "full"):
        assert 0 < figures[f"lookup_{state}_ms"] <= figures[f"lookup_{state}_p99_ms"], figures
    assert 8000 * 37 <= figures["mirror_bytes"], figures  # no entry takes less


if __name__ == "__main__":
    if sys.argv[1] != "transfer" and shutil.which("etcd") is None:
        print("skipped: etcd is not installed (Debian's etcd-server)")
        sys.exit(SKIPPED)
    tools = {"mirror": mirror, "remote": remote, "router": router, "traffic": traffic, "transfer": transfer}
    tools[sys.argv[1]](sys.argv[2])
