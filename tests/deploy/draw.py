#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what operators see of a node under load, with real daemons and a real Prometheus: the panels of every dashboard
and `ashlarctl top` as SVG, and the status page as PNG if Chromium is installed. For docs/pictures; not a test.

usage: draw.py FOLDER    (environment as of tests/deploy/try_operations.py: ASHLAR_SOURCE, ASHLAR_BUILD, ASHLARD, PYTHONPATH)
"""

import contextlib
import fcntl
import html
import json
import math
import os
import pathlib
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.parse
import urllib.request

SOURCE, BUILD = pathlib.Path(os.environ["ASHLAR_SOURCE"]), pathlib.Path(os.environ["ASHLAR_BUILD"])
sys.path[:0] = [str(SOURCE / "examples/python"), str(SOURCE / "deploy/grafana"), str(pathlib.Path(__file__).parent)]

import fleet  # noqa: E402
import make_dashboards  # noqa: E402

SECONDS, STEP = 90, 3
WIDTH, HEIGHT, COLUMNS, GAP, ROW_HEIGHT, MOST_SERIES = 300, 190, 3, 12, 24, 6
COLOURS = ("#1a5fb4", "#c64600", "#26a269", "#813d9c", "#9a6a00", "#5e5c64")
SCALES = {"bytes": (1024, ("B", "KiB", "MiB", "GiB")), "Bps": (1024, ("B/s", "KiB/s", "MiB/s", "GiB/s"))}


def shown(value, unit):
    """A number as Grafana shows it with that unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale or name == "µs":
                return f"{value / scale:.3g} {name}"
    if unit.startswith("suffix: "):
        return f"{shown(value, 'short')} {unit.removeprefix('suffix: ')}"
    base, names = SCALES.get(unit, (1000, ("/s", "K/s", "M/s") if unit == "ops" else ("", "K", "M")))
    step = 0
    while abs(value) >= base and step + 1 < len(names):
        value, step = value / base, step + 1
    return f"{value:.3g} {names[step]}".strip()


def ask_range(prometheus, query, end):
    words = urllib.parse.urlencode({"query": query, "start": end - SECONDS, "end": end, "step": STEP})
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/query_range?{words}", timeout=10) as reply:
        return json.load(reply)["data"]["result"]


def series_of(prometheus, panel, end, names):
    """Legends and points. `names`: the nodes' names, by Prometheus instance."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "20s").replace("$node", ".*").replace("$tenant", ".*")
        for found in ask_range(prometheus, query, end):
            legend = target["legendFormat"]
            labels = {**found["metric"], "instance": names.get(found["metric"].get("instance"), "")}
            name = (
                ""
                if legend == "__auto"
                else re.sub(r"{{(\w+)}}", lambda label, labels=labels: labels.get(label[1], ""), legend)
            )
            points = [(float(at), float(value)) for at, value in found["values"] if value not in ("NaN", "+Inf")]
            if points:
                yield name.strip(), points


def text(x, y, words, size=10, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" {more}>{html.escape(words)}</text>'


def stack(found):
    """Stacks each series on the previous ones. A series counts as 0 before its first and after its last point."""
    times = sorted({at for _, points in found for at, _ in points})
    base, stacked = dict.fromkeys(times, 0.0), []
    for name, points in found:
        own = dict(points)
        base = {at: base[at] + own.get(at, 0.0) for at in times}
        stacked.append((name, sorted(base.items())))
    return stacked


def draw_panel(panel, found, left, top, end):
    unit = panel["fieldConfig"]["defaults"]["unit"]
    parts = [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#c0bfbc"/>',
        text(left + 8, top + 17, panel["title"], 12 if len(panel["title"]) < 40 else 10.5, 'font-weight="bold"'),
    ]
    if not found:
        return [*parts, text(left + 8, top + 60, "no data", 12)]
    if panel["type"] == "stat":
        words = [f"{shown(points[-1][1], unit)} {name}".strip() for name, points in found]
        size = 34 if len(words) == 1 else 24
        return parts + [
            text(left + WIDTH / 2, top + 105 + 34 * i, each, size, 'text-anchor="middle"')
            for i, each in enumerate(words)
        ]
    custom = panel["fieldConfig"]["defaults"]["custom"]
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    found = sorted(found, key=lambda each: -each[1][-1][1])[:MOST_SERIES]
    last = [points[-1][1] for _, points in found]
    if stacked:
        found = stack(found)
    most = 1.08 * max((value for _, points in found for _, value in points), default=0) or 1.08
    names = [f"{name} {shown(value, unit)}".strip() for (name, _), value in zip(found, last)]
    columns = 1 if max(map(len, names)) > (24 if len(names) <= 3 else 28) else 2
    x0, y0, wide, high = left + 8, top + 36, WIDTH - 16, HEIGHT - 48 - 12 * math.ceil(len(found) / columns)
    parts.append(f'<path d="M{x0} {y0}h{wide}M{x0} {y0 + high}h{wide}" stroke="#deddda"/>')
    share, least = (lambda value: value / most), 0.0
    if custom.get("scaleDistribution", {}).get("type") == "log":
        least = min((value for _, points in found for _, value in points if value > 0), default=most / 10)
        share = lambda value: math.log(max(value, least) / least) / max(math.log(most / least), 1e-9)
        parts.append(text(x0 + wide, y0 + high - 3, shown(least, unit), 9, 'fill="#5e5c64" text-anchor="end"'))
    parts.append(text(x0, y0 - 3, shown(most / 1.08, unit), 9, 'fill="#5e5c64"'))
    for i, (_, points) in enumerate(found):
        place = [(x0 + wide * (1 - (end - at) / SECONDS), y0 + high * (1 - share(value))) for at, value in points]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in place)
        parts.append(f'<path d="M{line}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.5"/>')
        x, y = x0 + i % columns * wide / columns, y0 + high + 13 + 12 * (i // columns)
        parts.append(f'<rect x="{x:.0f}" y="{y - 7:.0f}" width="7" height="7" fill="{COLOURS[i]}"/>')
        parts.append(text(x + 10, y, names[i] if columns == 1 else names[i][:30], 9 if columns == 1 else 8.5))
    return parts


def draw_dashboard(prometheus, board, out, end, names):
    parts, top, column = [], 34, 0
    for panel in board["panels"]:
        if column == COLUMNS or (column > 0 and panel["type"] == "row"):
            top, column = top + HEIGHT + GAP, 0
        if panel["type"] == "row":
            parts.append(text(GAP, top + 14, panel["title"], 13, 'font-weight="bold"'))
            top += ROW_HEIGHT
            continue
        found = list(series_of(prometheus, panel, end, names))
        parts += draw_panel(panel, found, GAP + column * (WIDTH + GAP), top, end)
        column += 1
    wide, high = GAP + COLUMNS * (WIDTH + GAP), top + HEIGHT + GAP
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif" fill="#241f31">\n'
        f'<rect width="{wide}" height="{high}" fill="#f6f5f4"/>\n{text(GAP, 22, board["title"], 16)}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_terminal(lines, out):
    """Lines with the few codes of colour that ashlarctl writes."""
    rows = []
    for i, line in enumerate(lines):
        y, plain = 24 + 17 * i, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)
        codes = re.findall(r"\x1b\[([0-9;]+)m", line)
        bold = ' font-weight="bold"' if codes and codes[0].startswith("1") else ""
        if codes and codes[0] == "7":
            rows.append(f'<rect x="10" y="{y - 13}" width="{8.43 * len(plain):.0f}" height="17" fill="#deddda"/>')
        colour = ' fill="#241f31"' if codes and codes[0] == "7" else ""
        rows.append(f'<text x="12" y="{y}" xml:space="preserve"{bold}{colour}>{html.escape(plain)}</text>')
    wide, high = 12 + 100 * 8.43, 34 + 17 * len(lines)
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high}" font-family="monospace" font-size="14" fill="#deddda">\n'
        f'<rect width="{wide:.0f}" height="{high}" rx="6" fill="#241f31"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def top_of(admin_socket):
    """The last view of `ashlarctl top` on a terminal of 100 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        time.sleep(0.3)  # until the terminal has its size
        program = str(BUILD / "bin/ashlarctl")
        os.execv(program, [program, "top", "--interval", "2", "--count", "2", "--socket", admin_socket])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    written = b""
    with contextlib.suppress(OSError):
        while some := os.read(terminal, 65536):
            written += some
    os.waitpid(pid, 0)
    views = re.split(r"\x1b\[(?:H|2J|1;1H)[^\n]*?(?=ashlard|\x1b\[1m)", written.decode())
    return [line.replace("\r", "") for line in views[-1].rstrip().split("\n")]


def photograph(url, out, size):
    subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={size}",
            f"--screenshot={out}",
            url,
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def main():
    folder = pathlib.Path(sys.argv[1])
    with contextlib.ExitStack() as cleanup:
        place = cleanup.enter_context(tempfile.TemporaryDirectory())
        nodes = fleet.Fleet(place, cleanup, f"{place}/disk", hurry=True)
        prometheus, first = nodes.prometheus, nodes.nodes[0]
        time.sleep(SECONDS + 10)
        end, names = time.time(), {f"127.0.0.1:{node.port}": node.name for node in nodes.nodes}
        for uid, board in make_dashboards.boards().items():
            draw_dashboard(prometheus, board, folder / f"dashboard-{uid.removeprefix('ashlar-')}.svg", end, names)
        draw_terminal(top_of(first.daemon.admin_socket), folder / "top.svg")
        if shutil.which("chromium"):
            photograph(f"http://127.0.0.1:{first.port}/", folder / "status-page.png", "500,1560")


if __name__ == "__main__":
    main()
