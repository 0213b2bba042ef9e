#!/usr/bin/env python3
"""Checks the measures that keep the project easy to pick up (CONTRIBUTING.md, Rules). Prints every breach.

- README.md is one page.
- Source files stay short. Data, golden files, pictures and lists of packages are none.
- Few files lie loose in storage/, daemon/ and daemon/peer/.
- Every folder of sources is declared to the build, and named on a page for readers.
- Comments open with their subject, not with a clause that is held until the subject comes.
- The walk of one request in docs/architecture.md names few files, each row with its reason.

usage: check_house.py [ROOT]
"""

import os
import pathlib
import re
import sys

MOST_README_LINES = 80
MOST_LINES = 450
MOST_OPENINGS = 40
MOST_WALK_FILES = 40
MOST_LOOSE = {"storage": 16, "daemon": 12, "daemon/peer": 12}  # sources, tests aside
SOURCES = {".h", ".cc", ".c", ".cu", ".cuh", ".py", ".proto", ".cmake", ".sh"}
HEADERS = {".h", ".cuh"}
COMPILED = {".cc", ".c", ".cu"}
TOP_PAGES = ("docs/architecture.md", "README.md", "CONTRIBUTING.md")
SKIPPED = {"build", "corpus", "testdata", "__pycache__"}
OPENING = re.compile(r'^\s*(?://+|#+|\*|"{3})\s*(?:What|Who|Whose)\b')
WALK = re.compile(r"^## The walk of one request.*?(?=^## |\Z)", re.M | re.S)
PATH = re.compile(r"`([\w./-]+/[\w.-]+)`")


def is_source(root, path):
    """Whether a file, relative to `root`, is source code: by its ending, or a script by its first line."""
    if path.suffix in SOURCES or path.name == "CMakeLists.txt":
        return True
    if path.suffix:
        return False
    with open(root / path, "rb") as file:
        return file.read(2) == b"#!"


def sources(root):
    """Yields (path relative to `root`, lines) of every source file of the project's own."""
    for folder, names, found in os.walk(root):
        names[:] = sorted(n for n in names if n not in SKIPPED and not n.startswith("."))
        for name in sorted(found):
            path = pathlib.Path(folder, name).relative_to(root)
            if is_source(root, path):
                yield path, (root / path).read_text(encoding="utf-8").splitlines()


def check_walk(text):
    """Yields what is wrong with the walk in docs/architecture.md."""
    section = WALK.search(text)
    rows = [line for line in section.group(0).splitlines() if line.startswith("|") and PATH.search(line)] if section else []
    if not rows:
        yield "no walk of one request"
    files = {path for row in rows for path in PATH.findall(row.split("|")[2])}
    if len(files) > MOST_WALK_FILES:
        yield f"the walk names {len(files)} files, {MOST_WALK_FILES} at most"
    for row in rows:
        if not row.split("|")[3].strip():
            yield f"the walk names {PATH.search(row).group(1)} without a reason"


def names_room(page, *paths):
    """Whether a page has one of these folders, or a file in it, in a code span."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return any(f"`{path}/" in text for path in paths)


def check_room(root, folder, compiled):
    """Yields what is wrong with a folder of sources. One without a CMakeLists.txt is declared by the one above it."""
    if compiled and not (root / folder / "CMakeLists.txt").is_file():
        above = next((up for up in folder.parents if (root / up / "CMakeLists.txt").is_file()), None)
        declared = above is not None and re.search(rf"(?<![\w/]){re.escape(str(folder.relative_to(above)))}/",
                                                   (root / above / "CMakeLists.txt").read_text(encoding="utf-8"))
        if not declared:
            yield "no CMakeLists.txt, and none above it names its sources"
    if (root / folder / "README.md").is_file():
        return
    # As `simd/` in the README of kernels/, for kernels/host/simd.
    ends = ["/".join(folder.parts[i:]) for i in range(len(folder.parts))]
    readmes = [root / up / "README.md" for up in folder.parents if up != pathlib.Path(".")]
    if not any(names_room(page, *ends) for page in readmes) and not any(
            names_room(root / page, str(folder)) for page in TOP_PAGES):
        yield "no README above it names it"


def check(root):
    """Returns the breaches under `root` as lines "path: what"."""
    breaches, openings, loose, rooms = [], [], dict.fromkeys(MOST_LOOSE, 0), {}
    lines = len((root / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > MOST_README_LINES:
        breaches.append(f"README.md: {lines} lines, {MOST_README_LINES} at most")
    for path, text in sources(root):
        if len(text) > MOST_LINES:
            breaches.append(f"{path}: {len(text)} lines, {MOST_LINES} at most")
        openings += [f"{path}:{number}" for number, line in enumerate(text, 1) if OPENING.match(line)]
        if path.suffix in HEADERS | COMPILED:
            rooms.setdefault(path.parent, set()).add(path.suffix)
            if str(path.parent) in loose and not path.stem.endswith("_test"):
                loose[str(path.parent)] += 1
    for folder, endings in sorted(rooms.items()):
        breaches += [f"{folder}: {what}" for what in check_room(root, folder, bool(endings & COMPILED))]
    for folder, count in loose.items():
        if count > MOST_LOOSE[folder]:
            breaches.append(f"{folder}: {count} source files lie loose, {MOST_LOOSE[folder]} at most")
    if len(openings) > MOST_OPENINGS:
        breaches.append(f"{len(openings)} comments open with What, Who or Whose, {MOST_OPENINGS} at most: "
                        + " ".join(openings))
    page = (root / "docs/architecture.md").read_text(encoding="utf-8")
    return breaches + [f"docs/architecture.md: {what}" for what in check_walk(page)]


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    breaches = check(root)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
