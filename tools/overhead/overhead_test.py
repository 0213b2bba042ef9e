# SPDX-License-Identifier: Apache-2.0
"""overhead.py measures all operations in all languages, with few calls. Figures of a busy machine are not judged."""

import json
import pathlib
import subprocess
import sys
import tempfile

for clock in ("wall", "thread"):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "overhead.json"
        tool = pathlib.Path(__file__).parent / "overhead.py"
        subprocess.run(
            [
                sys.executable,
                tool,
                "--bin",
                sys.argv[1],
                "--starts",
                "2",
                "--rounds",
                "2",
                "--calls",
                "3",
                "--mebibytes",
                "1",
                "2",
                "--clock",
                clock,
                "--json",
                out,
            ],
            check=True,
            timeout=100,
        )
        results = json.loads(out.read_text())
    rows = results["rows"]
    assert results["clock"] == clock
    assert [(one["operation"], one["mebibytes"]) for one in rows] == [
        (operation, size) for operation in ("look up", "land", "publish") for size in (1, 2)
    ]
    for one in rows:
        for field in ("cpp_us", "c_us", "python_us", "c_ratio", "python_ratio"):
            assert one[field] > 0, (field, one)
