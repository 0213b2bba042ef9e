# SPDX-License-Identifier: Apache-2.0
"""Portable wheels built from this build, one of them installed in a virtual environment."""

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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels with and without the daemon, by their distribution's name."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [SOURCE / "tools/wheels", "--python", sys.executable, "--build", BUILD, "--output", folder]
    subprocess.run(command, check=True)
    return {path.name.split("-")[0]: path for path in folder.iterdir()}


def unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def test_both_run_on_other_distributions(wheels):
    assert sorted(wheels) == ["ashlar", "ashlar_client"]
    for wheel in wheels.values():
        assert re.search(r"-manylinux_2_\d+_x86_64\.whl$", wheel.name), wheel.name


def test_the_module_exports_nothing_else(wheels, tmp_path):
    unpack(wheels["ashlar_client"], tmp_path)
    module = next(tmp_path.glob("ashlar/_ashlar*.so"))
    symbols = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__ashlar"]


def test_the_client_lacks_the_daemon_and_its_libraries(wheels, tmp_path):
    for name, wheel in wheels.items():
        unpack(wheel, tmp_path / name)
    whole, client = (tmp_path / name for name in ("ashlar", "ashlar_client"))
    assert (whole / "ashlar/bin/ashlard").exists() and not (client / "ashlar/bin").exists()
    files = [{str(path.relative_to(root)) for path in root.glob("ashlar/**/*.py")} for root in (whole, client)]
    assert files[0] == files[1]
    bundled = [{path.name for path in root.glob("*.libs/*")} for root in (whole, client)]
    assert any("rocksdb" in name for name in bundled[0] - bundled[1])
    assert not any("rocksdb" in name for name in bundled[1])


def test_it_is_installed_and_runs_the_example_with_its_own_daemon(wheels, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # it also has the package
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheels["ashlar"]], check=True, env=clean)
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
