#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the annotations of mutexes by clang's thread safety analysis, without a build. Prints every breach.

usage: check_locks.py [-j JOBS] BUILD

Reads the include paths from BUILD/compile_commands.json. Checks each compiled file that has a mutex, or includes a
header with a mutex from its own folder. A group of sources that BUILD compiles as one file is checked as one file.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

SKIPPED = 77
MUTEX = re.compile(r"\bMutex(?:Lock)?\b|\bABSL_(?:GUARDED_BY|EXCLUSIVE_LOCKS_REQUIRED)\b")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
KEPT = ("-I", "-D", "-std=")
FLAGS = ("-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety")


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def has_mutex(path):
    return MUTEX.search(text_of(path)) is not None


def sources_of(file):
    """The file itself, or the sources that a group includes."""
    if file.parent.name != "Unity":
        return [file]
    return [pathlib.Path(name) for name in INCLUDE.findall(text_of(file))]


def concerns_mutexes(source):
    headers = (source.parent / pathlib.PurePosixPath(name).name for name in INCLUDE.findall(text_of(source)))
    return has_mutex(source) or any(map(has_mutex, headers))


def flags_of(command):
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], ""]):
        if word == "-isystem":
            yield from (word, following)
        elif word.startswith(KEPT) and not word.startswith("-D_FORTIFY_SOURCE"):
            yield word


def commands(build):
    """Yields each file to check with the flags that it is compiled with."""
    seen = set()
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        file = pathlib.Path(entry["directory"], entry["file"])
        if file not in seen and file.suffix in (".cc", ".cxx") and any(map(concerns_mutexes, sources_of(file))):
            seen.add(file)
            yield file, tuple(flags_of(entry["command"]))


def check(clang, file, flags):
    done = subprocess.run([clang, *flags, *FLAGS, str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def main():
    parser = argparse.ArgumentParser(
        prog="check_locks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-j", type=int, default=2, dest="jobs", help="files to check in parallel (default: 2)")
    parser.add_argument("build", type=pathlib.Path, metavar="BUILD")
    arguments = parser.parse_args()
    clang = shutil.which("clang++")
    if clang is None:
        print("skipped: clang++ is not installed (Debian: apt-get install clang)")
        return SKIPPED
    todo = list(commands(arguments.build))
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        breaches = list(filter(None, pool.map(lambda command: check(clang, *command), todo)))
    print(*breaches, f"checked {len(todo)} files: {len(breaches)} with breaches", sep="\n")
    return int(bool(breaches) or not todo)


if __name__ == "__main__":
    sys.exit(main())
