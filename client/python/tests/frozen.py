# SPDX-License-Identifier: Apache-2.0
"""Freezes a daemon, for tests of callers that wait for it."""

import os
import pathlib
import signal
import time


def freeze(daemon):
    """Its threads still answer until the kernel has stopped them all. SIGCONT continues it."""
    os.kill(daemon.pid, signal.SIGSTOP)
    stat, deadline = pathlib.Path(f"/proc/{daemon.pid}/stat"), time.monotonic() + 10
    while (state := stat.read_text().rpartition(")")[2].split()[0]) != "T":
        assert time.monotonic() < deadline, f"the daemon is in state {state}"
        time.sleep(0.001)
