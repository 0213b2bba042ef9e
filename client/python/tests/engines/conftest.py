# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that drive real engines. `tools/test --engines` runs them; tools/test alone does not."""

import os

import pytest

import ashlar.daemon

# Tests fetch nothing from a model hub and report nothing.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1")


@pytest.fixture
def daemon(tmp_path):
    with ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path)) as running:
        yield running
