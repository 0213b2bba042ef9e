#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the tables of docs/metrics.md and docs/misses.md with the daemon. Prints a metric without a row, a row
without a metric, a row with a wrong type or wrong labels, and a miss reason without a row.

Names and types are from the registrations in the daemon's sources. Labels are from a daemon that is started here, if it
shows the metric before engines connect, and otherwise from the sources.

usage: check_metrics.py --root ROOT --bin FOLDER

Exits with 77 if ashlard is not built and nothing else is wrong.
"""

import argparse
import http.client
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
PAGE = "docs/metrics.md"
REASONS = "docs/misses.md"
SECONDS = 20
NAME = r"ashlar_[a-z0-9_]+|process_[a-z_]+_(?:total|bytes|fds|seconds)"
ROW = re.compile(rf"^\| ?`({NAME})` ?\| ?(\w+) ?\| ?([^|]*?) ?\|[^|]+\|[^|]+\|$", re.M)
REGISTERED = re.compile(rf'"({NAME})"')
MAKER = re.compile(r"(Counter|Gauge|Histogram)")
CHILD_LABEL = re.compile(r'\{\s*"(\w+)"\s*,')


def rows(text):
    """Returns the page's metrics: name -> (type, labels). Labels are a set; a dash means none."""
    return {
        name: (kind, frozenset(label for label in re.split(r",\s*", labels.strip()) if label != "–"))
        for name, kind, labels in ROW.findall(text)
    }


def sources(root):
    """Returns the daemon's sources, without tests, as one text."""
    paths = [path for path in sorted((root / "daemon").rglob("*.cc")) if not path.name.endswith("_test.cc")]
    return "\f".join(path.read_text(encoding="utf-8") for path in paths if "testing" not in path.parts)


def types(text):
    """name -> type of every metric that the sources register: of the last type that they name before it."""
    found = {}
    for match in REGISTERED.finditer(text):
        makers = MAKER.findall(text, 0, match.start())
        found[match.group(1)] = makers[-1].lower() if makers else "unknown"
    return found


def labels_in_sources(text, name):
    """Returns a metric's labels from the sources, or None if they are written in an unknown way."""
    at = text.index(f'"{name}"')
    # Children<...>{Family(name, help), tenants, {labels}}
    children = re.compile(r'"[^"]*"\s*,\s*(?:"[^"]*"\s*)+\)\s*,\s*tenants\s*,\s*\{([^}]*)\}').match(text, at)
    if children:
        return frozenset({"tenant", *re.findall(r'"(\w+)"', children.group(1))})
    # A family that is a member, with one place that adds to it.
    member = re.search(r"(\w+_family)\s*=[^;]*$", text[:at]) or re.search(
        r"\b(\w+_)\(prometheus::Build\w+\(\)\s*\.Name\($", text[:at]
    )
    if member:
        file = text[text.rfind("\f", 0, at) + 1 :].partition("\f")[0]  # others may have a member of that name
        added = re.search(rf"\b{member.group(1)}\s*\.Add\((\{{\{{.*?\}}\}})[,)]", file, re.S)
        if added:
            return frozenset(CHILD_LABEL.findall(added.group(1)))
    return None


def serve(program, folder):
    """Returns the metrics that a daemon that has just been started shows on its socket."""
    config = folder / "ashlard.yaml"
    config.write_text(
        f"listen: {{rpc_socket: {folder}/rpc.sock, session_socket: {folder}/session.sock, "
        f"metrics_socket: {folder}/metrics.sock}}\ndram: {{capacity_bytes: 64MiB}}\n",
        encoding="utf-8",
    )
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([program, "--config", config], **silent) as daemon:
        try:
            until = time.monotonic() + SECONDS
            while True:
                try:
                    connection = http.client.HTTPConnection("node")
                    connection.sock = socket.socket(socket.AF_UNIX)
                    connection.sock.connect(str(folder / "metrics.sock"))
                    connection.request("GET", "/metrics")
                    return connection.getresponse().read().decode()
                except OSError:
                    if daemon.poll() is not None or time.monotonic() > until:
                        raise
                    time.sleep(0.05)
        finally:
            daemon.terminate()


def shown(text):
    """Returns name -> (type, labels) of the metrics that a daemon shows."""
    found = {}
    kind = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    for name, labels in re.findall(r"^((?:ashlar|process)_\w+?)(?:\{(.*)\})? \S+$", text, re.M):
        family = name if name in kind else re.sub(r"_(?:bucket|sum|count)$", "", name)
        names = set(re.findall(r'(\w+)="', labels)) - ({"le"} if kind[family] == "histogram" else set())
        found[family] = (kind[family], frozenset(names))
    return found


def check(page, source, live):
    """Returns what is wrong. `live`: the metrics of a daemon; empty if there is none."""
    wrong = []
    page, registered, live = rows(page), types(source), shown(live)
    for name in sorted(registered.keys() | live.keys()):
        kind = live[name][0] if name in live else registered[name]
        labels = live[name][1] if name in live else labels_in_sources(source, name)
        if name not in page:
            wrong.append(f"{PAGE}: no row for {name} ({kind})")
            continue
        if page[name][0] != kind:
            wrong.append(f"{PAGE}: {name} is a {kind}, not a {page[name][0]}")
        if labels is not None and page[name][1] != labels:
            wrong.append(f"{PAGE}: {name} has the labels {', '.join(sorted(labels)) or '–'}")
        if labels is None and live:
            wrong.append(f"{PAGE}: neither sources nor a daemon say which labels {name} has")
    wrong += [f"{PAGE}: the daemon has no {name}" for name in sorted(page.keys() - registered.keys() - live.keys())]
    return wrong


def missing_reasons(page, outcomes):
    """Reasons of `proto/outcome.cc` that have no row."""
    names = re.findall(r'case MissReason::k\w+:\s*return "(\w+)";', outcomes)
    names = [name for name in names if name != "none" and f"\n| `{name}` |" not in page]
    return [f"{REASONS}: no row for the reason {name}" for name in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    program, live = arguments.bin / "ashlard", ""
    if program.exists():
        with tempfile.TemporaryDirectory(prefix="docs") as folder:
            live = serve(program, pathlib.Path(folder))
    page = (arguments.root / PAGE).read_text(encoding="utf-8")
    wrong = check(page, sources(arguments.root), live)
    reasons = (arguments.root / REASONS).read_text(encoding="utf-8")
    wrong += missing_reasons(reasons, (arguments.root / "proto/outcome.cc").read_text(encoding="utf-8"))
    print("\n".join(wrong) if wrong else "every metric and every reason has its row")
    if not live:
        print("skipped: ashlard is not built, so labels were compared with the sources alone")
    return 1 if wrong else SKIPPED if not live else 0


if __name__ == "__main__":
    sys.exit(main())
