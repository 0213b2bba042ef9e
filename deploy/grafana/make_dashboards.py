#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboards as JSON: the panels of panels.py with the descriptions of docs/metrics.md.

usage: make_dashboards.py FOLDER [URL]

URL is where the pages of docs are served, such as https://wiki.example/ashlar/docs/.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE))

import panels  # noqa: E402

PAGES = "https://ashlar.example/docs/"  # placeholder, as in deploy/prometheus
VARIABLES = {
    "node": 'label_values(up{job="ashlar"}, instance)',
    "tenant": "label_values(ashlar_landed_bytes_total, tenant)",
}
ROW = re.compile(r"^\| ?`((?:ashlar|process)_\w+)` ?\| ?\w+ ?\|[^|]*\| ?([^|]*?) ?\| ?([^|]*?) ?\|$", re.M)
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def described():
    """Returns the description of each metric in docs/metrics.md, with absolute links."""
    page = (HERE.parents[1] / "docs/metrics.md").read_text()
    page = re.sub(r"\]\((#[\w-]+)\)", rf"]({PAGES}metrics.md\1)", page)
    page = re.sub(r"\]\((?!https:)([\w.#-]+)\)", rf"]({PAGES}\1)", page)
    return {
        name: meaning.strip() + ("" if act.strip() == "–" else f". *When to act:* {act.strip()}")
        for name, meaning, act in ROW.findall(page)
    }


def description(panel, metrics):
    text = " ".join(expr for expr, _ in panel.queries)
    names = dict.fromkeys(
        re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"(?<![\w:])(?:ashlar|process)_\w+", text)
    )
    return "\n\n".join(([panel.says] if panel.says else []) + [f"`{name}`: {metrics[name]}" for name in names])


def thresholds(panel):
    steps = [{"color": "green" if panel.red_below is None else "red", "value": None}]
    for colour, value in (("green", panel.red_below), ("orange", panel.orange_from), ("red", panel.red_from)):
        if value is not None:
            steps.append({"color": colour, "value": value})
    return {"mode": "absolute", "steps": steps}


def written(panel, metrics, number, x, y, board):
    custom = {}
    if panel.type == "timeseries":
        custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stack else {"fillOpacity": 0}
        if panel.log:
            custom["scaleDistribution"] = {"type": "log", "log": 10}
        if len(thresholds(panel)["steps"]) > 1:
            custom["thresholdsStyle"] = {"mode": "line"}
    defaults = {"unit": panel.unit, "custom": custom, "thresholds": thresholds(panel)}
    if not panel.log:
        defaults["min"] = 0
    if board != "ashlar-node" and any("{{instance}}" in legend for _, legend in panel.queries):
        defaults["links"] = [
            {
                "title": "Node ${__field.labels.instance}",
                "url": "/d/ashlar-node?var-node=${__field.labels.instance}&${datasource:queryparam}&${__url_time_range}",
            }
        ]
    return {
        "id": number,
        "title": panel.title,
        "description": description(panel, metrics),
        "type": panel.type,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "links": [
            {"title": f"Runbook: {alert}", "url": f"{PAGES}runbooks.md#{alert.lower()}", "targetBlank": True}
            for alert in panel.alerts
        ],
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend or "__auto"}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def dashboard(uid, title, variables, rows, metrics):
    chosen = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    chosen += [
        {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": VARIABLES[name],
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name in variables
    ]
    links = [
        {
            "title": "Ashlar",
            "type": "dashboards",
            "tags": ["ashlar"],
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
        }
    ]
    links += [
        {"title": name, "type": "link", "url": PAGES + page, "targetBlank": True}
        for name, page in (("Runbooks", "runbooks.md"), ("Metrics", "metrics.md"))
    ]
    out, y = [], 0
    for row, of_row in rows.items():
        out.append(
            {
                "id": len(out) + 1,
                "title": row,
                "type": "row",
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1},
            }
        )
        y += 1
        for i, panel in enumerate(of_row):
            out.append(written(panel, metrics, len(out) + 1, i % COLUMNS * WIDTH, y + i // COLUMNS * HEIGHT, uid))
        y += -(-len(of_row) // COLUMNS) * HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["ashlar"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": chosen},
        "links": links,
        "panels": out,
    }


def boards():
    """Returns the dashboards by uid."""
    metrics = described()
    return {uid: dashboard(uid, *board, metrics) for uid, board in panels.BOARDS.items()}


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder, pages = pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else PAGES
    folder.mkdir(parents=True, exist_ok=True)
    for uid, board in boards().items():
        text = json.dumps(board, indent=1, ensure_ascii=False).replace(PAGES, pages.rstrip("/") + "/")
        (folder / f"{uid}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
