#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian package: its contents and, with ASHLAR_BARE_ROOT=1, its life on a minimal Debian: installed, started,
used, upgraded, removed and purged.

usage: package_test.py BUILD    (environment: ASHLAR_SOURCE; with ASHLAR_BARE_ROOT also PYTHONPATH with the package ashlar)
"""

import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import bare_root
from bare_root import run

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
SOURCE = bare_root.SOURCE
UNIT = "lib/systemd/system/ashlard.service"
FILES = {
    "/usr/sbin/ashlard",
    "/usr/bin/ashlarctl",
    f"/{UNIT}",
    "/etc/ashlar/ashlard.yaml",
    "/usr/share/doc/ashlar/ashlard.example.yaml",
    "/usr/share/doc/ashlar/copyright",
    "/usr/share/doc/ashlar/changelog.gz",
    "/usr/share/doc/ashlar/NEWS.gz",
    "/usr/share/doc/ashlar/README.md",
    "/usr/share/doc/ashlar/SECURITY.md",
    "/usr/share/doc/ashlar/runbooks.md",
    "/usr/share/doc/ashlar/sizing.md",
    "/usr/bin/ashlar-replay",
    "/usr/bin/ashlar-sizing",
    "/usr/bin/ashlar-trace-from-log",
    "/usr/share/ashlar/prometheus/prometheus.example.yml",
    "/usr/share/ashlar/prometheus/prometheus.kubernetes.example.yml",
    "/usr/share/man/man1/ashlarctl.1.gz",
    "/usr/share/man/man8/ashlard.8.gz",
    "/usr/share/bash-completion/completions/ashlarctl",
    "/usr/share/zsh/vendor-completions/_ashlarctl",
    "/usr/share/fish/vendor_completions.d/ashlarctl.fish",
    "/usr/share/ashlar/prometheus/ashlar.rules.yml",
}


@unittest.skipUnless(shutil.which("cpack") and shutil.which("dpkg-shlibdeps"), "dpkg-dev is not installed")
class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.package = bare_root.pack(BUILD, f"{cls.folder.name}/packed")
        cls.root = pathlib.Path(cls.folder.name, "root")
        run("dpkg-deb", "-x", cls.package, cls.root)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def field(self, name):
        return run("dpkg-deb", "-f", self.package, name).strip()

    def test_it_has_the_release_of_its_programs(self):
        self.assertEqual(self.field("Package"), "ashlar")
        for program in ("usr/sbin/ashlard", "usr/bin/ashlarctl"):
            self.assertEqual(run(self.root / program, "--version").split()[1], self.field("Version"))
        self.assertEqual(self.package.name, f"ashlar_{self.field('Version')}_{self.field('Architecture')}.deb")

    def test_the_package_has_exactly_the_files_of_a_node(self):
        found = {f"/{path.relative_to(self.root)}" for path in self.root.rglob("*") if not path.is_dir()}
        dashboards = {f"/usr/share/ashlar/grafana/ashlar-{name}.json" for name in ("fleet", "node", "tenant")}
        self.assertEqual(found, FILES | dashboards)

    def test_it_depends_on_the_libraries_that_it_loads(self):
        depends = self.field("Depends")
        for name in ("libc6 (>=", "libgrpc++", "librocksdb", "libucx0", "libmicrohttpd", "adduser"):
            self.assertIn(name, depends)
        self.assertNotIn("-dev", depends)

    def test_its_programs_size_a_cache_from_a_log(self):
        """As in the package's sizing.md, with nothing from the source tree."""
        work = pathlib.Path(self.folder.name, "sizing")
        work.mkdir()
        (work / "log").write_text(
            "".join(
                json.dumps(
                    {
                        "timestamp": at,
                        "request": {
                            "messages": [
                                {"role": "system", "content": "word " * 2000},
                                {"role": "user", "content": f"question {at}"},
                            ]
                        },
                    }
                )
                + "\n"
                for at in range(4)
            )
        )
        programs = self.root / "usr/bin"
        (work / "config.json").write_text(
            json.dumps(
                {
                    "model_type": "llama",
                    "num_hidden_layers": 4,
                    "hidden_size": 512,
                    "num_attention_heads": 8,
                    "torch_dtype": "bfloat16",
                }
            )
        )
        (work / "layout.json").write_text(run(programs / "ashlarctl", "layout", work / "config.json", "--json"))
        run(programs / "ashlar-trace-from-log", "--format", "openai", "--out", work / "trace", work / "log")
        run(
            programs / "ashlar-sizing",
            "model",
            work / "layout.json",
            "--active-parameters",
            "3e9",
            "--query-width",
            "512",
            "--out",
            work / "model.json",
        )
        run(
            programs / "ashlar-replay",
            "run",
            "--trace",
            work / "trace",
            "--format",
            "stf",
            "--model",
            work / "model.json",
            "--capacity",
            "1GB",
            "--policy",
            "none,ashlar",
            "--json",
            work / "figures.json",
        )
        said = run(
            programs / "ashlar-sizing",
            "cost",
            work / "figures.json",
            "--requests-per-day",
            "1000",
            "--prefill-rate",
            "1000",
            "--gpu-hour",
            "2",
            "--dram-gb-month",
            "2",
        )
        self.assertIn("trace", said)

    def test_files_have_plain_permissions(self):
        for line in run("dpkg-deb", "-c", self.package).splitlines():
            rights, owner = line.split()[:2]
            self.assertEqual(owner, "root/root", line)
            self.assertRegex(rights, r"^(drwxr-xr-x|-rw-r--r--|-rwxr-xr-x)$", line)

    def test_the_configuration_is_accepted_and_kept(self):
        done = run(self.root / "usr/sbin/ashlard", "--config", self.root / "etc/ashlar/ashlard.yaml", "--check-config")
        self.assertIn("sandbox: on", done.replace('"', ""))
        drain = int(re.search(r"drain_seconds: (\d+)", done)[1])
        unit = (self.root / UNIT).read_text()
        self.assertGreater(int(re.search(r"^TimeoutStopSec=(\d+)", unit, re.M)[1]), drain)
        self.assertIn("/etc/ashlar/ashlard.yaml", run("dpkg-deb", "--info", self.package, "conffiles"))
        for line in re.findall(r"^Exec\w+=(\S+) --config (\S+)", unit, re.M):
            for path in line:
                self.assertTrue((self.root / path.lstrip("/")).exists(), path)

    def test_scripts_are_sound(self):
        for name in ("postinst", "prerm", "postrm"):
            script = pathlib.Path(self.folder.name, name)
            script.write_text(run("dpkg-deb", "--info", self.package, name))
            run("sh", "-n", script)

    def test_man_pages_match_the_programs(self):
        page = gzip.decompress((self.root / "usr/share/man/man1/ashlarctl.1.gz").read_bytes()).decode()
        self.assertIn("support\\-bundle", page)
        page = gzip.decompress((self.root / "usr/share/man/man8/ashlard.8.gz").read_bytes()).decode()
        self.assertIn("ashlard \\- the Ashlar cache daemon; run one per node", page)
        self.assertIn("\\-\\-check\\-config", page)
        self.assertIn("_ashlarctl", (self.root / "usr/share/bash-completion/completions/ashlarctl").read_text())

    def test_the_same_build_makes_the_same_package(self):
        other = bare_root.pack(BUILD, f"{self.folder.name}/again")
        first, second = (hashlib.sha256(each.read_bytes()).hexdigest() for each in (self.package, other))
        self.assertEqual(first, second)

    @unittest.skipUnless(shutil.which("lintian"), "lintian is not installed")
    def test_lintian_finds_no_error(self):
        done = subprocess.run(
            ["lintian", "--fail-on", "error", "--tag-display-limit", "0", self.package],
            text=True,
            capture_output=True,
            check=False,
        )
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("E:", "W:"))]
        print("\n".join(said))
        self.assertEqual([line for line in said if line.startswith("E:")], [])


@unittest.skipUnless(os.environ.get("ASHLAR_BARE_ROOT"), "minutes, and downloads: set ASHLAR_BARE_ROOT=1")
@unittest.skipIf(bare_root.why_not(), bare_root.why_not())
class OnABareRoot(unittest.TestCase):
    """The root has no service manager: the daemon is started as the unit would start it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        pathlib.Path(folder.name).chmod(0o711)  # the engine's user reaches the sockets through it
        self.package = bare_root.pack(BUILD, f"{folder.name}/packed")
        self.root = bare_root.Root(f"{folder.name}/root")
        self.addCleanup(self.root.unmount)

    def test_it_is_installed_used_and_purged(self):
        self.root.run("apt-get", "update")
        self.root.run("apt-get", "install", "-y", "--no-install-recommends", "adduser")
        before = self.root.files()
        self.root.install(self.package)
        config = self.root.folder / "etc/ashlar/ashlard.yaml"
        config.write_text(config.read_text().replace("1GiB", "256MiB"))
        self.used()
        # Installing it again is an upgrade: configuration and disk are kept.
        self.root.run("dpkg", "-i", f"/root/{self.package.name}")
        self.assertIn("256MiB", config.read_text())
        self.used(already=True)
        self.root.run("apt-get", "remove", "-y", "ashlar")
        self.assertTrue((self.root.folder / "var/lib/ashlar").exists(), "removed is not purged")
        self.root.run("apt-get", "purge", "-y", "--autoremove", "ashlar")
        (self.root.folder / "root" / self.package.name).unlink()  # the package file, from which it was installed
        self.assertEqual(sorted(name for name in self.root.files() - before if "ashlar" in name), [])
        self.assertNotIn("ashlar", (self.root.folder / "etc/passwd").read_text())
        self.assertNotIn("ashlar", (self.root.folder / "etc/group").read_text())

    def used(self, already=False):
        """Like the unit: the user, the folders with their modes, the check, the daemon, SIGTERM."""
        uid, gid = (int(self.root.run("id", option, "ashlar")) for option in ("-u", "-g"))
        for folder, mode in (("run/ashlar", 0o750), ("var/lib/ashlar", 0o700), ("var/log/ashlar", 0o700)):
            place = self.root.folder / folder
            place.mkdir(exist_ok=True)
            place.chmod(mode)
            os.chown(place, uid, gid)
        command = ["/usr/sbin/ashlard", "--config", "/etc/ashlar/ashlard.yaml"]
        self.root.run(*command, "--check-config")
        sockets = self.root.folder / "run/ashlar"
        with open(self.root.folder / "tmp/ashlard.log", "wb") as log:
            daemon = subprocess.Popen(
                ["chroot", f"--userspec={uid}:{gid}", self.root.folder, *command], stdout=log, stderr=log
            )
        try:
            bare_root.wait_for(lambda: self.healthy(), "the daemon starts", daemon)
            lines = bare_root.serve_an_engine(sockets, uid=1000, gid=gid)
            self.assertRegex(lines[1], r"^[1-9]\d* of \d+ tokens from the cache")
            if already:
                self.assertRegex(lines[0], r"^[1-9]\d* of \d+ tokens from the cache", "the disk outlived the upgrade")
            self.assertIn("serving", self.root.run("ashlarctl", "status"))
            self.assertIn("sandbox active", (self.root.folder / "tmp/ashlard.log").read_text())
            self.root.run("sh", "-c", "echo 1000 > /proc/self/loginuid && exec ashlarctl reload")  # as if run by sudo
            last = json.loads((self.root.folder / "var/log/ashlar/audit.jsonl").read_text().splitlines()[-1])
            self.assertEqual((last["action"], last["user"], last["login_uid"]), ("Reload", "root", 1000))
            daemon.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(60), 0)
        except AssertionError as error:
            self.fail(f"{error}\n{(self.root.folder / 'tmp/ashlard.log').read_text()}")
        finally:
            daemon.kill()
            daemon.wait()

    def healthy(self):
        done = subprocess.run(
            ["chroot", self.root.folder, "ashlarctl", "health"], capture_output=True, text=True, check=False
        )
        return done.stdout == "serving\n"


if __name__ == "__main__":
    unittest.main(failfast=True)
