# SPDX-License-Identifier: Apache-2.0
"""SGLang is in a separate folder beside the other engines (tools/engines-environment)."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(sys.prefix) / "sglang"))
