# SPDX-License-Identifier: Apache-2.0
"""The package as users install it: from its wheel, into a separate virtual environment on top of the engines'
environment."""

import os
import pathlib
import shlex
import subprocess
import sys
import sysconfig
import venv

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])


def install(folder):
    """Packs the wheel from the build and installs it. Returns the environment for commands that use it."""
    tools = SOURCE / "build" / "python-env" / "bin" / "python"
    subprocess.run(
        [tools, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "-C", f"build-dir={folder}/build",
         "-C", f"cmake.define.ASHLAR_BUILD_DIR={os.environ['ASHLAR_BUILD']}", SOURCE / "client/python"], check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})  # fmt: skip
    venv.create(folder / "env", with_pip=True, symlinks=True)
    packages = pathlib.Path(
        sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
    )
    (packages / "engines.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The engines' environment satisfies the extra. Otherwise pip names what is missing.
    wheel = next(folder.glob("ashlar-*.whl"))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ASHLARD", "ASHLAR_BUILD")
    }
    environment["PATH"] = f"{folder / 'env' / 'bin'}:{os.environ['PATH']}"
    environment["VIRTUAL_ENV"] = str(folder / "env")
    subprocess.run([folder / "env" / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel],
                   check=True, env=environment)  # fmt: skip
    return environment


def commands(page, program):
    """The lines of a page's `sh` blocks that run a program."""
    blocks = (SOURCE / page).read_text().split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    found = [line for line in lines if program in line]
    assert found, f"{page} no longer runs {program}"
    return found


def run(line, environment, folder, *more, timeout=600):
    """Runs a page's command in a checkout's place, in little."""
    words = [*shlex.split(line.partition("#")[0]), *more]
    words = [str(SOURCE / word) if word.startswith("examples/") else word for word in words]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def where(environment, name="ashlar"):
    """The folder that a package is imported from."""
    code = f"import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec({name!r}).origin).parent)"
    done = subprocess.run(["python3", "-c", code], env=environment, capture_output=True, text=True, check=True)
    return pathlib.Path(done.stdout.strip())


assert sys.version_info[:2] == (3, 11)
