#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The seccomp profile of the daemon's container, and the unit's equivalent filter: the daemon serves under each, with
its sandbox closed and its guard of engines' memory on.

usage: seccomp_test.py SOURCE_ROOT ASHLARD ASHLARCTL ENGINE    (ENGINE: an example that takes both sockets)
"""

import copy
import ctypes
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import seccomp

ROOT, ASHLARD, ASHLARCTL, ENGINE = (pathlib.Path(word).resolve() for word in sys.argv[1:5])
PROFILE = ROOT / "deploy/nodes/seccomp/ashlard.json"
NO_GUARD, NO_LANDLOCK, CLOSED = "userfaultfd is not permitted", "has no Landlock", "sandbox active"
PATIENCE = 60.0
CONFIG = """
listen: {{rpc_socket: {0}/rpc.sock, session_socket: {0}/session.sock, admin_socket: {0}/admin.sock}}
dram: {{capacity_bytes: 64MiB, arena_bytes: 8MiB}}
ssd: {{folder: {0}/disk, capacity_bytes: 64MiB}}
tenants: [{{name: default, uids: [{1}], dram_bytes: 64MiB, ssd_bytes: 64MiB}}]
sandbox: on
"""


def maker():
    spec = importlib.util.spec_from_file_location("make_profile", PROFILE.parent / "make_profile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_has(call):
    """The kernel and the machine's own filters, outside of any profile."""
    numbers = {"landlock_create_ruleset": 444, "userfaultfd": {"x86_64": 323, "aarch64": 282}[platform.machine()]}
    arguments = {
        "landlock_create_ruleset": (None, 0, 1),
        "userfaultfd": (os.O_CLOEXEC | 1,),
    }  # its version; only programs' faults
    result = ctypes.CDLL(None).syscall(numbers[call], *arguments[call])
    if call == "userfaultfd" and result >= 0:
        os.close(result)
    return result >= 0


def allowed(profile):
    return {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}


class Profile(unittest.TestCase):
    def setUp(self):
        self.profile = json.loads(PROFILE.read_text())

    def test_it_is_made_of_the_units_filter_and_the_sandboxs(self):
        make = maker()
        if make.release() != make.SYSTEMD:
            self.skipTest(f"systemd {make.SYSTEMD} is not installed here")
        self.assertEqual(json.loads(make.text()), self.profile, "run deploy/nodes/seccomp/make_profile.py")
        self.assertLessEqual(allowed(self.profile) - make.AT_THE_START, make.calls_of_the_unit())

    def test_only_listed_calls_are_allowed(self):
        self.assertEqual(self.profile["defaultAction"], "SCMP_ACT_ERRNO")
        refused = maker().refused_by_the_sandbox()
        self.assertGreater(len(refused), 50)
        self.assertEqual(allowed(self.profile) & refused, {"execve", "execveat", "userfaultfd"})
        self.assertLessEqual(
            {"mbind", "mlock", "memfd_create", "seccomp", "landlock_restrict_self"}, allowed(self.profile)
        )


@unittest.skipUnless(seccomp.library(), "libseccomp is not installed")
class DaemonUnderIt(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "ashlard.yaml").write_text(CONFIG.format(self.folder, os.getuid()))

    def served(self, profile):
        """Returns the log of a daemon that served an engine under the profile, or the last lines of one that did not
        start."""
        (self.folder / "profile.json").write_text(json.dumps(profile))
        log = self.folder / "log"
        with open(log, "wb") as out:
            daemon = subprocess.Popen(
                [
                    sys.executable,
                    pathlib.Path(__file__).with_name("seccomp.py"),
                    self.folder / "profile.json",
                    ASHLARD,
                    "--config",
                    self.folder / "ashlard.yaml",
                ],
                stdout=out,
                stderr=out,
            )
        try:
            deadline = time.monotonic() + PATIENCE
            while CLOSED not in log.read_text():
                if daemon.poll() is not None:
                    return log.read_text()
                self.assertLess(time.monotonic(), deadline, log.read_text())
                time.sleep(0.05)
            engine = subprocess.run(
                [ENGINE, self.folder / "rpc.sock", self.folder / "session.sock"],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(engine.returncode, 0, engine.stdout + engine.stderr + log.read_text())
            status = subprocess.run(
                [ASHLARCTL, "status", "--socket", self.folder / "admin.sock"],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertIn("serving", status.stdout, status.stderr)
            daemon.terminate()
            self.assertEqual(daemon.wait(PATIENCE), 0, log.read_text())
            return log.read_text()
        finally:
            daemon.kill()
            daemon.wait()

    def without(self, *names):
        profile = copy.deepcopy(json.loads(PROFILE.read_text()))
        for rule in profile["syscalls"]:
            rule["names"] = [name for name in rule["names"] if name not in names]
        return profile

    def test_the_guard_and_the_sandbox_work_under_the_profile(self):
        log = self.served(json.loads(PROFILE.read_text()))
        self.assertIn(CLOSED, log)
        self.assertEqual(NO_GUARD in log, not kernel_has("userfaultfd"), log)
        self.assertEqual(NO_LANDLOCK in log, not kernel_has("landlock_create_ruleset"), log)

    def test_without_userfaultfd_the_log_says_that_the_guard_is_off(self):
        self.assertIn(NO_GUARD, self.served(self.without("userfaultfd")))

    def test_the_sandbox_needs_its_own_calls(self):
        self.assertIn(NO_LANDLOCK, self.served(self.without("landlock_create_ruleset")))
        self.assertNotIn(CLOSED, self.served(self.without("seccomp")))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
