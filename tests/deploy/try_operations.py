#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A platform engineer's tasks, in minutes: daemons under load, Prometheus, and faults that must raise their alert and
resolve it. tools/try-operations runs it.

usage: try_operations.py [--json FILE] [--log FILE] [--package] [--image] [--real-waits]    (environment: ASHLAR_SOURCE, ASHLAR_BUILD, ASHLARD, PYTHONPATH)
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

SOURCE, BUILD = pathlib.Path(os.environ["ASHLAR_SOURCE"]), pathlib.Path(os.environ["ASHLAR_BUILD"])
sys.path[:0] = [str(SOURCE / "examples/python"), str(pathlib.Path(__file__).parent)]

import bare_root  # noqa: E402
import fleet  # noqa: E402
import monitoring  # noqa: E402

PATIENCE = 60.0  # seconds until an alert fires or is resolved, in addition to its rule's wait
log = None  # the file for the daemon's log


def say(line):
    for out in (sys.stdout, log) if log else (sys.stdout,):
        print(time.strftime("%H:%M:%S"), line, file=out, flush=True)


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


def install_package(folder, cleanup):
    """This build's Debian package, on a bare Debian in `folder`."""
    pathlib.Path(folder).chmod(0o711)
    root = bare_root.Root(f"{folder}/root")
    cleanup.callback(root.unmount)
    root.install(bare_root.pack(BUILD, f"{folder}/packed"))
    return root


def unpack_package(folder):
    """Unpacks the daemon of this build's Debian package below a root, as dpkg does."""
    subprocess.run(["dpkg-deb", "-x", bare_root.pack(BUILD, f"{folder}/packed"), f"{folder}/root"], check=True)
    return f"{folder}/root/usr/sbin/ashlard"


class Disk:
    """As root, a small ext4 file system that can be filled; otherwise a folder that cannot."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder, "disk")
        self.folder.mkdir()
        self.mounted = False
        image = pathlib.Path(folder, "disk.img")
        with open(image, "wb") as file:
            file.truncate(96 << 20)
        if os.geteuid() == 0 and run("mkfs.ext4", "-q", "-m", "0", image).returncode == 0:
            self.mounted = run("mount", "-o", "loop", image, self.folder).returncode == 0

    def fill(self):
        with open(self.folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

    def empty(self):
        (self.folder / "filler").unlink()

    def unmount(self):
        if self.mounted:
            run("umount", "-l", self.folder)


class Trial:
    """Two nodes, their etcd, the first node's disk, Prometheus, and one engine per node."""

    def __init__(self, folder, cleanup, real_waits, root):
        """`root`: the system that contains the daemons; None: ASHLARD names one."""
        self.disk = Disk(folder)
        cleanup.callback(self.disk.unmount)
        pathlib.Path(folder, "second").mkdir()
        if root is not None:
            cleanup.callback(root.unmount)  # it has the disk mounted, too
            os.environ["ASHLARD"] = root.program("/usr/sbin/ashlard", "ashlar", folder)
        nodes = fleet.Fleet(folder, cleanup, str(self.disk.folder / "cache"), hurry=True, real_waits=real_waits)
        self.etcd, self.prometheus, self.daemon = nodes.etcd, nodes.prometheus, nodes.nodes[0].daemon
        self.loads = [node.load for node in nodes.nodes]
        self.rule_waits = monitoring.waits_of((SOURCE / "deploy/prometheus/ashlar.rules.yml").read_text())

    def panels(self):
        """(with data, all)"""
        count, left = monitoring.prove(self.prometheus, PATIENCE, alone=False)
        for query, lacks in left.items():
            say(f"{query.board}: {query.panel}: {lacks}: {query.text}")
        return count - len(left), count

    def alert(self, name, begin, end):
        """Returns the seconds from the fault to the alert, and from the fault's end to the alert's end; None for what
        does not happen. `waits_s` of these are the alert's wait here, and `rule_waits_s` the wait of the deployed rule.
        """
        times, patience = [], PATIENCE + self.prometheus.waits[name]
        for act, wanted in ((begin, True), (end, False)):
            act()
            begun = time.monotonic()
            while (name in self.prometheus.firing()) != wanted and time.monotonic() - begun < patience:
                time.sleep(0.2)
            took = time.monotonic() - begun
            times.append(round(took, 1) if took < patience else None)
            say(f"{name}: {'fired' if wanted else 'resolved'} after {times[-1]} s")
        return {
            "name": name,
            "fired_s": times[0],
            "resolved_s": times[1],
            "waits_s": self.prometheus.waits[name],
            "rule_waits_s": self.rule_waits[name],
        }

    def start_on_a_full_disk(self):
        """RocksDB has enough preallocated space for minutes of this load; a start needs more."""
        self.daemon.stop()
        self.disk.fill()
        self.daemon.start()

    def alerts(self):
        def only_new(wanted):
            for engine in self.loads:
                engine.only_new = wanted

        time.sleep(45)  # the baseline of the hit rate
        found = [
            self.alert("AshlarHitRateDropped", lambda: only_new(True), lambda: only_new(False)),
            self.alert("AshlarDirectoryDisconnected", self.etcd.stop, self.etcd.start),
            self.alert("AshlarDown", self.daemon.kill, self.daemon.start),
        ]
        if self.disk.mounted:
            found.append(self.alert("AshlarTierDegraded", self.start_on_a_full_disk, self.disk.empty))
        else:
            say("AshlarTierDegraded: not tried: a file system that can be filled takes root and mkfs.ext4")
        return found


def count_rules():
    tests = (SOURCE / "deploy/prometheus/ashlar.rules.test.yml").read_text().count("\n  - name: ")
    done = run("promtool", "test", "rules", "ashlar.rules.test.yml", cwd=SOURCE / "deploy/prometheus")
    failed = done.stdout.count("name:") + done.stderr.count("name:") if done.returncode != 0 else 0
    return {"ok": tests - min(tests, max(failed, int(done.returncode != 0))), "all": tests}


def count_manifests():
    done = run(sys.executable, SOURCE / "tests/deploy/manifests_test.py", SOURCE, os.environ["ASHLARD"])
    if done.returncode != 0:
        say(f"manifests: {done.stderr}")
    valid = re.search(r"(\d+) objects valid", done.stdout)
    number = int(valid[1]) if valid else 0
    return {"ok": number if done.returncode == 0 else 0, "all": number}


def count_docs():
    """Counts the blocks of the pages that were tried, and the ones that were not, because programs are not built or
    installed here."""
    done = run(
        sys.executable,
        SOURCE / "tests/docs/run_blocks.py",
        "--root",
        SOURCE,
        "--bin",
        BUILD / "bin",
        "--compiler",
        shutil.which("c++"),
        "--count",
    )
    found = re.search(r"^blocks: (\d+), wrong: (\d+), not tried whole: (\d+)$", done.stdout, re.M)
    if found is None:
        say(f"docs: {done.stdout}{done.stderr}")
        return {"ok": 0, "all": 0, "skipped": 0}
    blocks, wrong, skipped = (int(number) for number in found.groups())
    wrong = max(wrong, int(done.returncode not in (0, 77)))
    return {"ok": blocks - wrong - skipped, "all": blocks - skipped, "skipped": skipped}


def count_packages():
    """The Debian package and the image: each is built, installed or run, and used. Takes minutes, root and downloads."""
    environment = {**os.environ, "ASHLAR_BARE_ROOT": "1", "ASHLAR_IMAGE": "1"}
    ok = count = 0
    for test, cases in (("package_test.py", ["OnABareRoot"]), ("image_test.py", [])):
        done = run(sys.executable, SOURCE / "tests/deploy" / test, BUILD, "-v", *cases, env=environment)
        lines = re.findall(r"^test_\w+ .*\.\.\. (ok|FAIL|ERROR|skipped .*)$|^(ERROR): setUpClass", done.stderr, re.M)
        say(f"{test}: {done.stdout.strip()}\n{done.stderr.strip()}")
        ok += sum(first == "ok" for first, _ in lines)
        count += len(lines)
    return {"ok": ok, "all": count}


def main():
    parser = argparse.ArgumentParser(prog="try-operations", description=__doc__.split("\n\nusage")[0])
    parser.add_argument("--json", metavar="FILE", help="also writes the figures there")
    parser.add_argument(
        "--package",
        action="store_true",
        help="runs the daemon of the Debian package: on a bare Debian, as root, else unpacked",
    )
    parser.add_argument(
        "--image", action="store_true", help="also builds and tries the Debian package and the image, as root"
    )
    parser.add_argument("--log", metavar="FILE", help="also writes there what it says")
    parser.add_argument(
        "--real-waits",
        action="store_true",
        help="alerts that wait two minutes at most wait so long here, too; all others a second",
    )
    arguments = parser.parse_args()
    global log
    log = open(arguments.log, "w", encoding="utf-8") if arguments.log else None
    for program in ("prometheus", "promtool", "etcd"):
        if shutil.which(program) is None:
            print(
                f"try-operations: {program} is not installed (tools/dependencies.sh lists the packages)",
                file=sys.stderr,
            )
            return 1
    ashlard = os.environ["ASHLARD"]
    with contextlib.ExitStack() as cleanup:
        root, where = None, "of this build"
        if arguments.package:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory())
            if why := bare_root.why_not():
                os.environ["ASHLARD"], where = unpack_package(folder), f"of the package, unpacked ({why})"
            else:
                root, where = install_package(folder, cleanup), "of the package, installed by apt on a bare Debian"
        trial = Trial(cleanup.enter_context(tempfile.TemporaryDirectory()), cleanup, arguments.real_waits, root)
        version = run(os.environ["ASHLARD"], "--version").stdout.strip()
        say(
            f"{version} {where}, two nodes, an engine each, etcd and Prometheus run; alerts look back seconds "
            "in place of minutes" + ("" if arguments.real_waits else ", and wait a second in place of minutes")
        )
        ok, count = trial.panels()
        say(f"panels: {ok} of {count} queries return data")
        alerts = trial.alerts()
    os.environ["ASHLARD"] = ashlard
    figures = {
        "panels": {"ok": ok, "all": count},
        "rules": count_rules(),
        "manifests": count_manifests(),
        "docs": count_docs(),
        "alerts": alerts,
    }
    names = ["rules", "manifests", "docs"]
    if arguments.image:
        figures["packages"] = count_packages()
        names.append("packages")
    for name in names:
        skipped = figures[name].get("skipped", 0)
        say(
            f"{name}: {figures[name]['ok']} of {figures[name]['all']}"
            + (f", {skipped} not tried here" if skipped else "")
        )
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    parts = all(figures[name]["ok"] == figures[name]["all"] > 0 for name in ("panels", *names))
    return 0 if parts and all(alert["fired_s"] and alert["resolved_s"] for alert in alerts) else 1


if __name__ == "__main__":
    sys.exit(main())
