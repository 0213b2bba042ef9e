# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of three vLLM servers with their own daemons."""

import json
import subprocess
import sys

import installed

KINDS = {"conversation", "rag", "short"}


def test_prompts_find_the_server_that_has_their_prefix(tmp_path):
    program = installed.SOURCE / "examples" / "python" / "vllm_proxy.py"
    sizes = "--conversations 2 --documents 3 --tokens 256 --requests 20 --rates 4 --turns 1 --dram 128MiB"
    command = [sys.executable, str(program), "--json", str(tmp_path / "found.json"), *sizes.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["policy"]: row for row in found["runs"]}
    assert set(rows) == {"round-robin", "prefix-hash", "cheapest"}
    for row in rows.values():
        assert row["engines"] == 3 and row["rate"] == 4.0 and row["requests"] == sum(row["requests_by_engine"]) == 20
        assert set(row["kinds"]) == KINDS and sum(kind["requests"] for kind in row["kinds"].values()) == 20
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
    turns, chosen = rows["round-robin"], rows["cheapest"]
    assert sorted(turns["requests_by_engine"]) == [6, 7, 7] and turns["probed"] == 0
    # Of a conversation's prompts, the first turn alone is new.
    found_again = chosen["kinds"]["conversation"]["reused"]
    assert found_again > 0.3 and found_again >= turns["kinds"]["conversation"]["reused"]
    assert chosen["kinds"]["rag"]["reused"] > 0
    assert chosen["probed"] > 0 and found["probe_mean_ms"] > 0
    assert found["probes"]["found"] > 0 and "no_answer" not in found["probes"]
