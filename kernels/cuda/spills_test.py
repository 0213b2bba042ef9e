#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA sources for every target and fails if the assembler reports a kernel that spills registers.

usage: spills_test.py NVCC SOURCE_ROOT ARCHITECTURE[,…] FILE.cu … Needs no GPU. Prints one row per kernel and target:
registers, stack, spills.
"""

import pathlib
import re
import subprocess
import sys

FUNCTION = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def read_report(text):
    """Yields (kernel, target, registers, stack, spill stores, spill loads) from the output of ptxas -v."""
    kernel = target = frame = None
    for line in text.splitlines():
        if match := FUNCTION.search(line):
            (kernel, target), frame = match.groups(), None
        elif match := FRAME.search(line):
            # Functions that are not inlined report their own frames before the kernel's register line.
            frame = [a + int(b) for a, b in zip(frame or [0, 0, 0], match.groups())]
        elif match := REGISTERS.search(line):
            if kernel and frame:
                yield kernel, target, int(match.group(1)), *frame
            kernel = None


def short_name(kernel):
    """A mangled name without the namespaces and the parameters."""
    return re.sub(r".*_cu_[0-9a-f]{8}\d+", "", kernel).split("EEv")[0]


def check_reader():
    """Checks that a spill is detected, also one of a function that a kernel calls."""
    sample = """ptxas info    : Compiling entry function '_Z3fooKernel' for 'sm_80'
ptxas info    : Function properties for _Z3fooKernel
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for callee
    0 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""
    assert list(read_report(sample)) == [("_Z3fooKernel", "sm_80", 255, 8, 16, 4)]
    assert not list(read_report("nvcc said nothing"))


def compile_command(nvcc, root, architectures, source):
    command = [nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-c"]
    for architecture in architectures:
        number = architecture.removesuffix("-real")
        command.append(f"--generate-code=arch=compute_{number},code=sm_{number}")
    return [
        *command,
        "-Xptxas",
        "-v",
        "-I",
        str(root),
        "-I",
        str(root / "kernels/cuda/gpu"),
        "-o",
        "/dev/null",
        str(source),
    ]


def main():
    check_reader()
    nvcc, root, architectures = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3].split(",")
    spilled = []
    for source in sys.argv[4:]:
        run = subprocess.run(
            compile_command(nvcc, root, architectures, root / "kernels/cuda" / source),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            sys.exit(f"{source} does not compile:\n{run.stdout}{run.stderr}")
        rows = list(read_report(run.stdout + run.stderr))
        targets = {row[1] for row in rows}
        if len(targets) != len(architectures):
            sys.exit(f"{source}: reports of {sorted(targets)} alone, {architectures} were asked for")
        for kernel, target, registers, stack, stores, loads in rows:
            print(
                f"{target:8} {registers:4} registers {stack:4} stack {stores:4} stored {loads:4} loaded  "
                f"{source}: {short_name(kernel)}"
            )
            if stores or loads:
                spilled.append((source, target, kernel))
    if spilled:
        sys.exit("kernels that spill:\n" + "\n".join(" ".join(row) for row in spilled))


if __name__ == "__main__":
    main()
