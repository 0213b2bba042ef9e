# SPDX-License-Identifier: Apache-2.0
"""Runs a program under a seccomp profile as container runtimes read it (OCI's format), without a container.

usage: seccomp.py PROFILE PROGRAM [ARGUMENT...]
"""

import ctypes
import ctypes.util
import json
import os
import platform
import sys

ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
OPERATORS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
NATIVE = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
UNKNOWN = -1  # __NR_SCMP_ERROR


class Comparison(ctypes.Structure):
    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    ]


def library():
    """Returns libseccomp, or None."""
    name = ctypes.util.find_library("seccomp")
    if name is None:
        return None
    found = ctypes.CDLL(name)
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(Comparison),
    ]
    found.seccomp_load.argtypes = [ctypes.c_void_p]
    return found


def load(profile):
    """From now on this process and its programs may only do what the profile allows. It gets no new privileges any
    longer."""
    seccomp = library()
    if NATIVE[platform.machine()] not in profile["architectures"]:
        raise ValueError(f"the profile is not for {platform.machine()}")

    def action(rule, name, error):
        return ACTIONS[rule[name]] | (rule[error] if rule[name] == "SCMP_ACT_ERRNO" else 0)

    def must(result, what):
        if result != 0:
            raise OSError(-result, what)

    context = seccomp.seccomp_init(action(profile, "defaultAction", "defaultErrnoRet"))
    for rule in profile["syscalls"]:
        arguments = [
            Comparison(arg["index"], OPERATORS[arg["op"]], arg["value"], arg.get("valueTwo", 0))
            for arg in rule.get("args", [])
        ]
        for name in rule["names"]:
            call = seccomp.seccomp_syscall_resolve_name(name.encode())
            if call != UNKNOWN:
                must(
                    seccomp.seccomp_rule_add_array(
                        context,
                        action(rule, "action", "errnoRet"),
                        call,
                        len(arguments),
                        (Comparison * len(arguments))(*arguments),
                    ),
                    name,
                )
    must(seccomp.seccomp_load(context), "load")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        load(json.load(file))
    os.execv(sys.argv[2], sys.argv[2:])
