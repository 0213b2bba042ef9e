#!/usr/bin/env python3
"""Checks the rules that keep the folders apart (docs/architecture.md, the parts). Prints every breach.

usage: check_layering.py [ROOT]
"""

import pathlib
import re
import sys

# What each folder may include besides itself. tests/ is not listed: it crosses folders on purpose.
MAY_INCLUDE = {
    "kernels": set(),
    "proto": set(),
    "storage": {"kernels", "proto"},
    "client": {"kernels", "proto"},
    "daemon": {"storage", "kernels", "proto"},
    "examples": {"client", "kernels", "proto"},
    "tools": {"examples", "client", "storage", "kernels", "proto"},
}
FOLDERS = {*MAY_INCLUDE, "tests"}
GENERATED = re.compile(r"ashlar/v\d+/\w+(\.grpc)?\.pb\.h")  # from proto/ashlar/
GRPC = re.compile(r"grpc(pp)?/|.*\.grpc\.pb\.h")
FORBIDDEN_FOLDERS = {"common", "util", "utils"}
HEADERS = {".h", ".cuh"}
SOURCES = {".cc", ".cu", *HEADERS}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def check_include(root, path, quoted, angled):
    """Yields what is wrong with one include of the file `path`, which is relative to `root`."""
    target = quoted or angled
    folder = path.parts[0]
    if path.suffix in HEADERS and GRPC.match(target):
        yield f"header includes {target}: gRPC's headers belong into .cc files"
    if ".." in pathlib.PurePosixPath(target).parts:
        yield f"includes {target}: paths are rooted at the repository"
        return
    if GENERATED.fullmatch(target):
        target_folder = "proto"
    elif (root / target).is_file():
        target_folder = target.split("/")[0]
    else:
        if quoted and (root / path.parent / target).is_file():  # in angles, files beside it are not found
            yield f"includes {target}: paths are rooted at the repository"
        elif target.split("/")[0] in FOLDERS and quoted:
            yield f"includes {target}: no such file"
        return
    if folder == "tests" or target_folder == folder or target_folder in MAY_INCLUDE[folder]:
        return
    yield f"includes {target}: {folder}/ may not depend on {target_folder}/"


def check(root):
    """Returns the breaches under `root` as lines "path:line: what"."""
    breaches = []
    for folder in sorted(FOLDERS):
        for absolute in sorted((root / folder).rglob("*")):
            path = absolute.relative_to(root)
            if absolute.is_dir():
                if path.name in FORBIDDEN_FOLDERS:
                    breaches.append(f"{path}: a folder is named after what it is for, not {path.name}/")
                continue
            if path.suffix not in SOURCES:
                continue
            for number, line in enumerate(absolute.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                if match:
                    breaches += [f"{path}:{number}: {what}" for what in check_include(root, path, *match.groups())]
    for name in sorted(FORBIDDEN_FOLDERS):
        if (root / name).exists():
            breaches.append(f"{name}: a folder is named after what it is for, not {name}/")
    return breaches


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    breaches = check(root)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
