#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd unit: well formed, and hardened according to systemd's score.

usage: systemd_test.py SOURCE_ROOT
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
UNIT = ROOT / "deploy/systemd/ashlard.service"
MOST_EXPOSED = 2.0  # of 10; a unit without hardening has 9.6


@unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed (Debian: systemd)")
class Unit(unittest.TestCase):
    def test_it_is_well_formed(self):
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder, UNIT.name)
            unit.write_text(
                UNIT.read_text()
                .replace("/usr/sbin/ashlard", "/bin/true")
                .replace("User=ashlar", "User=root")
                .replace("Group=ashlar", "Group=root")
            )
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
            )
            said = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
            self.assertEqual(said, [])
            unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPriviliges"))
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
            )
            self.assertIn("NoNewPriviliges", done.stdout + done.stderr, "a misspelt line is found")

    def test_it_is_hardened(self):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT],
            capture_output=True,
            text=True,
            check=False,
        )
        exposure = float(re.search(r"Overall exposure level for ashlard.service: ([0-9.]+)", done.stdout)[1])
        print(f"exposure {exposure}")
        self.assertLessEqual(exposure, MOST_EXPOSED, done.stdout)

    def test_a_refused_configuration_is_not_tried_again(self):
        """The exit status of a command other than ExecStart would not keep systemd from restarting it."""
        lines = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
        status = re.search(r"kExitBadConfig = (\d+);", (ROOT / "daemon/main.cc").read_text())[1]
        self.assertEqual(lines["RestartPreventExitStatus"], status)
        self.assertEqual([name for name in lines if name.startswith("Exec")], ["ExecStart", "ExecReload"])

    def test_it_reloads_and_may_write_its_audit_file(self):
        lines = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
        self.assertEqual(lines["ExecReload"], "/bin/kill -HUP $MAINPID")
        for config in ("ashlard.example.yaml", "debian/ashlard.yaml"):
            file = re.search(r"audit_file: (/\S+)", (ROOT / "deploy" / config).read_text())[1]
            self.assertEqual(file.split("/")[:4], ["", "var", "log", lines["LogsDirectory"]], "the rest is read-only")

    def test_folders_elsewhere_are_written_with_the_drop_in_of_the_page(self):
        page = (ROOT / "docs/tiers.md").read_text().split("\n## The disk\n")[1].split("\n## ")[0]
        drop_in = re.search(r"```text\n(.*?)```", page, re.S)[1]
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder, UNIT.name)
            unit.write_text(
                UNIT.read_text().replace("/usr/sbin/ashlard", "/bin/true").replace("=ashlar\n", "=root\n") + drop_in
            )
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
            )
            self.assertEqual([line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line], [])
        names = re.findall(r"^(\w+=)/", drop_in, re.M)
        self.assertEqual(sorted(names), ["ReadWritePaths=", "RequiresMountsFor="])
        self.assertEqual(
            dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))["ProtectSystem"], "strict", "the page says so"
        )
        for file in ("systemd/ashlard.service", "debian/ashlard.yaml"):
            for name in names:
                self.assertIn(
                    name, (ROOT / "deploy" / file).read_text(), f"{file}: where a folder is set, what else it needs"
                )

    def test_operators_logins_are_visible(self):
        """Of `sudo ashlarctl`, a root process, which the daemon's user sees only with this setting."""
        lines = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
        self.assertIn('"/loginuid"', (ROOT / "daemon/admin/audit_log.cc").read_text())
        self.assertEqual((lines["User"], lines["ProtectProc"]), ("ashlar", "default"))

    def test_devices_are_open_with_the_drop_in_that_it_names(self):
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder, UNIT.name)
            unit.write_text(UNIT.read_text() + "[Service]\nPrivateDevices=no\n")
            done = subprocess.run(
                ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertRegex(done.stdout, r"PrivateDevices= +Service potentially has access")
            self.assertRegex(done.stdout, r"DeviceAllow= +Service has no device ACL")

    def test_the_stop_timeout_exceeds_the_drain(self):
        drain = int(re.search(r"^drain_seconds: (\d+)", (ROOT / "deploy/ashlard.example.yaml").read_text(), re.M)[1])
        stop = int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.M)[1])
        self.assertGreater(stop, 30)
        self.assertGreater(stop, drain)


if __name__ == "__main__":
    unittest.main()
