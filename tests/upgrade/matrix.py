#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every earlier release with this build in every pairing: engine with daemon, daemon with another's disk, daemon
with daemon, and a node's daemon that is replaced under a running engine. A pairing works, or is refused with its reason
if the versions in the sources require that. `tools/test --upgrade` calls it.

usage: matrix.py --bin FOLDER [--also COMMIT…] [--json FILE] [--jobs N]
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/upgrade"
PROGRAMS = ("ashlard", "integration_engine")
PATIENCE = 30.0
HIT = "none"  # the miss reason that an engine prints for a hit
SEGMENTS, TOKENS, PROMPTS = 4, 60, 5
VERSIONS = {
    "protocol": ("proto/limits.h", "kProtocolMin", "kProtocolMax"),
    "peers": ("proto/limits.h", "kPeerProtocolMin", "kPeerProtocolMax"),
    "disk": ("storage/tier/ssd_format.h", "kSsdFormatVersion", "kSsdFormatVersion"),
}


class Failed(Exception):
    pass


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


class Build:
    """A release's programs, and the version ranges in its sources."""

    def __init__(self, name, commit, programs):
        self.name, self.programs = name, programs
        file = "tests/integration/engine_main.cc"
        source = git("show", f"{commit}:{file}") if commit else (ROOT / file).read_text(encoding="utf-8")
        self.keeps = '"keep"' in (source or "")  # whether its engine can keep asking
        self.ranges = {what: self._range(commit, *where) for what, where in VERSIONS.items()}

    @staticmethod
    def _range(commit, file, least, most):
        text = git("show", f"{commit}:{file}") if commit else (ROOT / file).read_text(encoding="utf-8")
        found = [re.search(rf"\b{name} = (\d+);", text or "") for name in (least, most)]
        return tuple(int(each[1]) for each in found) if all(found) else None

    def program(self, name):
        return self.programs / name


def common(first, second, what):
    """Returns whether two builds have a version in common, or None if one of them does not have the protocol."""
    a, b = first.ranges[what], second.ranges[what]
    return None if a is None or b is None else a[0] <= b[1] and b[0] <= a[1]


def build(name, commit, jobs):
    """Builds the release's programs once and keeps them; the worktree is removed afterwards."""
    kept = KEPT / f"{name}-{commit[:12]}"
    if all((kept / program).exists() for program in PROGRAMS):
        return Build(name, commit, kept)
    print(f"{name}: builds {commit[:12]}", flush=True)
    source, objects = KEPT / "source", KEPT / "objects"
    subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", source], capture_output=True, check=False)
    shutil.rmtree(objects, ignore_errors=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--detach", "--force", source, commit],
            check=True,
            capture_output=True,
        )
        subprocess.run(
            [
                "cmake",
                "-S",
                source,
                "-B",
                objects,
                "-G",
                "Ninja",
                "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
                "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG",
                "-DASHLAR_CUDA=OFF",
                "-DASHLAR_PYTHON=OFF",
                "-DASHLAR_UNITY=ON",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(["cmake", "--build", objects, "-j", str(jobs), "--target", *PROGRAMS], check=True)
        kept.mkdir(exist_ok=True)
        for program in PROGRAMS:
            shutil.copy(objects / "bin" / program, kept)
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", source], capture_output=True, check=False)
        shutil.rmtree(objects, ignore_errors=True)
    return Build(name, commit, kept)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Daemon:
    def __init__(self, build_, folder, disk=None, cluster=None):
        self.build, self.folder = build_, pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rpc, self.session = f"{folder}/rpc.sock", f"{folder}/session.sock"
        tenant = f"name: default, uids: [{os.getuid()}], dram_bytes: 64MiB" + (", ssd_bytes: 64MiB" if disk else "")
        config = (
            f"listen: {{rpc_socket: {self.rpc}, session_socket: {self.session}}}\n"
            f"dram: {{capacity_bytes: 64MiB, arena_bytes: 1MiB}}\ntenants: [{{{tenant}}}]\ndrain_seconds: 20\n"
        )
        if disk:
            config += f"ssd: {{folder: {disk}, capacity_bytes: 64MiB, admission: all}}\n"
        if cluster:
            config += f"cluster: {json.dumps(cluster)}\n"
        (self.folder / "ashlard.yaml").write_text(config)
        with open(self.folder / "ashlard.log", "ab") as log:
            self.process = subprocess.Popen(
                [build_.program("ashlard"), "--config", self.folder / "ashlard.yaml"], stdout=log, stderr=log
            )

    def log(self):
        return (self.folder / "ashlard.log").read_text(errors="replace")

    def wait_until_it_serves(self):
        deadline = time.monotonic() + PATIENCE
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                if probe.connect_ex(self.session) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"the daemon {self.build.name} does not serve:\n{self.log()[-2000:]}")
            time.sleep(0.05)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Failed(f"the daemon {self.build.name} did not drain:\n{self.log()[-2000:]}") from None


class Engine:
    """A process of the release's own engine, which does one operation, prints the result, and lives until it is told to
    end."""

    def __init__(self, build_, daemon, command, seed, *more):
        self._name, self._command = build_.name, command
        self._process = subprocess.Popen(
            [
                build_.program("integration_engine"),
                daemon.rpc,
                daemon.session,
                "0",
                command,
                str(seed),
                str(SEGMENTS),
                str(TOKENS),
                *more,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.line = self._read()

    def _read(self):
        deadline, written = time.monotonic() + PATIENCE, b""
        while not written.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            some = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not some:
                self.end()
                raise Failed(f"engine {self._name} said nothing to {self._command}: {written.decode(errors='replace')}")
            written += some
        return written.decode().strip()

    def counts(self):
        """For an engine that keeps asking: a number per word of its answer."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        line = self._read()
        words = line.split()
        if words[:1] != ["asked"]:
            raise Failed(f"engine {self._name}: {line}")
        return dict(zip(words[::2], map(int, words[1::2])))

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Counts:
    def __init__(self):
        self.requests = self.failed = self.acknowledged = self.lost = 0

    def ask(self, *arguments):
        engine = Engine(*arguments)
        self.requests += 1
        if engine.line.startswith("failed") or "Failure" in engine.line:
            self.failed += 1
        return engine

    def publish(self, build_, daemon):
        for seed in range(1, PROMPTS + 1):
            engine = self.ask(build_, daemon, "publish", seed)
            if engine.line != "published":
                raise Failed(f"engine {build_.name}, daemon {daemon.build.name}: {engine.line}")
            self.acknowledged += SEGMENTS
            engine.end()

    def find(self, build_, daemon, patience=0.0):
        """Checks that every object is found, and that its tuples equal the computed ones."""
        for seed in range(1, PROMPTS + 1):
            deadline = time.monotonic() + patience
            while True:
                match = self.ask(build_, daemon, "match", seed)
                lease, *reasons = match.line.split()
                if set(reasons) == {HIT} or time.monotonic() > deadline:
                    break
                match.end()
                time.sleep(0.2)
            self.lost += sum(reason != HIT for reason in reasons)
            attached = self.ask(build_, daemon, "attach", seed, lease)
            if not attached.line.startswith("ok"):
                raise Failed(f"engine {build_.name}, daemon {daemon.build.name}: {attached.line}")
            attached.end()
            match.end()


def raw_hello(daemon, least, most):
    """(code, message) of the daemon's answer to Hello with these versions, in an encoding that every release uses."""
    hello = bytes([0x08, least, 0x10, most, 0x1A, 3]) + b"old"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as session:
        session.settimeout(PATIENCE)
        session.connect(daemon.session)
        session.send(bytes([0x0A, len(hello)]) + hello)
        return session.recv(65536)


def engine_with_daemon(engine, of_daemon, folder, counts):
    daemon = Daemon(of_daemon, folder)
    try:
        daemon.wait_until_it_serves()
        if common(engine, of_daemon, "protocol"):
            counts.publish(engine, daemon)
            counts.find(engine, daemon)
            return "works"
        said = Engine(engine, daemon, "connect", 1)
        said.end()
        answer = raw_hello(daemon, *engine.ranges["protocol"])
        # Up to 0.1.0: "speaks versions 1 to 1, the client 2 to 4".
        both = r"speaks (?:versions )?{} to {}[,;] the client (?:speaks )?{} to {}".format(
            *of_daemon.ranges["protocol"], *engine.ranges["protocol"]
        )
        refusal = re.search(both.encode(), answer)
        if said.line != "FAILED_PRECONDITION" or refusal is None:
            raise Failed(f"not refused by name: {said.line}, {answer!r}")
        return f"refused: {refusal[0].decode()}"
    finally:
        daemon.stop()


def daemon_with_disk(writer, reader, folder, counts):
    """The engine is of the daemon's own release in both runs; only the daemon changes."""
    first = Daemon(writer, f"{folder}/a", disk=f"{folder}/disk")
    try:
        first.wait_until_it_serves()
        counts.publish(writer, first)
    finally:
        if first.stop() != 0:
            raise Failed(f"the daemon {writer.name} ended badly:\n{first.log()[-2000:]}")
    second = Daemon(reader, f"{folder}/b", disk=f"{folder}/disk")
    try:
        if common(writer, reader, "disk"):
            second.wait_until_it_serves()
            counts.find(reader, second)
            return "works"
        second.process.wait(PATIENCE)
        versions = {str(each.ranges["disk"][0]) for each in (writer, reader)}
        line = next((line for line in second.log().splitlines() if "cannot start" in line), "")
        if not all(re.search(rf"\b{version}\b", line) for version in versions):
            raise Failed(f"not refused by name: {second.log()[-2000:]}")
        return f"refused: {line.strip()}"
    finally:
        if second.process.poll() is None:
            second.stop()


@contextlib.contextmanager
def etcd(folder):
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with open(f"{folder}/etcd.log", "wb") as log:
        process = subprocess.Popen(
            [
                "etcd",
                "--name=u",
                f"--data-dir={folder}/etcd",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=u={peer}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield client.removeprefix("http://")
    finally:
        process.kill()
        process.wait()


def in_cluster(name, endpoint):
    """A node's part of a configuration, on ports that are free now."""
    return {
        "node": name,
        "control_address": f"127.0.0.1:{free_port()}",
        "transport_address": f"127.0.0.1:{free_port()}",
        "announce": "all",
        "tls": {"insecure": True},
        "etcd": {"endpoints": [endpoint]},
    }


def daemon_with_daemon(holder, asker, folder, counts):
    """Objects that an engine published on one node are found on the other."""
    with etcd(folder) as endpoint:
        nodes = [
            Daemon(build_, f"{folder}/{name}", cluster=in_cluster(name, endpoint))
            for build_, name in ((holder, "a"), (asker, "b"))
        ]
        try:
            for each in nodes:
                each.wait_until_it_serves()
            if common(holder, asker, "peers"):
                counts.publish(holder, nodes[0])
                counts.find(asker, nodes[1], patience=PATIENCE)
                return "works"
            deadline = time.monotonic() + PATIENCE
            while not any("FAILED_PRECONDITION" in each.log() or "protocol" in each.log() for each in nodes):
                if time.monotonic() > deadline:
                    raise Failed(f"not refused by name: {nodes[1].log()[-2000:]}")
                time.sleep(0.2)
            return "refused"
        finally:
            for each in nodes:
                each.stop()


def wait_until_it_lands(engine, more_than, counts):
    """Returns the engine's counts, once it has landed more. A failure is a failed request, or a text that differs from
    the published one."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = engine.counts()
        if found["failed"]:
            counts.failed += 1
            raise Failed(f"a request of the running engine failed: {found}")
        if found["landed"] > more_than:
            return found
        if time.monotonic() > deadline:
            raise Failed(f"the running engine lands nothing: {found}")
        time.sleep(0.1)


def daemon_replaced(before, after, folder, counts):
    """A node's daemon drains, stops, and is replaced by one of this build, while its engine keeps asking and another
    node of the earlier release stays. Acknowledged objects are found on both nodes."""
    with etcd(folder) as endpoint:
        here, there = in_cluster("a", endpoint), in_cluster("b", endpoint)
        node, stays = (
            Daemon(before, f"{folder}/a", f"{folder}/disk", here),
            Daemon(before, f"{folder}/b", cluster=there),
        )
        engine = None
        try:
            for each in (node, stays):
                each.wait_until_it_serves()
            counts.publish(before, node)
            engine = Engine(before if before.keeps else after, node, "keep", 1)
            first = wait_until_it_lands(engine, 20, counts)
            if node.stop() != 0:
                raise Failed(f"the daemon {before.name} ended badly:\n{node.log()[-2000:]}")
            time.sleep(1.0)  # the engine has no daemon, and computes
            node = Daemon(after, f"{folder}/a", f"{folder}/disk", here)
            node.wait_until_it_serves()
            last = wait_until_it_lands(engine, first["landed"] + 20, counts)
            counts.find(after, node)
            counts.find(before, stays, patience=PATIENCE)
            last = wait_until_it_lands(engine, last["landed"], counts)
            counts.requests += last["asked"]
            counts.acknowledged += last["kept"]
            counts.lost += last["lost"]
            return (
                f"works: {last['asked'] - last['landed']} of {last['asked']} requests of the running engine were misses"
            )
        finally:
            if engine is not None:
                engine.end()
            for each in (node, stays):
                each.stop()


PAIRINGS = {
    "engine with daemon": (engine_with_daemon, "protocol"),
    "daemon with disk of": (daemon_with_disk, "disk"),
    "daemon asks daemon": (daemon_with_daemon, "peers"),
    "daemon replaced by": (daemon_replaced, "peers"),
}


def run_pairing(kind, first, second):
    """`first` is the engine, the disk's writer, or the holder."""
    pairing, what = PAIRINGS[kind]
    row = {"pairing": kind, "first": first.name, "second": second.name}
    if common(first, second, what) is None:
        return {**row, "outcome": "not there: one of them has no such thing", "ok": True}
    if pairing is daemon_replaced and not (common(first, second, "protocol") and common(first, second, "disk")):
        return {**row, "outcome": "not there: engines and daemon of a node are replaced together", "ok": True}
    if what == "peers" and shutil.which("etcd") is None:
        return {**row, "outcome": "skipped: etcd is not installed", "ok": None}
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="ashlar-upgrade-") as folder:
        try:
            outcome = pairing(first, second, folder, counts)
            ok = counts.failed == 0 and counts.lost == 0
        except Failed as failed:
            outcome, ok = f"FAILED: {failed}", False
    return {
        **row,
        "outcome": outcome,
        "ok": ok,
        "requests": counts.requests,
        "failed": counts.failed,
        "acknowledged": counts.acknowledged,
        "lost": counts.lost,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="this build's programs")
    parser.add_argument("--also", nargs="*", default=[], metavar="COMMIT", help="further commits, as releases")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    lines = (ROOT / "tests/upgrade/releases").read_text(encoding="utf-8").splitlines()
    releases = [tuple(line.split()) for line in lines if not line.startswith("#")]
    for commit in arguments.also:
        releases.append((commit[:12], git("rev-parse", commit).strip()))
    today = Build("today", None, arguments.bin.resolve())
    rows = []
    for each in [build(name, commit, arguments.jobs) for name, commit in releases] + [today]:
        for kind in PAIRINGS:
            ways = {(each, today): 1} if PAIRINGS[kind][0] is daemon_replaced else {(each, today): 1, (today, each): 1}
            for first, second in ways:
                rows.append(run_pairing(kind, first, second))
                row = rows[-1]
                print(
                    f"{row['first']:>12} {kind:<20} {row['second']:<12} {row['outcome']}"
                    + (
                        f" ({row['acknowledged']} acknowledged, {row['lost']} lost; {row['requests']} requests, {row['failed']} failed)"
                        if row.get("requests")
                        else ""
                    ),
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps({"pairings": rows}, indent=1) + "\n")
    passed, failed, skipped = (sum(row["ok"] is each for row in rows) for each in (True, False, None))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
