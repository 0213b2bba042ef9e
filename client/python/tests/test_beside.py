# SPDX-License-Identifier: Apache-2.0
"""The module and libashlar.so in one process: their Protobuf messages have different names."""

import os
import pathlib
import subprocess
import sys

import pytest

LIBRARY = pathlib.Path(os.environ["ASHLAR_BUILD"]) / "lib" / "libashlar.so"

PROGRAM = """
import ctypes, os, sys
def load_c():
    library = ctypes.CDLL({library!r})
    library.ashlar_version.restype = ctypes.c_char_p
    assert library.ashlar_version()
    return library
def load_python():
    sys.path.insert(0, {examples!r})
    import shortest
    text, _ = shortest.Engine({rpc!r}, {session!r}).serve(["Answer from these pages.", "An arch."], "?", 4)
    assert len(text) == 4
{order}
"""


@pytest.mark.skipif(not LIBRARY.exists(), reason="libashlar.so was not built")
@pytest.mark.parametrize(
    "order", ["load_c(); load_python()", "load_python(); load_c()", "load_python(); load_c(); load_python()"]
)
def test_both_work_in_one_process(daemon, order):
    examples = str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python")
    code = PROGRAM.format(
        library=str(LIBRARY), examples=examples, rpc=daemon.rpc_socket, session=daemon.session_socket, order=order
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
