#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the C ABI to client/c/abi.txt: symbols and their signatures, sizes, offsets and types of structs' fields, numbers
of enumerations.

usage: abi_test.py SOURCE_ROOT LIBRARY [--write]

The ABI that engines were compiled against must not change: fields may only be added at a struct's end, and none may be
removed. --write saves the current dump, for a release that breaks the ABI on purpose (its SOVERSION is raised).
"""

import pathlib
import re
import subprocess
import sys
import tempfile


def spaced(declaration):
    """One space between words, none before a star or after a parenthesis, so that line breaks make no difference."""
    return re.sub(r" ?([*(),]) ?", r"\1", " ".join(declaration.split())).replace("*", "* ").replace(",", ", ").strip()


def type_of(declaration):
    """A parameter's or a field's type: the declaration without its name."""
    return spaced(re.sub(r"(?<=[\s*])\w+(?=(\[\w*\])?$)", "", " ".join(declaration.split())))


def structs(header):
    """Each struct with its fields, {name: type}."""
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \w+;", header, re.S):
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        fields = {}
        for declaration in (part.strip() for part in body.split(";")):
            if not declaration:
                continue
            function = re.search(r"\(\*(\w+)\)\(", declaration)
            if function:
                fields[function[1]] = spaced(declaration.replace(f"(*{function[1]})", "(*)"))
                continue
            first, *others = declaration.split(",")
            kind = re.sub(r"\[\w*\]$", "", type_of(first))
            for part in (first, *others):
                named = re.search(r"(\w+)(\[\w+\])?$", part.strip())
                fields[named[1]] = kind + (named[2] or "")
        yield name, fields


def calls(header):
    """The signature of each call: types only, because parameters' names are not part of the ABI."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    for result, name, parameters in re.findall(r"ASHLAR_API ([^;()]*?)(ashlar_\w+)\(([^;]*)\);", header):
        types = [each.strip() if each.strip() == "void" else type_of(each) for each in parameters.split(",")]
        yield f"call {spaced(result)} {name}({', '.join(types)})"


def dump(include, library):
    header = (include / "ashlar_types.h").read_text() + (include / "ashlar.h").read_text()
    lines = []
    for name, fields in structs(header):
        lines.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        lines += [
            f'printf("field {name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            for field in fields
        ]
    for body in re.findall(r"enum \{(.*?)\}", re.sub(r"/\*.*?\*/", "", header, flags=re.S), re.S):
        lines += [f'printf("number {name} %d\\n", (int){name});' for name in re.findall(r"(\w+) = ", body)]
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "dump.c"), pathlib.Path(folder, "dump")
        source.write_text(
            '#include <stdio.h>\n#include "ashlar.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
        )
        subprocess.run(
            ["cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I", include, source, "-o", program],
            check=True,
        )
        shape = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = sorted(line.split()[-1] for line in symbols.splitlines())
    types = [f"type {name}.{field} {kind}" for name, fields in structs(header) for field, kind in fields.items()]
    return shape + [f"symbol {name}" for name in exported] + types + sorted(calls(header)), exported


def main():
    root, library = pathlib.Path(sys.argv[1]), sys.argv[2]
    kept = root / "client/c/abi.txt"
    today, exported = dump(root / "client/c/include", library)
    wrong = [f"exported, and not of this library: {name}" for name in exported if not name.startswith("ashlar_")]
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    wrong += [
        f"gRPC is not hidden inside: needs {name}"
        for name in re.findall(r"NEEDED.*\[(lib(?:grpc|gpr|ssl|crypto).*)\]", needed)
    ]
    unknown = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    wrong += [
        f"asked of whatever gRPC the process has: {name}" for name in re.findall(r" (\S*grpc\S*)$", unknown, re.M)
    ]
    declared = set(re.findall(r"ASHLAR_API [^;]*?(ashlar_\w+)\(", (root / "client/c/include/ashlar.h").read_text()))
    wrong += [f"declared, and not exported: {name}" for name in sorted(declared - set(exported))]
    wrong += [f"exported, and not declared: {name}" for name in sorted(set(exported) - declared)]
    if "--write" in sys.argv:
        kept.write_text("\n".join(today) + "\n")
    before = kept.read_text().splitlines()
    sizes = {line.split()[1]: int(line.split()[2]) for line in today if line.startswith("struct ")}
    for line in before:
        words = line.split()
        if line in today or (words[0] == "struct" and sizes.get(words[1], 0) >= int(words[2])):
            continue
        wrong.append(f"engines were compiled against: {line}")
    wrong += [f"not in client/c/abi.txt (run with --write): {line}" for line in today if line not in before]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
