# SPDX-License-Identifier: Apache-2.0
"""Code blocks of pages: finds them, extracts commands, and compares a command's output with the page's."""

import dataclasses
import pathlib
import re

# Languages whose blocks are not run.
PLAIN = {"text", "mermaid"}
# Languages whose blocks are commands, with or without their output.
SHELL = {"console", "sh"}
# Languages whose blocks may be excerpts of a source file.
CUT = {"cpp", "c", "python", "cmake", "proto"}

# A line that a shell would run. It is not allowed in a block of text.
COMMAND = re.compile(
    r"^(?:\$ |(?:[A-Z_]+=\S* )*(?:(?:build|deploy|examples|tests|tools)/\S+|apt|apt-get|ashlar\w*|awk|bash|buildah|cd|cmake"
    r"|cpack|ctest|curl|docker|git|helm|kubectl|make|ninja|pip|podman|promtool|python3?|sudo|systemctl|uv|vllm)(?: |$))",
    re.M,
)

FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.M | re.S)
ELLIPSIS = "…"


@dataclasses.dataclass
class Block:
    page: str
    line: int  # number of the first line inside
    language: str
    name: str  # the second word after the fence: the file that the block equals or is an excerpt of; may be empty
    text: str


@dataclasses.dataclass
class Command:
    page: str
    line: int
    text: str
    output: str = ""  # as shown on the page; empty: none
    file: pathlib.Path | None = None  # file that must exist before, with this content
    content: str = ""


def pages(root):
    """Returns the pages whose blocks are checked against the tree, relative to `root`: docs/, and the README of every
    folder."""
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and entry.name not in {"build", "docs"}]
    readmes = [page for folder in folders if folder.name[0] != "." for page in sorted(folder.rglob("README.md"))]
    found = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")), *readmes]
    return [page.relative_to(root) for page in found if page.exists()]


def blocks(page, text):
    """Returns all fenced blocks of a page, in order. ValueError: a fence is indented or not closed."""
    found = []
    for match in FENCE.finditer(text):
        language, _, name = match.group("info").strip().partition(" ")
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(str(page), line, language, name.strip(), match.group("text")))
    stray = re.search(r"^[ \t]*(?:```|~~~)", FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), text), re.M)
    if stray is not None:
        raise ValueError(f"{page}: a fence is indented, or has no partner")
    return found


def commands(block):
    """The commands of a block of a shell's language, in order."""
    found = []
    lines = block.text.split("\n")[:-1]
    at = 0
    while at < len(lines):
        line, number = lines[at], block.line + at
        at += 1
        starts = line.startswith("$ ") if block.language == "console" else bool(line.strip()) and line[0] != "#"
        if not starts:
            if block.language == "console":
                if not found:
                    raise ValueError(f"{block.page}:{number}: output before the first command")
                found[-1].output += line + "\n"
            continue
        text = line.removeprefix("$ ") if block.language == "console" else line
        while text.endswith("\\") and at < len(lines):
            text = text[:-1] + " " + lines[at].strip()
            at += 1
        found.append(Command(block.page, number, text))
    return found


def bare(command):
    """A command without its comment, with single spaces."""
    return " ".join(re.sub(r"\s#\s.*$", "", command).split())


def shows(shown, printed):
    """Returns whether a page that shows `shown` matches the output `printed`. An ellipsis stands for any text of its
    line or, alone on a line, for any lines."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == ELLIPSIS:
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += r"[^\n]*".join(re.escape(part.rstrip()) for part in line.rstrip().split(ELLIPSIS)) + r"[ \t]*\n"
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n") is not None


def is_cut_out_of(text, source):
    """Returns whether the pieces of `text` between lines with only an ellipsis (also in a comment) occur in `source`,
    in order and line by line, ignoring indentation."""
    lines = [line.strip() for line in source.split("\n")]
    at = 0
    for piece in re.split(r"^[ \t]*(?://|#)?[ \t]*…[ \t]*$", text, flags=re.M):
        wanted = [line.strip() for line in piece.strip("\n").split("\n")]
        if wanted == [""]:
            continue
        while at + len(wanted) <= len(lines) and lines[at : at + len(wanted)] != wanted:
            at += 1
        if at + len(wanted) > len(lines):
            return False
        at += len(wanted)
    return True
