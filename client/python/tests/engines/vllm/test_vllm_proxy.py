# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of two vLLM servers with their own daemons."""

import json
import subprocess
import sys

import installed
import pytest


@pytest.mark.parametrize("more", [[], ["--segments"]], ids=["prefixes", "segments"])
def test_prompts_find_the_server_that_has_their_prefix(more, tmp_path):
    program = installed.SOURCE / "examples" / "python" / "vllm_proxy.py"
    sizes = "--engines 2 --size small --documents 3 --tokens 300 --requests 8 --rate 4 --turns 1 --dram 128MiB"
    command = [sys.executable, str(program), "--json", str(tmp_path / "found.json"), *sizes.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["way"]: row for row in found["runs"]}
    assert set(rows) == {"round-robin", "cheapest"}
    assert rows["round-robin"]["requests_by_engine"] == [4, 4]
    assert all(row["requests"] == 8 and row["ttft_p50_ms"] > 0 for row in rows.values())
    assert rows["cheapest"]["reused"] > 0 and found["probe_mean_ms"] > 0
    assert found["probes"]["found"] > 0 and "no_answer" not in found["probes"]
