#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The container's image, built from this build's package on a minimal Debian, without a registry, and run: as its own
user, on a read-only root, without a network and without capabilities, with an engine outside.

usage: image_test.py BUILD    (environment: ASHLAR_IMAGE=1, ASHLAR_SOURCE, PYTHONPATH with the package ashlar)
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import bare_root
from bare_root import run

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
SOURCE = bare_root.SOURCE
BASE, IMAGE, CONTAINER = "localhost/ashlar-test-base", "localhost/ashlar-test", f"ashlar-test-{os.getpid()}"
USER, GROUP = 10001, 10002
MOST_BYTES = 300 << 20
RECORDS = "var/lib/dpkg/status.d"
GATHERED = {"etc/passwd", "etc/group", "etc/ld.so.conf", "etc/ld.so.cache", "usr/share/doc/ashlar/sbom.spdx.json"}
# vfs and chroot need no overlay, no cgroups, and no separate network. The container is run by crun, which podman and
# CRI-O also use. podman itself raises limits, which takes more rights than some machines give.
STORAGE = ["--storage-driver", "vfs"]
CONFIG = """
listen: {rpc_socket: /run/ashlar/rpc.sock, session_socket: /run/ashlar/session.sock, admin_socket: /run/ashlar/admin.sock}
dram: {capacity_bytes: 256MiB, arena_bytes: 8MiB}
ssd: {folder: /var/lib/ashlar, capacity_bytes: 256MiB}
tenants: [{name: default, uids: [2000], dram_bytes: 256MiB, ssd_bytes: 256MiB}]
sandbox: on
"""


def why_not():
    modules = [module for module in ("numpy", "ashlar") if importlib.util.find_spec(module) is None]
    if modules:  # for the engine outside, which is tried last
        return f"{' and '.join(modules)}: not found; run this by build/python-env/bin/python, with PYTHONPATH as above"
    missing = [program for program in ("buildah", "crun") if shutil.which(program) is None]
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
        name = cls.buildah("from", "scratch").strip()
        cls.buildah("add", name, bare_root.packed(), "/")
        cls.buildah("commit", "--rm", name, BASE)
        cls.package = bare_root.pack(BUILD, f"{cls.folder.name}/packed")
        cls.build(IMAGE)
        print(f"built in {time.monotonic() - begun:.0f} s")

    @classmethod
    def build(cls, image):
        context = pathlib.Path(tempfile.mkdtemp(dir=cls.folder.name))
        (context / "deploy").mkdir(parents=True)
        shutil.copytree(SOURCE / "deploy/container", context / "deploy/container")
        (context / "package").mkdir()
        shutil.copy(cls.package, context / "package")
        cls.buildah(
            "bud",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--format",
            "docker",
            "--build-arg",
            f"BASE={BASE}",
            "--build-arg",
            "PACKAGE=given",
            "--timestamp",
            "0",
            "-f",
            context / "deploy/container/Containerfile",
            "-t",
            image,
            context,
        )

    @classmethod
    def buildah(cls, *arguments):
        return run("buildah", *cls.store, *arguments)

    def inspect(self, image):
        return json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]

    def test_the_image_has_the_daemons_dependencies_and_lists_them(self):
        image = self.inspect(IMAGE)
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
            records = {file.name for file in (root / RECORDS).iterdir() if file.suffix != ".md5sums"}
            self.assertEqual(sbom["spdxVersion"], "SPDX-2.3")
            names = {package["name"]: package for package in sbom["packages"]}
            self.assertEqual(set(names), records)
            self.assertLessEqual({"ashlar", "libc6", "libgrpc++1.51", "libssl3", "ibverbs-providers"}, set(names))
            self.assertTrue(all(package["versionInfo"] for package in names.values()))
            self.check_owners(root, records)
            print(f"{size / 2**20:.0f} MiB, {len(names)} packages: {' '.join(names)}")
        finally:
            self.buildah("rm", name)

    def check_owners(self, root, packages):
        """Every file is as in a package, or is one that gather.py writes. Links lead to such files."""

        def place(name):
            return str(pathlib.Path(os.path.realpath(root / name)).relative_to(root))

        sums, settings = {}, set()
        for package in packages:
            for line in (root / RECORDS / f"{package}.md5sums").read_text().splitlines():
                digest, name = line.split(maxsplit=1)
                sums[place(name)] = digest
            settings.update(
                place(name)
                for name in re.findall(r"^ /(\S+) [0-9a-f]{32}$", (root / RECORDS / package).read_text(), re.M)
            )
        self.assertGreater(len(sums), len(packages))
        for path in root.rglob("*"):
            name = str(path.relative_to(root))
            if path.is_symlink():
                target = pathlib.Path(os.readlink(path))
                lexical = os.path.normpath(
                    root / str(target).lstrip("/") if target.is_absolute() else path.parent / target
                )
                self.assertTrue(os.path.lexists(lexical), f"{name}: leads to {target}, which is not there")
            elif path.is_file() and name in sums:
                self.assertEqual(hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest(), sums[name], name)
            elif path.is_file() and name not in settings:
                self.assertTrue(name in GATHERED or name.startswith(f"{RECORDS}/"), f"{name}: no package has it")

    def test_the_same_package_makes_the_same_image(self):
        # package_test.py makes the same package of the same build.
        self.build(f"{IMAGE}-again")
        images = (IMAGE, f"{IMAGE}-again")
        first, second = (self.listing(image) for image in images)
        self.assertEqual(sorted(first ^ second), [])
        first, second = (self.inspect(image) for image in images)
        self.assertEqual(first["rootfs"], second["rootfs"], "the layers' digests")
        # In Docker's format, Debian 12's buildah writes the build's container and host into the configuration.
        first, second = (self.digest(image) for image in images)
        self.assertEqual(first, second)
        print(f"image {first}")

    def digest(self, image):
        """In OCI's format, as in a registry."""
        folder = tempfile.mkdtemp(dir=self.folder.name)
        self.buildah("push", "--format", "oci", image, f"oci:{folder}:image")
        return json.loads(pathlib.Path(folder, "index.json").read_text())["manifests"][0]["digest"]

    def listing(self, image):
        """(name, type and mode, owner, group, time, digest) of everything in the image."""
        name = self.buildah("from", "--pull-never", image).strip()
        root = pathlib.Path(self.buildah("mount", name).strip())
        try:
            found = set()
            for path in root.rglob("*"):
                at = path.lstat()
                content = (
                    os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
                )
                found.add(
                    (
                        str(path.relative_to(root)),
                        oct(at.st_mode),
                        at.st_uid,
                        at.st_gid,
                        at.st_mtime_ns,
                        hashlib.sha256(content).hexdigest(),
                    )
                )
            return found
        finally:
            self.buildah("rm", name)

    def test_an_engine_outside_is_served(self):
        work = pathlib.Path(tempfile.mkdtemp(dir=self.folder.name))
        for folder in (pathlib.Path(self.folder.name), work):
            folder.chmod(0o711)  # the engine's user reaches the sockets through it
        (work / "ashlard.yaml").write_text(CONFIG)
        for name, mode in (("sockets", 0o750), ("disk", 0o700)):
            (work / name).mkdir(mode)
            (work / name).chmod(mode)
            os.chown(work / name, USER, GROUP)
        name = self.buildah("from", "--pull-never", IMAGE).strip()
        try:
            config = self.inspect(IMAGE)["config"]
            self.write_bundle(work, config, self.buildah("mount", name).strip())
            self.run_bundle(work)
        finally:
            self.buildah("rm", name)

    def write_bundle(self, work, image, root):
        """Returns a runtime's settings from the image's configuration, and from the manifests' security context."""
        run("crun", "spec", cwd=work)
        bundle = json.loads((work / "config.json").read_text())
        bundle["root"] = {"path": root, "readonly": True}
        uid, gid = map(int, image["User"].split(":"))
        bundle["process"].update(
            terminal=False,
            user={"uid": uid, "gid": gid},
            args=image["Entrypoint"] + image["Cmd"],
            env=image["Env"],
            capabilities={kind: [] for kind in bundle["process"]["capabilities"]},
            noNewPrivileges=True,
            rlimits=[],
        )
        bundle["mounts"] = [mount for mount in bundle["mounts"] if not mount["destination"].startswith("/sys")]
        bundle["mounts"] += [
            {"destination": inside, "source": str(work / outside), "type": "bind", "options": ["rbind", rights]}
            for outside, inside, rights in (
                ("ashlard.yaml", "/etc/ashlar/ashlard.yaml", "ro"),
                ("sockets", "/run/ashlar", "rw"),
                ("disk", "/var/lib/ashlar", "rw"),
            )
        ]
        bundle["linux"].pop("resources", None)
        bundle["linux"]["seccomp"] = json.loads((SOURCE / "deploy/nodes/seccomp/ashlard.json").read_text())
        (work / "config.json").write_text(json.dumps(bundle))

    def crun(self, work, *arguments):
        """crun refuses a machine that mounts both versions of cgroups, so it is shown only the second one. Neither is
        used."""
        command = ["crun", "--root", f"{work}/state", "--cgroup-manager=disabled", *arguments]
        if pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return command
        return [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'umount -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec "$@"',
            "sh",
            *command,
        ]

    def run_bundle(self, work):
        with open(work / "log", "wb") as log:
            container = subprocess.Popen(self.crun(work, "run", "-b", work, CONTAINER), stdout=log, stderr=log)

        def inside(*command):
            """Runs as the container's user, in its namespaces. crun itself would first put the process into cgroups."""
            state = subprocess.run(
                self.crun(work, "state", CONTAINER), capture_output=True, text=True, check=False
            ).stdout
            if not state:
                return ""
            pid = json.loads(state)["pid"]
            return subprocess.run(
                [
                    "nsenter",
                    f"--target={pid}",
                    "--mount",
                    "--net",
                    "--pid",
                    "--ipc",
                    "--uts",
                    f"--setuid={USER}",
                    f"--setgid={GROUP}",
                    *command,
                ],
                capture_output=True,
                text=True,
                check=False,
            ).stdout

        try:
            bare_root.wait_for(
                lambda: inside("/usr/bin/ashlarctl", "health") == "serving\n", "the daemon answers", container
            )
            first, second = bare_root.serve_an_engine(work / "sockets", uid=2000, gid=GROUP)
            self.assertRegex(second, r"^[1-9]\d* of \d+ tokens from the cache")
            self.assertIn("serving", inside("/usr/bin/ashlarctl", "status"))
            self.assertNotIn("userfaultfd is not permitted", (work / "log").read_text())
            self.assertIn("sandbox active", (work / "log").read_text())
            run(*self.crun(work, "kill", CONTAINER, "TERM"))
            self.assertEqual(container.wait(60), 0, "SIGTERM drains and ends it")
            print(first, second, sep="\n")
        except AssertionError as error:
            self.fail(f"{error}\n{(work / 'log').read_text()}")
        finally:
            subprocess.run(self.crun(work, "delete", "--force", CONTAINER), capture_output=True, check=False)
            container.wait(30)


if __name__ == "__main__":
    unittest.main()
