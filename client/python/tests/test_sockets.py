# SPDX-License-Identifier: Apache-2.0
"""Default sockets: where engines look for a daemon, and where `python -m ashlar.daemon` creates them."""

import json
import os
import signal
import subprocess
import sys

import pytest

import ashlar
import ashlar.sockets
from ashlar.sockets import default_sockets, user_folder


@pytest.fixture
def user(monkeypatch, tmp_path):
    """A user without root and without a system daemon."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(ashlar.sockets, "SYSTEM_FOLDER", str(tmp_path / "system"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    for name in ("ASHLAR_RPC_SOCKET", "ASHLAR_SESSION_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_user_without_root_has_a_folder_of_its_own(user, monkeypatch):
    assert user_folder() == f"{user}/user/ashlar"
    assert default_sockets() == (f"{user}/user/ashlar/rpc.sock", f"{user}/user/ashlar/session.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert user_folder() == "" and default_sockets()[0] == f"{user}/system/rpc.sock"


def test_the_nodes_daemon_takes_precedence_over_the_users(user):
    (user / "system").mkdir()
    (user / "system" / "rpc.sock").touch()
    assert default_sockets() == (f"{user}/system/rpc.sock", f"{user}/system/session.sock")


def test_the_environment_takes_precedence(user, monkeypatch):
    monkeypatch.setenv("ASHLAR_RPC_SOCKET", "/r")
    assert default_sockets() == ("/r", f"{user}/user/ashlar/session.sock")


def test_root_uses_the_nodes_folder(user, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert user_folder() == f"{user}/system"


@pytest.mark.parametrize(
    "words, error",
    [
        (["--ssd", "1GiB"], "--ssd: no directory for the disk tier; add --folder"),
        (["--gpu", "-1"], "--gpu: a device number below 0"),
    ],
)
def test_the_command_refuses_by_option(words, error):
    done = subprocess.run([sys.executable, "-m", "ashlar.daemon", *words], capture_output=True, text=True)
    assert done.returncode == 2 and error in done.stderr


def test_the_command_refuses_a_folder_in_which_a_daemon_runs(tmp_path):
    words = [sys.executable, "-m", "ashlar.daemon", "--dram", "64MiB", "--folder", str(tmp_path)]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(first.stdout.readline())["rpc_socket"] == f"{tmp_path}/rpc.sock"
        second = subprocess.run(words, capture_output=True, text=True)
        assert second.returncode == 2 and "a daemon already runs in" in second.stderr
        assert (tmp_path / "rpc.sock").exists()
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=30) == 0
