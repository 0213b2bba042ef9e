# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

import pytest

import ashlar.daemon

sys.path.insert(0, str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))


@pytest.fixture
def daemon(tmp_path):
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path)) as running:
        yield running
