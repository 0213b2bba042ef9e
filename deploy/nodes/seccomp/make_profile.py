#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes ashlard.json beside this file, the seccomp profile of the daemon's container, from three sources: the unit's filter of
system calls, systemd's sets, and the list of what the daemon's own sandbox refuses. It is committed; a test holds it to this
script where systemd-analyze is of the release in SYSTEMD.

usage: make_profile.py [--check]
"""

import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
UNIT, SANDBOX, OUT = ROOT / "deploy/systemd/ashlard.service", ROOT / "daemon/security/sandbox.cc", HERE / "ashlard.json"
SYSTEMD = "252"  # Debian 12: other releases have other sets
EPERM, ENOSYS = 1, 38
# The sandbox applies once the daemon serves. The profile applies earlier: the runtime starts the program, and the daemon calls
# userfaultfd when it starts.
AT_THE_START = {"execve", "execveat", "userfaultfd"}
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}


def release():
    """Returns the release of systemd on this machine; empty if there is none."""
    try:
        return subprocess.run(
            ["systemd-analyze", "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[1]
    except OSError:
        return ""


def members(word):
    """The system calls that one word of SystemCallFilter= names: a call or a set."""
    if not word.startswith("@"):
        return {word}
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager", word], capture_output=True, text=True, check=True
    )
    lines = [line.strip() for line in listed.stdout.splitlines()[1:]]
    return set().union(*(members(line) for line in lines if line and not line.startswith("#")))


def calls_of_the_unit():
    allowed = set()
    for words in re.findall(r"^SystemCallFilter=(.+)$", UNIT.read_text(), re.M):
        named = set().union(*(members(word) for word in words.lstrip("~").split()))
        allowed = allowed - named if words.startswith("~") else allowed | named
    return allowed


def refused_by_the_sandbox():
    listed = re.search(r"kRefused\[\] = \{(.*?)\};", SANDBOX.read_text(), re.S)[1]
    return set(re.findall(r'"(\w+)"', listed))


def profile():
    allowed = calls_of_the_unit() - (refused_by_the_sandbox() - AT_THE_START)
    plain = sorted(allowed - {"clone", "clone3", "socket"})
    rules = [
        {"names": plain, "action": "SCMP_ACT_ALLOW"},
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
        },
        # Its flags are in memory, which a filter cannot read: the C library then uses clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
    ]
    rules += [
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]}
        for family in FAMILIES.values()
    ]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": rules,
    }


def text():
    return json.dumps(profile(), indent=1) + "\n"


def main():
    if "--check" not in sys.argv:
        OUT.write_text(text())
    elif OUT.read_text() != text():
        print(f"{OUT.name} is not what make_profile.py writes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
