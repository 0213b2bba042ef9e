# SPDX-License-Identifier: Apache-2.0
"""Engines are forked children of the pytest process, which has imported vLLM. So a start takes seconds instead of half
a minute."""

import os
import pathlib
import sys

import pytest

import ashlar.daemon

sys.path.insert(0, str(pathlib.Path(__file__).parent))

pytest.importorskip("vllm", reason="vLLM is not installed")
engines = pytest.importorskip("tiny_engines")
engines.import_once()
segments = pytest.importorskip("segmented_engines")


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
    """Answers of engines without a cache, by model. Each prompt is computed once."""
    children, answers = {}, {}

    def answer(model, prompts, tokens=6):
        keys = [(model, tokens, tuple(prompt)) for prompt in prompts]
        missing = {key: prompt for key, prompt in zip(keys, prompts) if key not in answers}
        if missing:
            if model not in children:
                children[model] = engines.Child(model, enable_prefix_caching=True)
            for key, prompt in missing.items():  # one by one: a batch of another shape may round differently
                children[model].call("erase")
                answers[key] = children[model].generate([prompt], tokens)[0][:2]
        return [answers[key] for key in keys]

    yield answer
    for child in children.values():
        child.close()


@pytest.fixture(scope="session")
def engine(shared_daemon):
    """One engine with the cache per model, for tests that do not end it."""
    children = {}

    def get(model):
        if model not in children:
            children[model] = engines.Child(model, engines.connector(shared_daemon))
        return children[model]

    yield get
    for child in children.values():
        child.close()


@pytest.fixture(scope="module")
def segmented(shared_daemon):
    children = {}

    def get(model):
        if model not in children:
            options = engines.connector(shared_daemon, segments=True, **segments.PATIENT)
            children[model] = segments.Segmented(model, options, max_logprobs=512)
        return children[model]

    yield get
    for child in children.values():
        child.close()
