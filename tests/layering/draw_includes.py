#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the includes between folders into docs/structure.md, as Mermaid, or checks that the page shows the current
includes.

usage: draw_includes.py --write | --check [ROOT]

An arrow that is implied by others (a → c with a → b → c) is omitted. Tests and testing/ are not drawn.
"""

import pathlib
import sys

import check_layering

PAGE = "docs/structure.md"
HEAD = """# Folder structure

An arrow points from a folder to one that it includes; an arrow that follows from others is left out.
[`tests/layering`](../tests/layering/README.md) refuses other includes and circles. `draw_includes.py --write` draws this page.
"""
TITLES = {
    "": "Top-level folders",
    "storage": "storage: the cache",
    "daemon": "daemon: the process around it",
    "client": "client: what engines link",
}


def includes(root):
    """Yields (file, included file), both relative to `root`, of all sources but tests."""
    for folder in sorted(check_layering.MAY_INCLUDE):
        for absolute in sorted((root / folder).rglob("*")):
            path = absolute.relative_to(root)
            if path.suffix not in check_layering.SOURCES or check_layering.sub_folder(path) is None:
                continue
            for line in absolute.read_text(encoding="utf-8").splitlines():
                match = check_layering.INCLUDE.match(line)
                text = match and (match.group(1) or match.group(2))
                if text and check_layering.GENERATED.fullmatch(text):
                    yield path, pathlib.PurePosixPath("proto") / text
                elif text and check_layering.find(root, text):
                    target = pathlib.PurePosixPath(check_layering.find(root, text))
                    if check_layering.sub_folder(target) is not None:
                        yield path, target


def graph(root, top):
    """Returns the edges among the top folders, or among the sub-folders of one. Its loose files are one node with its
    name."""
    edges = {}
    for source, target in includes(root):
        if top == "":
            a, b = source.parts[0], target.parts[0]
        elif source.parts[0] == target.parts[0] == top:
            a, b = check_layering.sub_folder(source), check_layering.sub_folder(target)
            if not b:  # every folder may use the loose common files
                continue
            a = a or top
        else:
            continue
        if a != b:
            edges.setdefault(a, set()).add(b)
    return edges


def reachable(edges, start, without):
    """Returns the nodes reachable from `start`, without its edge to `without`."""
    seen, open_nodes = set(), [node for node in edges.get(start, ()) if node != without]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            open_nodes += edges.get(node, ())
    return seen


def draw(edges):
    """Returns one graph as a Mermaid block, without implied edges."""
    lines = ["```mermaid", "graph TD"]
    for a in sorted(edges):
        direct = [b for b in sorted(edges[a]) if b not in reachable(edges, a, b)]
        lines.append(f"  {a}-->{' & '.join(direct)}")
    return "\n".join([*lines, "```"])


def page(root):
    sections = [f"## {title}\n\n{draw(graph(root, top))}" for top, title in TITLES.items() if graph(root, top)]
    return HEAD + "\n" + "\n\n".join(sections) + "\n"


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in ("--write", "--check"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parents[2]).resolve()
    if sys.argv[1] == "--write":
        (root / PAGE).write_text(page(root), encoding="utf-8")
        return 0
    if (root / PAGE).read_text(encoding="utf-8") == page(root):
        return 0
    print(f"{PAGE} does not show today's includes: run tests/layering/draw_includes.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
