#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that links of pages are valid, and that tables are complete. Prints every violation.

- Relative links and anchors of all pages resolve.
- Pages that sources, scripts and other pages cite by their path exist.
- Paths and tests that pages in docs/ cite in backticks exist.
- Rows of a table have as many cells as its head.
- Pages meant to be read as a whole stay short.

usage: check_links.py [ROOT]
"""

import os
import pathlib
import re
import sys

# Words of a page, as counted by `wc -w`.
MOST_WORDS = {"docs/concepts.md": 3000, "docs/architecture.md": 1500}
FOLDERS = (
    "tensor",
    "proto",
    "kernels",
    "storage",
    "daemon",
    "client",
    "tools",
    "tests",
    "docs",
    "deploy",
    "cmake",
    "examples",
)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".proto", ".cmake", ".txt", ".yaml", ".sh", ".md"}
SKIPPED = {"build", "corpus", "testdata", "__pycache__"}

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.M)
CITED = re.compile(r"(?<![\w./-])docs/[\w./-]*\w\.(?:md|svg|json)")
TEST = re.compile(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)")
NAMED_TEST = re.compile(r"[A-Z]\w+\.[A-Z]\w+")


def files(root):
    """Yields every file under `root` that is the project's own, relative to it."""
    for folder, names, found in os.walk(root):
        names[:] = sorted(n for n in names if n not in SKIPPED and not n.startswith("."))
        for name in sorted(found):
            yield pathlib.Path(folder, name).relative_to(root)


def blank(match):
    """Spaces in place of a match, so that lines keep their numbers."""
    return re.sub(r"[^\n]", " ", match.group(0))


def anchors(text):
    """Returns the anchors that GitHub gives the headings of a page."""
    names = {}
    for heading in HEADING.findall(FENCE.sub(blank, text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeated = names.get(name, 0)
        names[name] = repeated + 1
        if repeated > 0:
            names[f"{name}-{repeated}"] = 1
    return names


def check_link(root, page, target):
    """Returns what is wrong with a link of `page`, or None."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    absolute = (root / page.parent / path).resolve() if path else root / page
    if not absolute.is_relative_to(root.resolve()):
        return f"{target}: outside of the repository"
    if not absolute.exists():
        return f"{target}: no such file"
    if anchor and absolute.suffix == ".md" and anchor not in anchors(absolute.read_text(encoding="utf-8")):
        return f"{target}: no such heading"
    return None


def breaches_of_tables(prose):
    """Yields (offset, what) for rows whose number of cells differs from the table's head."""
    offset, most = 0, None
    for line in prose.splitlines(keepends=True):
        bare = line.strip()
        cells = len(re.findall(r"(?<!\\)\|", bare)) - 1 if bare.startswith("|") and bare.endswith("|") else None
        if cells is not None and most is not None and cells != most:
            yield offset, f"a row of {cells} cells in a table of {most}"
        most = cells if most is None or cells is None else most
        offset += len(line)


def breaches_of_page(root, page, text, tests):
    """Yields (offset, what)."""
    prose = FENCE.sub(blank, text)
    for link in LINK.finditer(CODE.sub(blank, prose)):
        if wrong := check_link(root, page, link.group(1)):
            yield link.start(), wrong
    yield from breaches_of_tables(prose)
    if page.parts[0] != "docs":
        return
    for code in CODE.finditer(prose):
        named = code.group(1)
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", named) and not (root / named).exists():
            yield code.start(), f"{named}: no such file"
        if NAMED_TEST.fullmatch(named) and named not in tests:
            yield code.start(), f"{named}: no such test"


def check(root):
    """Returns the breaches under `root` as lines "path:line: what"."""
    found = []
    texts = {}
    for path in files(root):
        if path.suffix in SOURCES or path.suffix == "":
            try:
                texts[path] = (root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    tests = set()
    for path, text in texts.items():
        if path.suffix in {".cc", ".h"}:
            tests.update(".".join(names) for names in TEST.findall(text))

    def add(path, text, offset, what):
        found.append(f"{path}:{text.count(chr(10), 0, offset) + 1}: {what}")

    for path, text in texts.items():
        if path.suffix == ".md":
            for offset, what in breaches_of_page(root, path, text, tests):
                add(path, text, offset, what)
            words, most = len(text.split()), MOST_WORDS.get(path.as_posix())
            if most is not None and words > most:
                add(path, text, 0, f"{words} words, {most} at most")
        if path.parts[:2] == ("tests", "docs"):
            continue  # names pages that are missing on purpose
        for cited in CITED.finditer(LINK.sub(blank, text) if path.suffix == ".md" else text):
            if not (root / cited.group(0)).exists():
                add(path, text, cited.start(), f"{cited.group(0)}: no such page")
    for page in MOST_WORDS:
        if not (root / page).exists():
            found.append(f"{page}: missing")
    return found


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    breaches = check(root)
    print("\n".join(breaches) if breaches else "every link resolves")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
