# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/transformers.md, from the installed wheel."""

import re

import installed


def test_the_pages_example_runs_from_the_wheel(tmp_path):
    environment = installed.install(tmp_path)
    assert installed.where(environment).is_relative_to(tmp_path), "not the build's own package"
    (line,) = installed.commands("docs/transformers.md", "transformers_segments.py")
    small = ["--segments", "3", "--tokens", "96", "--layers", "4", "--hidden", "128", "--runs", "1"]
    printed = installed.run(line, environment, tmp_path, *small)
    assert re.search(r"published +3", printed) and re.search(r"faults +0", printed)


def test_the_extra_names_versions_that_the_package_accepts():
    import tomllib

    from ashlar.transformers.model import BELOW, OLDEST

    project = tomllib.loads((installed.SOURCE / "client/python/pyproject.toml").read_text())["project"]
    (wanted,) = [each for each in project["optional-dependencies"]["transformers"] if each.startswith("transformers")]
    assert wanted == f"transformers>={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"
