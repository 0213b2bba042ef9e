# SPDX-License-Identifier: Apache-2.0
"""Installs the client into a folder, builds engine/main.cc against it with CMake and with pkg-config, and runs it.

usage: install_test.py BUILD CXX
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BUILD, CXX = pathlib.Path(sys.argv[1]), sys.argv[2]
ENGINE = pathlib.Path(__file__).resolve().parent / "engine"


def run(*command, **options):
    """Runs a command and returns its output. Shows all of it if the command fails."""
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        cls.prefix = cls.root / "prefix"
        run("cmake", "--install", BUILD, "--prefix", cls.prefix, "--component", "client")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def check(self, engine):
        """No daemon listens there, and the engine reports that."""
        said = run(engine, self.root / "rpc.sock", self.root / "session.sock")
        self.assertEqual(said, "no daemon\n")

    def test_by_cmake(self):
        run(
            "cmake",
            "-S",
            ENGINE,
            "-B",
            self.root / "build",
            "-G",
            "Ninja",
            f"-DCMAKE_PREFIX_PATH={self.prefix}",
            f"-DCMAKE_CXX_COMPILER={CXX}",
        )
        run("cmake", "--build", self.root / "build")
        self.check(self.root / "build" / "engine")

    def test_by_pkg_config(self):
        folder = next(self.prefix.rglob("ashlar.pc")).parent
        flags = run(
            "pkg-config",
            f"--define-variable=prefix={self.prefix}",
            "--cflags",
            "--libs",
            "ashlar",
            env={**os.environ, "PKG_CONFIG_PATH": str(folder)},
        ).split()
        engine = self.root / "by_pkg_config"
        run(CXX, "-std=c++20", "-o", engine, ENGINE / "main.cc", *flags)
        self.check(engine)

    def test_c_by_pkg_config(self):
        folder = next(self.prefix.rglob("ashlar-c.pc")).parent
        flags = run(
            "pkg-config",
            f"--define-variable=prefix={self.prefix}",
            "--cflags",
            "--libs",
            "ashlar-c",
            env={**os.environ, "PKG_CONFIG_PATH": str(folder)},
        ).split()
        engine = self.root / "in_c"
        example = ENGINE.parents[2] / "examples" / "c" / "shortest.c"
        run("cc", "-std=c99", "-o", engine, example, *flags, "-lm")
        library = next(self.prefix.rglob("libashlar.so")).parent
        done = subprocess.run(
            [engine, "/nowhere/rpc", "/nowhere/session"],
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("shortest: no daemon at /nowhere/session", done.stderr)

    def test_only_the_public_headers_are_installed(self):
        include = next(self.prefix.rglob("ashlar.h")).parent
        headers = sorted(str(path.relative_to(include)) for path in include.rglob("*") if path.is_file())
        self.assertEqual(
            headers,
            [
                "ashlar.h",
                "ashlar/ashlar/engine.h",
                "ashlar/ashlar/engine_types.h",
                "ashlar/ashlar/router.h",
                "ashlar/tensor/types.h",
                "ashlar_types.h",
            ],
        )

    def test_no_path_of_the_source_tree_is_installed(self):
        source = str(ENGINE.parents[2]).encode()
        for path in self.prefix.rglob("*"):
            if path.suffix in {".cmake", ".pc", ".h"}:
                self.assertNotIn(source, path.read_bytes(), path)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
