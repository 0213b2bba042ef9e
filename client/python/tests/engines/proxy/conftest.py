# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples" / "python"))
