# SPDX-License-Identifier: Apache-2.0
"""A storage backend of SGLang's HiCache (interface v2), loaded by its dynamic backend:

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "ashlar",
        "module_path": "ashlar.sglang", "class_name": "AshlarStorage", "interface_v1": 1}'

docs/sglang.md has the settings, metrics and limits.
"""

from ashlar.sglang.storage import AshlarStorage

__all__ = ["AshlarStorage"]
