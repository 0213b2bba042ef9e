# SPDX-License-Identifier: Apache-2.0
"""The module in processes that hold other versions of gRPC and Protobuf, that fork, and that check types."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import ashlar.daemon

PACKAGE = pathlib.Path(ashlar.__file__).parent
MODULE = next(PACKAGE.glob("_ashlar*.so"))
TALK = """
import shortest
text, _ = shortest.Engine({rpc!r}, {session!r}).serve(["Answer from these pages.", "An arch."], "?", 4)
assert len(text) == 4
"""


def run(code, daemon):
    code = textwrap.dedent(code).replace("TALK", TALK.format(rpc=daemon.rpc_socket, session=daemon.session_socket))
    examples = str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python")
    path = os.pathsep.join([examples, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )


GRPC_WORKS = """
import grpc, google.protobuf.struct_pb2 as pb
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
grpc.channel_ready_future(grpc.insecure_channel(f"127.0.0.1:{port}")).result(timeout=20)
message = pb.Struct(); message["a"] = 1
assert pb.Struct.FromString(message.SerializeToString())["a"] == 1
"""


@pytest.mark.parametrize("order", ["before", "after", "between"])
def test_another_grpc_works_in_the_same_process(daemon, order):
    pytest.importorskip("grpc")
    parts = {
        "before": [GRPC_WORKS, "TALK"],
        "after": ["TALK", GRPC_WORKS],
        "between": ["import grpc", "TALK", GRPC_WORKS],
    }
    done = run("\n".join(parts[order]), daemon)
    assert done.returncode == 0, done.stderr


def test_a_child_may_open_its_own_cache_after_a_fork(daemon):
    done = run(
        f"""
        import os, numpy as np, ashlar, shortest
        before = shortest.Engine({daemon.rpc_socket!r}, {daemon.session_socket!r})
        child = os.fork()
        if child == 0:
            try:
                before.cache.begin(np.zeros(4, np.int32))
            except RuntimeError:
                os._exit(0)  # handles belong to the process that made them
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        TALK
        """,
        daemon,
    )
    assert done.returncode == 0, done.stderr
    done = run(
        """
        import os, ashlar
        child = os.fork()
        if child == 0:
            import subprocess, sys
            exec('''TALK''')
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        daemon,
    )
    assert done.returncode == 0, done.stderr


def test_the_module_exports_only_its_entry_and_hides_grpc():
    symbols = subprocess.run(["nm", "-D", "--defined-only", MODULE], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__ashlar"]
    unknown = subprocess.run(
        ["nm", "-D", "--undefined-only", MODULE], capture_output=True, text=True, check=True
    ).stdout
    assert not re.findall(r"grpc", unknown), "asked of whatever gRPC the process has"
    needed = subprocess.run(["readelf", "-d", MODULE], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"NEEDED.*(grpc|gpr|crypto|ssl)", needed)


def test_types_are_checked():
    mypy = pytest.importorskip("mypy.api")
    config = pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "client" / "python" / "pyproject.toml"
    out, errors, code = mypy.run(["--config-file", str(config), "--cache-dir", os.devnull, "-p", "ashlar"])
    assert code == 0, out + errors
    wrong = 'import ashlar\nashlar.Cache(model=3, rpc_socket="a", session_socket="b")\n'
    out, _, code = mypy.run(["--strict", "--cache-dir", os.devnull, "-c", wrong])
    assert code == 1 and "Model" in out, "an engine's mistake is seen"


def test_a_daemon_runs_from_the_command_line(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "ashlar.daemon", "--dram", "64MiB", "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        line = running.stdout.readline()
        assert '"rpc_socket"' in line and (tmp_path / "rpc.sock").exists()
        running.terminate()
        assert running.wait(30) == 0
    assert not (tmp_path / "rpc.sock").exists(), "the daemon was stopped, too"
    done = subprocess.run([sys.executable, "-m", "ashlar.daemon", "--dram", "lots"], capture_output=True, text=True)
    assert done.returncode != 0 and "capacity_bytes" in done.stderr


def test_the_command_ends_with_its_daemon(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "ashlar.daemon", "--dram", "64MiB", "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert '"rpc_socket"' in running.stdout.readline()
            children = [path.read_text() for path in pathlib.Path(f"/proc/{running.pid}/task").glob("*/children")]
            (child,) = "".join(children).split()
            os.kill(int(child), signal.SIGKILL)
            assert running.wait(30) == 1 and "ashlard exited with status -9" in running.stderr.read()
        finally:
            running.kill()


def test_a_daemon_lives_as_long_as_its_process(tmp_path):
    code = """
        import sys, threading, time, ashlar.daemon
        found = []
        start = lambda: found.append(ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=sys.argv[1]))
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(0.5)
        print(found[0]._process.poll(), flush=True)
        time.sleep(60)
        """

    def answers():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(tmp_path / "rpc.sock")) == 0

    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout.readline() == "None\n" and answers(), "the thread has gone, and the daemon has not"
        finally:
            running.kill()
    deadline = time.monotonic() + 20
    while answers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not answers(), "its process was killed"


def test_an_interrupted_start_leaves_no_daemon(tmp_path):
    code = """
        import pathlib, signal, subprocess, sys, threading, time, ashlar.daemon

        class Interrupt(BaseException):
            pass

        def interrupt(*_):
            raise Interrupt

        def children():
            stats = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/children")]
            return "".join(stats).split()

        def start(case):
            folder = pathlib.Path(sys.argv[1], case)
            folder.mkdir()
            return ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(folder))

        def interrupted(case):
            try:
                start(case)
            except Interrupt:
                assert children() == [], (case, children())
            else:
                raise AssertionError(case)

        def slow(*arguments, **options):
            process = popen(*arguments, **options)
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # while the caller waits for it
            time.sleep(0.5)
            return process

        signal.signal(signal.SIGALRM, interrupt)
        begin, threading.Thread.start = threading.Thread.start, interrupt
        interrupted("before the thread that forks")
        threading.Thread.start = begin
        popen, subprocess.Popen = subprocess.Popen, slow
        interrupted("while it forks")
        subprocess.Popen = popen
        answers = ashlar.daemon._answers
        ashlar.daemon._answers = lambda path: interrupt() if answers(path) else False
        interrupted("when it answers")
        ashlar.daemon._answers = answers
        with start("at last"):
            assert len(children()) == 1
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_error_without_transformers_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import ashlar; ashlar.cache_for(None, None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError" in done.stderr and 'pip install "ashlar[transformers]"' in done.stderr
