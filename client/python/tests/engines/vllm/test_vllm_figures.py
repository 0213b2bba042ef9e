# SPDX-License-Identifier: Apache-2.0
"""A short run of the program of docs/benchmarks/vllm.md."""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))


def test_the_benchmark_program_writes_its_fields(tmp_path, monkeypatch):
    import vllm_ttft

    out = tmp_path / "ttft.json"
    arguments = "--models qwen3 --size small --blocks 0.5,2 --repeats 1 --short-repeats 6 --rates 2 --seconds 2 --documents 2 --document-tokens 300"
    monkeypatch.setattr(
        sys, "argv", ["vllm_ttft.py", *arguments.split(), "--variants", "vllm,ashlar", "--json", str(out)]
    )
    vllm_ttft.main()
    results = json.loads(out.read_text())
    assert [row["blocks"] for row in results["lengths"]] == [0.5, 2]
    for row in results["lengths"]:
        assert all(row[f"{kind}_ms"] > 0 for kind in ("without", "cold", "dram", "ssd"))
        assert row["added_low_ms"] <= row["added_ms"] <= row["added_high_ms"]
        assert [len(row["samples_ms"][kind]) for kind in ("without", "cold", "dram", "ssd")] == [row["repeats"]] * 4
    assert [row["repeats"] for row in results["lengths"]] == [6, 1]
    assert results["options"]["blocks"] == "0.5,2" and results["load_average"] > 0
    assert [row["variant"] for row in results["rates"]] == ["vllm", "ashlar"]
    assert all(row["requests"] > 0 and row["ttft_p50_ms"] > 0 for row in results["rates"])


def test_the_interval_covers_the_median_at_its_stated_rate():
    import random

    import vllm_ttft

    source, held = random.Random(7), 0
    for _ in range(2000):
        _, low, high = vllm_ttft.median_and_bounds([source.gauss(1, 3) for _ in range(60)])
        held += low <= 1 <= high
    assert 1860 <= held <= 1960, held
