# SPDX-License-Identifier: Apache-2.0
"""vllm:ashlar_state and its log line: whether the engine uses the cache, and if not, the reason and the remedy."""

import importlib.metadata
import json
import logging
import os
import pathlib
import subprocess
import time

from tiny_engines import BLOCK, Child, connector, prompt, same, saved
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import ashlar.daemon
from ashlar.vllm import plugin
from ashlar.vllm.state import REASONS, State, why_unreachable
from ashlar.vllm.stats import AshlarStats

STATES = (
    "{(each.labels['state'], each.labels['reason']): each.value for metric in "
    "__import__('prometheus_client').REGISTRY.collect() for each in metric.samples if each.name == 'vllm:ashlar_state'}"
)


def wait_for(child, wanted, text, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child.call("erase")
        child.generate([text])
        states = child.call("evaluate", STATES)
        if states.get(wanted) == 1:
            return states
    raise AssertionError(f"{wanted} is not reached: {states}")


def test_an_engine_without_a_daemon_reports_it_until_one_starts(tmp_path, expected):
    text = prompt("state", 600)
    sockets = dict(rpc_socket=f"{tmp_path}/rpc.sock", session_socket=f"{tmp_path}/session.sock")
    with Child("qwen3", dict(sockets, reopen_ms=100, wait_for_saves=True, tokens_per_second=1.0)) as child:
        assert wait_for(child, ("opening", "no_daemon"), text) == {("opening", "no_daemon"): 1}
        with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)):
            states = wait_for(child, ("serving", "none"), text)
            assert states == {("opening", "no_daemon"): 0, ("serving", "none"): 1}
            child.call("erase")
            same(child.generate([text]), expected("qwen3", [text]))
        assert wait_for(child, ("opening", "lost"), text)["serving", "none"] == 0


def doctor(port):
    """The exit code and the findings of ashlarctl doctor --engine."""
    program = pathlib.Path(os.environ.get("ASHLARD", "ashlard")).with_name("ashlarctl")
    command = [program, "doctor", "--json", "--engine", f"http://127.0.0.1:{port}/metrics"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {each["check"]: (each["verdict"], each["found"], each["remedy"]) for each in checks}


def test_ashlarctl_explains_the_state_of_an_engine(tmp_path):
    text = prompt("doctor", 600)
    sockets = dict(rpc_socket=f"{tmp_path}/rpc.sock", session_socket=f"{tmp_path}/session.sock")
    with Child("qwen3", dict(sockets, reopen_ms=100, wait_for_saves=True, tokens_per_second=1.0)) as child:
        port = child.call("evaluate", "__import__('prometheus_client').start_http_server(0)[0].server_port")
        code, found = doctor(port)
        assert code == 1 and found["state"][1] == "not reported yet; expected serving"
        wait_for(child, ("opening", "no_daemon"), text)
        remedy = REASONS["no_daemon"][1]
        assert doctor(port) == (1, {"state": ("bad", "opening (no_daemon); expected serving", remedy)})
        with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)):
            wait_for(child, ("serving", "none"), text)
            for _ in range(20):  # the worker may open its cache later than the scheduler
                child.call("erase")
                child.generate([text])
                code, found = doctor(port)
                if code == 0 and "hit" in found["lookups"][1]:
                    break
            assert code == 0 and found["state"] == ("fine", "serving (none)", ""), found
            assert "hit 1" in found["lookups"][1] and "kept" in found["stores"][1]


def test_an_engine_that_never_uses_the_cache_reports_the_reason(shared_daemon, model="qwen3_5"):
    text = prompt("off", BLOCK[model] - 10)
    with Child(model, connector(shared_daemon), enable_prefix_caching=False) as child:
        assert wait_for(child, ("off", "unsupported"), text) == {("off", "unsupported"): 1}
        assert saved(child) == 0


def test_the_plugin_registers_the_connector_by_name():
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ashlar")
    for _ in range(2):  # vLLM may load plugins more than once
        found.load()()
    assert KVConnectorFactory.get_connector_class_by_name(plugin.NAME) is ashlar.vllm.AshlarConnector


def test_the_connectors_name_is_enough_to_use_the_cache(shared_daemon, expected):
    text = prompt("by name", 600)
    transfer = dict(
        kv_connector="AshlarConnector", kv_role="kv_both", kv_connector_extra_config=connector(shared_daemon)
    )
    with Child("qwen3", transfer=transfer) as child:
        child.generate([text])
        child.call("erase")
        same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 592


def test_a_change_is_logged_once_with_its_remedy(monkeypatch):
    said = []
    logger = logging.getLogger("vllm.ashlar")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    state = State("scheduler")
    for _ in range(3):
        state.set("no_daemon", "rpc_socket: /x: no such file")
    state.set("none", "rpc_socket /x, session_socket /y")
    state.set("none", "rpc_socket /x, session_socket /y")
    state.set("unsupported", "speculative decoding")
    state.set("none")
    assert state.name == "off", "it stays off"
    remedies = [REASONS[reason][1] for reason in ("no_daemon", "unsupported")]
    assert said == [
        f"Ashlar (scheduler): cannot open the cache yet (no_daemon): rpc_socket: /x: no such file; {remedies[0]}",
        "Ashlar (scheduler): the cache is open: rpc_socket /x, session_socket /y",
        f"Ashlar (scheduler): the cache is off in this engine (unsupported): speculative decoding; {remedies[1]}",
    ]


def test_unreachable_sockets_are_distinguished(tmp_path):
    assert why_unreachable(str(tmp_path / "none.sock")) == "no_daemon"
    assert why_unreachable(str(tmp_path / ("long" * 60))) == "no_daemon"
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        assert why_unreachable(daemon.rpc_socket) == "refused"
        pathlib.Path(daemon.rpc_socket).chmod(0)
        child = os.fork()
        if child == 0:
            os.chmod(tmp_path, 0o755)
            os.setuid(65533)
            os._exit(0 if why_unreachable(daemon.rpc_socket) == "permission" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_newest_state_survives_aggregation():
    older, newer = (
        AshlarStats(data={"state": "opening|no_daemon", "lookups|hit": 1}),
        AshlarStats(data={"state": "serving|none"}),
    )
    assert older.aggregate(newer).reduce() == {"state": "serving none", "lookups hit": 1}
