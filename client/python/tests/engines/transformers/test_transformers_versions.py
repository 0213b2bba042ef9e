# SPDX-License-Identifier: Apache-2.0
"""The oldest and the newest supported version of Transformers, each in a separate process, because vLLM requires a
version between them. tools/engines-environment keeps them in separate folders."""

import os
import pathlib
import subprocess
import sys

import pytest

from ashlar.transformers.model import BELOW, OLDEST

KEPT = pathlib.Path(sys.prefix) / "transformers"
HERE = pathlib.Path(__file__).parent
VERSIONS = sorted((path.name for path in KEPT.glob("[0-9]*")), key=lambda name: tuple(map(int, name.split("."))))


def test_the_tested_versions_are_the_ends_of_the_range():
    assert [version.rsplit(".", 1)[0] for version in VERSIONS] == [
        f"{OLDEST[0]}.{OLDEST[1]}",
        f"{BELOW[0]}.{BELOW[1] - 1}",
    ]


# One family per type of recurrence, one with only attention, one with windows; also how `generate` prepares its options.
CHOSEN = "qwen3_next or kimi_linear or bamba or jamba or minimax or llama or gemma3 or left_to_the_model"


@pytest.mark.parametrize("version", VERSIONS)
def test_models_are_cached_and_composed(version):
    folders = [str(KEPT / version), *filter(None, [os.environ.get("PYTHONPATH")])]
    files = [str(HERE / f"test_transformers_{name}.py") for name in ("families", "calls", "shared")]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    code = "import transformers; print(transformers.__version__)"
    used = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert used.stdout.split()[-1] == version
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
