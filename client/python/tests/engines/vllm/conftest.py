# SPDX-License-Identifier: Apache-2.0
"""Engines are forked children of the pytest process, which has imported vLLM. So a start takes seconds instead of half
a minute."""

import os
import pathlib
import sys

import pytest

import ashlar.daemon

sys.path.insert(0, str(pathlib.Path(__file__).parent))

os.environ["TRITON_INTERPRET"] = "1"  # for model_runner_v2; Triton reads it when it is imported
pytest.importorskip("vllm", reason="vLLM is not installed")
engines = pytest.importorskip("tiny_engines")
engines.import_once()
fixtures = pytest.importorskip("engine_fixtures")


@pytest.fixture(autouse=True)
def environment():
    """Importing the examples' programs sets environment variables, which later engines would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory):
    """For tests that do not harm the daemon."""
    folder = tmp_path_factory.mktemp("daemon")
    with ashlar.daemon.start(dram="512MiB", arena="8MiB", folder=str(folder)) as running:
        yield running


@pytest.fixture(scope="session")
def expected():
    yield from fixtures.answers()


@pytest.fixture(scope="session")
def engine(shared_daemon):
    yield from fixtures.cached(shared_daemon)


@pytest.fixture(scope="module")
def segmented(shared_daemon):
    yield from fixtures.segmented(shared_daemon)
