# SPDX-License-Identifier: Apache-2.0
"""The wheel, built from what this build has made, in an environment of its own."""

import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import numpy
import pytest

SOURCE, BUILD = pathlib.Path(os.environ["ASHLAR_SOURCE"]), os.environ["ASHLAR_BUILD"]
EVERYWHERE = re.compile(r"(ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so.*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            "-C",
            f"build-dir={folder}/build",
            "-C",
            f"cmake.define.ASHLAR_BUILD_DIR={BUILD}",
            SOURCE / "client/python",
        ],
        check=True,
    )
    return next(folder.glob("ashlar-*.whl"))


def test_it_carries_all_libraries_that_not_every_linux_has(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    carried = {path.name for path in (tmp_path / "ashlar" / "libs").iterdir()}
    binaries = [
        *tmp_path.glob("ashlar/_ashlar*.so"),
        tmp_path / "ashlar/bin/ashlard",
        *(tmp_path / "ashlar/libs").iterdir(),
    ]
    assert len(binaries) > 10
    for binary in binaries:
        dynamic = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
        for name in re.findall(r"NEEDED.*\[(.*)\]", dynamic):
            assert name in carried or EVERYWHERE.fullmatch(name), f"{binary.name} needs {name}"
    module = next(tmp_path.glob("ashlar/_ashlar*.so"))
    symbols = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__ashlar"]


def test_it_is_installed_and_runs_the_example_with_its_own_daemon(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # it has the package, too
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, env=clean)
    numpy_at = str(pathlib.Path(numpy.__file__).parents[1])
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ASHLARD")}
    environment["PYTHONPATH"] = str(tmp_path / "numpy")
    (tmp_path / "numpy").mkdir()
    for package in ("numpy", "numpy.libs"):
        if (pathlib.Path(numpy_at) / package).exists():
            (tmp_path / "numpy" / package).symlink_to(pathlib.Path(numpy_at) / package)
    done = subprocess.run(
        [python, SOURCE / "examples/python/shortest.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d+ of \d+ tokens from the cache: [a-z]{12}", done.stdout)) == 2
