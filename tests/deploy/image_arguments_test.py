#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The image's build arguments: each is documented, and unusable ones are refused by name before anything is downloaded
or compiled.

usage: image_arguments_test.py SOURCE_ROOT
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
CONTAINER = ROOT / "deploy/container"
SUM = "a" * 64


class Arguments(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.base = pathlib.Path(self.folder.name, "base")
        (self.base / "etc").mkdir(parents=True)
        self.is_a("debian", "12")
        self.programs = pathlib.Path(self.folder.name, "bin")  # no nvcc, on whatever machine this runs
        self.programs.mkdir()
        for name in ("sed", "tr", "wc", "printf"):
            found = subprocess.run(
                ["sh", "-c", f"command -v {name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            if found.startswith("/"):
                (self.programs / name).symlink_to(found)

    def is_a(self, name, version):
        (self.base / "etc/os-release").write_text(f'PRETTY_NAME="A base"\nID={name}\nVERSION_ID="{version}"\n')

    def check(self, package="built", **arguments):
        """Returns the error message for the arguments, or an empty string."""
        done = subprocess.run(
            ["/bin/sh", CONTAINER / "check_arguments.sh", package, self.base],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": str(self.programs), **arguments},
        )
        self.assertEqual(done.returncode == 0, done.stderr == "", done.stderr)
        return done.stderr

    def build_ucx(self, url, checksum):
        done = subprocess.run(
            ["/bin/sh", CONTAINER / "build_ucx.sh", url, checksum, f"{self.folder.name}/ucx"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": self.folder.name},
        )
        self.assertEqual(done.returncode, 1)
        return done.stderr

    def test_arguments_are_optional(self):
        self.assertEqual(self.check(), "")
        self.assertEqual(self.check("given"), "")
        self.assertEqual(self.check(UCX_URL="", UCX_SHA256="", CMAKE_OPTIONS=""), "")
        self.assertEqual(self.check(CMAKE_OPTIONS="-DASHLAR_CUDA=OFF"), "")

    def test_the_base_is_debian_12(self):
        self.is_a("ubuntu", "22.04")
        self.assertIn("build argument BUILD_BASE: it is ubuntu 22.04", self.check())
        self.is_a("debian", "13")
        self.assertIn("BUILD_BASE: it is debian 13", self.check())
        (self.base / "etc/os-release").unlink()
        self.assertIn("BUILD_BASE: it is no Debian", self.check())

    def test_cuda_needs_its_compiler(self):
        wanted = {"CMAKE_OPTIONS": "-DASHLAR_TESTS=OFF -DASHLAR_CUDA=ON"}
        self.assertIn(
            "build argument CMAKE_OPTIONS: ASHLAR_CUDA=ON needs nvcc, and BUILD_BASE has none", self.check(**wanted)
        )
        self.assertEqual(self.check(CMAKE_OPTIONS="-DASHLAR_CUDA=ON -DCMAKE_CUDA_COMPILER=/opt/cuda/nvcc"), "")
        compiler = self.base / "usr/local/cuda/bin/nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.touch(0o755)
        self.assertEqual(self.check(**wanted), "")
        compiler.unlink()
        (self.programs / "nvcc").touch(0o755)
        self.assertEqual(self.check(**wanted), "")

    def test_ucx_is_an_archive_with_its_checksum(self):
        url = "https://example.org/ucx-1.18.0.tar.gz"
        self.assertEqual(self.check(UCX_URL=url, UCX_SHA256=SUM), "")
        self.assertIn("build argument UCX_SHA256", self.check(UCX_URL=url))
        self.assertIn("build argument UCX_SHA256", self.check(UCX_URL=url, UCX_SHA256=SUM[:63]))
        self.assertIn("build argument UCX_SHA256", self.check(UCX_URL=url, UCX_SHA256=SUM[:63] + "G"))
        self.assertIn("build argument UCX_URL: required", self.check(UCX_SHA256=SUM))
        self.assertIn("build argument UCX_URL", self.check(UCX_URL="https://example.org/ucx.zip", UCX_SHA256=SUM))

    def test_a_given_package_excludes_build_arguments(self):
        self.assertIn(
            "build argument UCX_URL", self.check("given", UCX_URL="https://example.org/ucx.tar.gz", UCX_SHA256=SUM)
        )
        self.assertIn("build argument CMAKE_OPTIONS", self.check("given", CMAKE_OPTIONS="-DASHLAR_CUDA=ON"))

    @unittest.skipUnless(pathlib.Path("/usr/bin/curl").exists(), "curl is not installed")
    def test_an_invalid_ucx_release_is_refused_first(self):
        archive = pathlib.Path(self.folder.name, "ucx.tar.gz")
        url = archive.as_uri()
        self.assertIn(f"build argument UCX_URL: {url} cannot be downloaded", self.build_ucx(url, SUM))
        archive.write_bytes(b"no archive")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        self.assertIn(f"build argument UCX_SHA256: the download has {found}", self.build_ucx(url, SUM))
        self.assertIn("is no .tar.gz", self.build_ucx(url, found))
        with tarfile.open(archive, "w:gz") as file:
            file.add(self.base, "something-else")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        self.assertIn("is no release of UCX", self.build_ucx(url, found))

    def test_every_argument_is_documented(self):
        declared = set(re.findall(r"^ARG (\w+)=", (CONTAINER / "Containerfile").read_text(), re.M))
        rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (CONTAINER / "README.md").read_text(), re.M)
        self.assertEqual(declared, {name for row in rows for name in re.findall(r"\w+", row)})

    def test_the_command_for_buildah_names_the_package(self):
        """Debian 12's buildah omits a stage that only an argument's default names."""
        commands = re.findall(r"^buildah bud .*$", (CONTAINER / "README.md").read_text(), re.M)
        self.assertTrue(commands)
        for command in commands:
            self.assertIn("--build-arg PACKAGE=", command)


if __name__ == "__main__":
    unittest.main()
