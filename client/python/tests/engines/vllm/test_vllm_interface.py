# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has the interface that the connector was written for."""

import ast
import concurrent.futures
import multiprocessing
import pathlib

import interface
import pytest

import ashlar.vllm
from ashlar.vllm.versions import BELOW, OLDEST

DESCRIBED = [*interface.WHOLE, *interface.PARTS, *interface.FUNCTIONS, *interface.OBJECTS]


def test_the_interface_of_the_installed_version_is_the_recorded_one():
    name = interface.version()
    if not (interface.FOLDER / f"{name}.json").exists():
        pytest.fail(f"vLLM {name} has no description; run {interface.__file__} to write it and judge the differences")
    # In a child, because vLLM loads llvmlite with one of the modules, and then no engine could start in this process.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        described = pool.submit(interface.describe).result(timeout=300)
    changed = interface.differences(interface.recorded(name), described)
    assert not changed, f"the interface of vLLM {name} has changed:\n" + "\n".join(changed)


def test_every_accepted_version_is_described():
    accepted = {f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], BELOW[1])}
    assert {path.stem for path in interface.FOLDER.glob("*.json")} == accepted
    for version in accepted:
        assert not [name for name, found in interface.recorded(version).items() if found == "absent"]


def test_everything_that_the_connector_imports_is_described():
    found = set()
    for path in pathlib.Path(ashlar.vllm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    assert found and not found - set(DESCRIBED)


def test_differences_name_the_member_and_both_forms():
    before = {"m:C.a": "(self)", "m:C.b": "field: int", "m:C.c": "property"}
    now = {"m:C.a": "(self, more=None)", "m:C.c": "property", "m:C.d": "attribute"}
    assert interface.differences(before, now) == [
        "m:C.a: now (self, more=None); was (self)",
        "m:C.b: removed; was field: int",
        "m:C.d: new: attribute",
    ]
    assert interface.differences(now, now) == []
