#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules that keep the folders separate (docs/architecture.md, the parts). Prints every violation.

usage: check_layering.py [ROOT]
"""

import pathlib
import re
import sys

# The folders that each folder may include besides itself. tests/ is not listed: it crosses folders on purpose.
MAY_INCLUDE = {
    "tensor": set(),
    "kernels": {"tensor"},
    "proto": {"tensor"},
    "storage": {"kernels", "proto", "tensor"},
    "client": {"kernels", "proto", "tensor"},
    "daemon": {"storage", "kernels", "proto", "tensor"},
    "examples": {"client", "kernels", "proto", "tensor"},
    "tools": {"examples", "client", "storage", "kernels", "proto", "tensor"},
}
FOLDERS = {*MAY_INCLUDE, "tests"}
# The sub-folders that each sub-folder may include besides itself and loose files in its parent. A loose file may
# include any of them. There must be no cycle, with loose files counted one by one. Tests and testing/ are free.
SUB_FOLDERS = {
    "kernels": {
        "reference": set(),
        "host": {"host/attention", "host/decoding", "host/linear", "host/rows"},
        "host/simd": set(),
        "host/rows": {"host/simd"},
        "host/attention": {"host/rows", "host/simd"},
        "host/linear": {"host/simd"},
        "host/decoding": {"host/linear", "host/rows", "host/simd"},
        "cuda": set(),
        "cuda/check": {"cuda"},
        "cuda/gpu": set(),
        "cuda/emulator": {"cuda"},
    },
    "storage": {
        "memory": set(),
        "tier": {"memory"},
        "policy": {"tier"},
        "history": {"policy", "tier"},
        "objects": {"history", "policy", "tier"},
        "transfer": {"objects", "tier"},
        "prefix": {"history", "memory", "objects", "policy", "tier", "transfer"},
        "lookup": {"history", "objects", "prefix", "tier", "transfer"},
        "sharing": {"tier"},
        "upkeep": {"history", "lookup", "objects", "prefix", "tier"},
    },
    "daemon": {
        "runtime": set(),
        "peer/directory": {"runtime", "security"},
        "peer/transport": {"runtime"},
        "security": {"runtime"},
        "peer/control": {"runtime", "security"},
        "config": {"peer/directory", "runtime"},
        "tiers": {"runtime"},
        "events": {"runtime"},
        "observe": {"runtime"},
        "session": {"runtime"},
        "router": {"observe", "peer/directory", "runtime"},
        "peer/channels": {"peer/control", "peer/directory", "peer/transport", "runtime", "security"},
        "peer/fetch": {"peer/channels", "peer/directory", "peer/transport", "router", "runtime"},
        "peer/offers": {"peer/channels", "peer/control", "peer/directory", "peer/fetch", "runtime"},
        "peer/erase": {"observe", "peer/directory", "runtime"},
        "peer": {
            "observe",
            "peer/channels",
            "peer/control",
            "peer/directory",
            "peer/fetch",
            "peer/erase",
            "peer/offers",
            "peer/transport",
            "router",
            "runtime",
            "security",
        },
        "engine": {
            "events",
            "peer",
            "peer/control",
            "peer/directory",
            "peer/fetch",
            "peer/offers",
            "peer/transport",
            "router",
            "runtime",
            "session",
        },
        "rpc": {"engine", "observe", "runtime", "session"},
        "admin": {"config", "engine", "events", "observe", "peer", "router", "rpc", "runtime", "session"},
    },
    "client": {
        "include/ashlar": set(),
        "session": set(),
        "engine": {"include/ashlar", "session"},
        "c/include": set(),
        "c/src": {"c/include", "include/ashlar"},
        "python/src": {"engine", "include/ashlar", "session"},
    },
    "examples": {
        "c": set(),
        "shortest": set(),
        "refengine": set(),
        "rag": {"refengine"},
        "demo": {"rag"},
    },
    "tools": {
        "command_line": set(),
        "ashlarctl": {"command_line"},
        "load": set(),
        "neighbours": set(),
        "overhead": set(),
        "bench": {"command_line", "load", "neighbours"},
        "replay": {"command_line", "neighbours"},
    },
    "tests": {
        "integration": set(),
        "nodes": {"integration"},
        "simulation": set(),
        "simulation/nodes": {"simulation"},
        "fuzz": set(),
        "install/engine": set(),
    },
}
# Single sub-folders that another top folder's sub-folder may include: transport and directory are separate libraries,
# and a benchmark without them would measure something else.
ACROSS = {("tools/bench", "daemon/peer/transport"), ("tools/bench", "daemon/peer/directory")}
GENERATED = re.compile(r"(ashlar|etcd)/v\d+/\w+(\.grpc)?\.pb\.h")  # from proto/ashlar/ and proto/etcd/
GRPC = re.compile(r"grpc(pp)?/|.*\.grpc\.pb\.h")
FORBIDDEN_FOLDERS = {"common", "util", "utils"}
HEADERS = {".h", ".cuh"}
SOURCES = {".cc", ".c", ".cu", *HEADERS}
# Public headers, as included by users of the installed package.
PUBLIC = re.compile(r"ashlar/\w+\.h")
PUBLIC_C = {name: f"client/c/include/{name}" for name in ("ashlar.h", "ashlar_types.h")}
TESTING = {"testing", "testdata"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def sub_folder(path):
    """Returns the sub-folder of its top folder that a path is in, "" for a loose file, None for tests and their
    helpers."""
    if path.stem.endswith("_test") or TESTING & set(path.parts):
        return None
    return "/".join(path.parts[1:-1])


def check_sub_folders(root, path, target):
    """Yields violations of an include that stays in its top folder."""
    top, here, there = path.parts[0], sub_folder(path), sub_folder(pathlib.PurePosixPath(target))
    rows = SUB_FOLDERS.get(top, {})
    if not here or not there or here == there:
        return
    if here in rows and there not in rows[here]:
        yield f"includes {target}: {top}/{here}/ may not depend on {top}/{there}/"


def without_row(paths):
    """Yields one line for each sub-folder that has sources and no row in SUB_FOLDERS."""
    folders = {(path.parts[0], sub_folder(path)) for path in paths if sub_folder(path)}
    for top, name in sorted(folders):
        if name not in SUB_FOLDERS.get(top, {}):
            yield f"{top}/{name}: has sources and no row in check_layering.py"


def circles(edges):
    """Yields one line for each circle among the nodes of `edges`, a dictionary of sets."""
    state, trail = {}, []

    def visit(node):
        state[node] = "open"
        trail.append(node)
        for other in sorted(edges.get(node, ())):
            if state.get(other) == "open":
                yield "circle: " + " → ".join([*trail[trail.index(other) :], other])
            elif other not in state:
                yield from visit(other)
        trail.pop()
        state[node] = "done"

    for node in sorted(edges):
        if node not in state:
            yield from visit(node)


def node(path):
    """Returns the node of a cycle: a sub-folder, or a loose file without its extension."""
    return f"{path.parts[0]}/{sub_folder(path)}/" if sub_folder(path) else str(path.with_suffix(""))


def find(root, target):
    """Returns the file that an include refers to, relative to `root`, or None."""
    if PUBLIC.fullmatch(target):
        target = f"client/include/{target}"
    target = PUBLIC_C.get(target, target)
    return target if (root / target).is_file() else None


def check_include(root, path, quoted, angled):
    """Yields violations of one include of the file `path`, which is relative to `root`."""
    target = quoted or angled
    folder = path.parts[0]
    if path.suffix in HEADERS and GRPC.match(target):
        yield f"header includes {target}: gRPC's headers belong into .cc files"
    if ".." in pathlib.PurePosixPath(target).parts:
        yield f"includes {target}: paths are rooted at the repository"
        return
    if GENERATED.fullmatch(target):
        target_folder = "proto"
    elif find(root, target):
        target_folder = find(root, target).split("/")[0]
        if target_folder == folder:
            yield from check_sub_folders(root, path, find(root, target))
    else:
        # With angle brackets, files in the same folder are not found.
        if quoted and (root / path.parent / target).is_file():
            yield f"includes {target}: paths are rooted at the repository"
        elif quoted and (target.split("/")[0] in FOLDERS or PUBLIC.fullmatch(target)):
            yield f"includes {target}: no such file"
        return
    if ("/".join(path.parts[:-1]), "/".join(pathlib.PurePosixPath(target).parts[:-1])) in ACROSS:
        return
    if folder == "tests" or target_folder == folder or target_folder in MAY_INCLUDE[folder]:
        return
    yield f"includes {target}: {folder}/ may not depend on {target_folder}/"


def check(root):
    """Returns the violations under `root` as lines "path:line: what"."""
    breaches, edges, paths = [], {}, []
    for folder in sorted(FOLDERS):
        for absolute in sorted((root / folder).rglob("*")):
            path = absolute.relative_to(root)
            if absolute.is_dir():
                if path.name in FORBIDDEN_FOLDERS:
                    breaches.append(f"{path}: a folder is named after what it is for, not {path.name}/")
                continue
            if path.suffix not in SOURCES:
                continue
            paths.append(path)
            for number, line in enumerate(absolute.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                if match:
                    breaches += [f"{path}:{number}: {what}" for what in check_include(root, path, *match.groups())]
                    target = find(root, match.group(1) or match.group(2))
                    target = target and pathlib.PurePosixPath(target)
                    if (
                        target
                        and sub_folder(path) is not None
                        and sub_folder(target) is not None
                        and node(path) != node(target)
                    ):
                        edges.setdefault(node(path), set()).add(node(target))
    for name in sorted(FORBIDDEN_FOLDERS):
        if (root / name).exists():
            breaches.append(f"{name}: a folder is named after what it is for, not {name}/")
    return breaches + list(without_row(paths)) + list(circles(edges))


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    breaches = check(root)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
