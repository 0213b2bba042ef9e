# SPDX-License-Identifier: Apache-2.0
"""A minimal Debian, created once by debootstrap, to install into; and helpers for an engine outside that uses a daemon
inside."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
SECURITY = f"deb {MIRROR}-security {SUITE}-security main\n"
PATIENCE = 60.0
SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])
KEPT = pathlib.Path(os.environ.get("ASHLAR_BARE_ROOT_FOLDER", SOURCE / "build/deploy"))


def run(*command, **options):
    """Returns the command's output. Shows all of it if the command fails."""
    options = {"capture_output": True, "text": True, **options}
    done = subprocess.run([str(word) for word in command], check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def pack(build, folder):
    """The Debian package of a build, created in `folder`."""
    epoch = run("git", "-C", SOURCE, "log", "-1", "--format=%ct").strip() if (SOURCE / ".git").exists() else "1"
    run("cpack", "-G", "DEB", "-B", folder, cwd=build, env={**os.environ, "SOURCE_DATE_EPOCH": epoch})
    packages = list(pathlib.Path(folder).glob("*.deb"))
    assert len(packages) == 1, packages
    return packages[0]


def why_not():
    """The reason why no bare root can be created here; empty if it can."""
    if os.geteuid() != 0:
        return "debootstrap and chroot take root"
    return "" if shutil.which("debootstrap") else "debootstrap is not installed (Debian: debootstrap)"


def packed():
    """Returns the minimal system as a tar file below KEPT, and creates it on first use."""
    archive = KEPT / f"{SUITE}.tar"
    if not archive.exists():
        root = KEPT / SUITE
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        run("debootstrap", "--variant=minbase", SUITE, root, MIRROR)
        (root / "etc/apt/sources.list").write_text(
            f"deb {MIRROR} {SUITE} main\ndeb {MIRROR} {SUITE}-updates main\n{SECURITY}"
        )
        shutil.rmtree(root / "var/cache/apt/archives")
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        run("tar", "-C", root, "-cf", f"{archive}.part", ".")
        os.rename(f"{archive}.part", archive)
        shutil.rmtree(root)
    return archive


class Root:
    """A separate minimal system in `folder`, with the host's network. Packages are downloaded once, into KEPT."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        run("tar", "-C", self.folder, "-xpf", packed())
        shutil.copy("/etc/resolv.conf", self.folder / "etc/resolv.conf")
        # Packages start no services, because there is no service manager.
        policy = self.folder / "usr/sbin/policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        self._mounted = []
        archives = KEPT / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        try:
            self.mount("--bind", archives, "var/cache/apt/archives")
            self.mount("-t", "proc", "proc", "proc")
            for device in ("null", "zero", "urandom"):
                self.mount("--bind", f"/dev/{device}", f"dev/{device}")
        except BaseException:
            self.unmount()
            raise

    def mount(self, *arguments):
        *options, target = arguments
        place = self.folder / target
        if not place.exists():
            place.touch()
        run("mount", *options, place)
        self._mounted.append(place)

    def unmount(self):
        for place in reversed(self._mounted):
            subprocess.run(["umount", "-l", place], check=False)
        self._mounted = []

    def run(self, *command, **options):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        return run("chroot", self.folder, *command, env=environment, **options)

    def install(self, package):
        """Installs a Debian package from outside, with its dependencies."""
        shutil.copy(package, self.folder / "root")
        self.run("apt-get", "update")
        self.run("apt-get", "install", "-y", "--no-install-recommends", f"/root/{pathlib.Path(package).name}")

    def program(self, command, user, folder):
        """Writes a script to `folder` that runs a program of the root as one of the root's users. That user sees
        `folder` at the same path and owns it."""
        uid, gid = (int(self.run("id", option, user)) for option in ("-u", "-g"))
        place = self.folder / pathlib.Path(folder).relative_to("/")
        place.mkdir(parents=True)
        self.mount("--rbind", folder, place)
        self.mount("-t", "sysfs", "sysfs", "sys")  # where UCX looks for networks
        run("chown", "-R", f"{uid}:{gid}", folder)
        script = pathlib.Path(folder, pathlib.Path(command).name)
        script.write_text(f'#!/bin/sh\nexec chroot --userspec={uid}:{gid} {self.folder} {command} "$@"\n')
        script.chmod(0o755)
        return str(script)

    def files(self):
        """Returns all files except the ones that apt, dpkg and related tools maintain."""
        own = ("./var/lib/apt", "./var/lib/dpkg", "./var/cache", "./var/log", "./proc", "./dev", "./tmp")
        found = run("find", ".", "-xdev", cwd=self.folder).splitlines()
        return {name for name in found if not name.startswith(own)}


def wait_for(probe, what, process=None):
    """Waits until `probe` is true. `process` must live meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError):
            if probe():
                return
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: the process ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {PATIENCE} s")
        time.sleep(0.1)


# Another process, of the user that the daemon lists as a tenant.
ENGINE = """
import os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import shortest  # with all that it needs: the other user may not reach it
os.setgroups([int(sys.argv[4])])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[3]))
shortest.main(sys.argv[1], sys.argv[2])
"""


def serve_an_engine(sockets, uid, gid):
    """Runs an engine of this build, outside the root, against the daemon at `sockets`. Returns its output lines."""
    environment = {**os.environ, "EXAMPLES": str(SOURCE / "examples/python"), "PYTHONDONTWRITEBYTECODE": "1"}
    return run(
        sys.executable, "-c", ENGINE, f"{sockets}/rpc.sock", f"{sockets}/session.sock", uid, gid, env=environment
    ).splitlines()
