#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tools/lint on the C++ files that the newest commits have changed: at most 3 files, those of the newest commit first.
Findings count only in lines that these commits have changed.

usage: lint_newest.py SOURCE_ROOT BUILD [CHECKOUT]   CHECKOUT: the one to check (default: SOURCE_ROOT, which has tools/lint)

Exit status: 0 without findings, 1 with findings, 77 (skipped) without clang-tidy or git history, or when time runs out.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

MOST_FILES = 3
MOST_COMMITS = 10
MOST_SECONDS = 90
SKIPPED = 77


def git(root, *arguments):
    """Returns the lines that a git command prints; none if it fails."""
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def newest(root):
    """Returns the newest changed C++ files that still exist, and the commit before their changes. A commit without a parent
    here (shallow clone) is left out."""
    found, base = [], None
    for commit in git(root, "rev-list", "--first-parent", f"--max-count={MOST_COMMITS}", "HEAD"):
        for name in git(root, "diff", "--name-only", "--diff-filter=d", f"{commit}~1", commit):
            file = root / name
            if file.suffix in (".cc", ".h") and file.exists() and file not in found and len(found) < MOST_FILES:
                found.append(file)
                base = f"{commit}~1"
    return found, base


def main():
    source, build, root = (pathlib.Path(path).resolve() for path in (*sys.argv[1:], sys.argv[1])[:3])
    if not shutil.which("clang-tidy"):
        print("skipped: clang-tidy is not installed")
        return SKIPPED
    files, base = newest(root)
    if not files:
        print(f"skipped: git knows no commit that changed a C++ file of {root}")
        return SKIPPED
    command = [
        source / "tools/lint",
        "--root",
        root,
        "--build",
        build,
        "--jobs",
        "2",
        "--base",
        base,
        "--lines",
        *files,
    ]
    lint = subprocess.Popen(command, start_new_session=True)
    try:
        return lint.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(lint.pid, signal.SIGKILL)  # with its clang-tidy processes
        lint.wait()
        print(f"skipped: {len(files)} files take longer than {MOST_SECONDS} s")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
