#!/usr/bin/env python3
"""The container's image, built for real from this build's package on a bare Debian, without a registry, and run for real:
as its own user, on a read-only root, without a network and without capabilities, with an engine outside.

usage: image_test.py BUILD    (environment: ASHLAR_IMAGE=1, ASHLAR_SOURCE, PYTHONPATH with the package ashlar)
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import bare_root  # noqa: E402
import package_test  # noqa: E402
from bare_root import run  # noqa: E402

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])
BASE, IMAGE, CONTAINER = "localhost/ashlar-test-base", "localhost/ashlar-test", f"ashlar-test-{os.getpid()}"
USER, GROUP = 10001, 10002
MOST_BYTES = 300 << 20
# vfs and chroot: no overlay, no cgroups, no network of its own are needed. podman would run the health check by a timer
# of systemd: the test asks itself.
STORAGE = ["--storage-driver", "vfs"]
CONFIG = """
listen: {rpc_socket: /run/ashlar/rpc.sock, session_socket: /run/ashlar/session.sock, admin_socket: /run/ashlar/admin.sock}
dram: {capacity_bytes: 256MiB, arena_bytes: 8MiB}
ssd: {folder: /var/lib/ashlar, capacity_bytes: 256MiB}
tenants: [{name: default, uids: [2000], dram_bytes: 256MiB, ssd_bytes: 256MiB}]
"""


def why_not():
    missing = [program for program in ("buildah", "podman") if shutil.which(program) is None]
    return f"{' and '.join(missing)}: not installed" if missing else bare_root.why_not()


@unittest.skipUnless(os.environ.get("ASHLAR_IMAGE"), "minutes, and downloads: set ASHLAR_IMAGE=1")
@unittest.skipIf(why_not(), why_not())
class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        begun = time.monotonic()
        cls.store = [*STORAGE, "--root", f"{cls.folder.name}/store", "--runroot", f"{cls.folder.name}/run"]
        context = pathlib.Path(cls.folder.name, "context")
        (context / "deploy").mkdir(parents=True)
        shutil.copytree(SOURCE / "deploy/container", context / "deploy/container")
        (context / "package").mkdir()
        shutil.copy(package_test.pack(f"{cls.folder.name}/packed"), context / "package")
        cls.buildah("import-base")
        cls.buildah("bud", "--isolation", "chroot", "--network", "host", "--format", "docker", "--build-arg", f"BASE={BASE}",
                    "--build-arg", "PACKAGE=given", "--timestamp", "0", "-f", context / "deploy/container/Containerfile",
                    "-t", IMAGE, context)
        print(f"built in {time.monotonic() - begun:.0f} s")

    @classmethod
    def buildah(cls, *arguments):
        if arguments != ("import-base",):
            return run("buildah", *cls.store, *arguments)
        name = cls.buildah("from", "scratch").strip()
        cls.buildah("add", name, bare_root.packed(package_test.KEPT), "/")
        cls.buildah("commit", "--rm", name, BASE)

    def podman(self, *arguments):
        return run("podman", *self.store, *arguments)

    def test_it_has_what_the_daemon_needs_and_says_what_that_is(self):
        image = json.loads(self.buildah("inspect", "--type", "image", IMAGE))["Docker"]
        self.assertEqual(image["config"]["User"], f"{USER}:{GROUP}")
        self.assertEqual(image["config"]["Entrypoint"], ["/usr/sbin/ashlard"])
        self.assertEqual(image["config"]["Healthcheck"]["Test"][1:], ["/usr/bin/ashlarctl", "health"])
        name = self.buildah("from", "--pull-never", IMAGE).strip()
        root = pathlib.Path(self.buildah("mount", name).strip())
        try:
            for program in ("bin/sh", "bin/bash", "usr/bin/apt", "usr/bin/dpkg", "usr/bin/perl", "usr/bin/python3"):
                self.assertFalse((root / program).exists(), program)
            size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
            self.assertLess(size, MOST_BYTES)
            for path in root.rglob("*"):
                self.assertFalse(not path.is_symlink() and path.stat().st_mode & 0o6000, f"{path}: set-user-ID")
            sbom = json.loads((root / "usr/share/doc/ashlar/sbom.spdx.json").read_text())
            records = {file.name for file in (root / "var/lib/dpkg/status.d").iterdir()}
            self.assertEqual(sbom["spdxVersion"], "SPDX-2.3")
            names = {package["name"]: package for package in sbom["packages"]}
            self.assertEqual(set(names), records)
            self.assertLessEqual({"ashlar", "libc6", "libgrpc++1.51", "libssl3", "ibverbs-providers"}, set(names))
            self.assertTrue(all(package["versionInfo"] for package in names.values()))
            # Every file is some package's, or one that gather.py names.
            print(f"{size / 2**20:.0f} MiB, {len(names)} packages: {' '.join(names)}")
        finally:
            self.buildah("rm", name)

    def test_an_engine_outside_is_served(self):
        work = pathlib.Path(tempfile.mkdtemp(dir=self.folder.name))
        pathlib.Path(self.folder.name).chmod(0o711)
        work.chmod(0o711)
        (work / "ashlard.yaml").write_text(CONFIG)
        for name, mode in (("sockets", 0o750), ("disk", 0o700)):
            (work / name).mkdir(mode)
            (work / name).chmod(mode)
            os.chown(work / name, USER, GROUP)
        self.podman("run", "--detach", "--name", CONTAINER, "--read-only", "--read-only-tmpfs=false", "--cap-drop=all",
                    "--security-opt=no-new-privileges", "--network=none", "--cgroups=disabled", "--ulimit=host", "--no-healthcheck", "--log-driver=k8s-file",
                    "-v", f"{work}/ashlard.yaml:/etc/ashlar/ashlard.yaml:ro", "-v", f"{work}/sockets:/run/ashlar",
                    "-v", f"{work}/disk:/var/lib/ashlar", IMAGE)
        try:
            self.check(work / "sockets")
        finally:
            print(subprocess.run(["podman", *self.store, "logs", CONTAINER], capture_output=True, text=True, check=False).stderr)
            self.podman("rm", "--force", CONTAINER)

    def check(self, sockets):
        def healthy():
            done = subprocess.run(["podman", *self.store, "exec", CONTAINER, "ashlarctl", "health"], capture_output=True,
                                  text=True, check=False)
            return done.stdout == "serving\n"

        bare_root.wait_for(healthy, "the container's daemon answers")
        first, second = bare_root.serve_an_engine(sockets, uid=2000, gid=GROUP)
        self.assertRegex(second, r"^[1-9]\d* of \d+ tokens from the cache")
        self.assertIn("serving", self.podman("exec", CONTAINER, "ashlarctl", "status"))
        begun = time.monotonic()
        self.podman("stop", "--time", "30", CONTAINER)
        self.assertLess(time.monotonic() - begun, 25, "SIGTERM ends it, not SIGKILL")
        code = self.podman("inspect", "--format", "{{.State.ExitCode}}", CONTAINER).strip()
        self.assertEqual(code, "0")
        print(first, second, sep="\n")


if __name__ == "__main__":
    unittest.main()
