#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the dashboards' text: every panel says what it shows, in the unit of its metrics, in a row of its topic, and
links to existing runbooks.

usage: dashboards_test.py SOURCE_ROOT
"""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
sys.path.insert(0, str(ROOT / "deploy/grafana"))

import make_dashboards  # noqa: E402

BOARDS = make_dashboards.boards()
METRIC = re.compile(r"(?<![\w:])(?:\w+:)?(?:ashlar|process)_[\w:]+")  # recorded series as level:name:operation


def unit_of(query):
    """Returns the unit of a query's metrics, derived from their suffixes, as a regular expression."""
    names = METRIC.findall(query) or ["up"]
    name, rated = re.sub(r"_bucket$", "", names[0]), re.search(r"\brate\((?!.*_bucket)", query)
    base = name.split(":")[1] if ":" in name else re.sub(r"_total$", "", name)
    if query.startswith(("changes(", "count ", "count(")):
        return "short"
    if ":ashlar_failed_rpcs:" in name:
        return "suffix: calls"
    if base.endswith("_bytes_per_second"):
        return "Bps"
    if base == "process_cpu_seconds":
        return "suffix: cores"  # CPU seconds per second
    if base.endswith("_seconds"):
        return "percentunit" if rated else "s"  # seconds a second are a share
    if ":ratio" in name:
        return "percentunit"
    if base.endswith("_bytes"):
        return "Bps" if rated else "bytes"
    if base.endswith("_tokens"):
        return "suffix: tokens/s" if rated else "suffix: tokens"
    return r"suffix: (?!tokens|bytes)[a-z-]+/s" if rated else "short"


class Dashboards(unittest.TestCase):
    @staticmethod
    def panels():
        for board in BOARDS.values():
            for panel in board["panels"]:
                if panel["type"] != "row":
                    yield panel

    def test_recorded_series_are_not_selected_by_job(self):
        count = 0
        for panel in self.panels():
            for target in panel["targets"]:
                for selector in re.findall(r"\b\w+:ashlar_\w+:\w+\{([^}]*)\}", target["expr"]):
                    self.assertNotRegex(selector, r"\bjob\b", f"{panel['title']}: the recording rules sum the job away")
                    count += 1
        self.assertGreater(count, 0)

    def test_units_by_suffix(self):
        for query, unit in (
            ("sum by (to) (rate(ashlar_tier_copied_bytes_total{}[5m]))", "Bps"),
            ("ashlar_memory_only_bytes", "bytes"),
            ("histogram_quantile(0.5, sum by (le) (rate(ashlar_rpc_duration_seconds_bucket[5m])))", "s"),
            ("sum(rate(process_cpu_seconds_total[5m]))", "suffix: cores"),
            ("instance_tier:ashlar_tier_used_bytes:ratio", "percentunit"),
            ("instance:ashlar_lookup_saved_seconds:ratio_rate5m", "s"),
            ("ashlar_leases", "short"),
        ):
            self.assertEqual(unit_of(query), unit, query)
        count = 0
        for panel in self.panels():
            for target in panel["targets"]:
                self.assertRegex(
                    panel["fieldConfig"]["defaults"]["unit"],
                    f"^{unit_of(target['expr'])}$",
                    f"{panel['title']}: {target['expr']}",
                )
                count += 1
        self.assertGreater(count, 60)

    def test_every_panel_is_described_by_its_metrics(self):
        page = dict(
            re.findall(r"^\| ?`(\w+)` ?\| ?\w+ ?\|[^|]*\| ?([^|]*?) ?\|", (ROOT / "docs/metrics.md").read_text(), re.M)
        )
        for panel in self.panels():
            self.assertGreater(len(panel["description"]), 20, panel["title"])
            for name in METRIC.findall(" ".join(target["expr"] for target in panel["targets"])):
                if ":" not in name:
                    name = re.sub(r"_(bucket|sum|count)$", "", name)
                    self.assertIn(f"`{name}`: {page[name].split('](')[0]}", panel["description"])
            self.assertNotRegex(panel["description"], r"\]\((?!https://)", "a link that leads nowhere from Grafana")

    def test_links_lead_to_runbooks_and_boards(self):
        runbooks = {alert.lower() for alert in re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.M)}
        linked = {link["url"].partition("runbooks.md#")[2] for panel in self.panels() for link in panel["links"]}
        self.assertEqual(linked - runbooks, set())
        # The metric is 0 without a certificate, so no panel can show it to everyone.
        self.assertEqual(runbooks - linked, {"ashlarcertificateexpiring"})
        for board in BOARDS.values():
            self.assertEqual([link["title"] for link in board["links"]], ["Ashlar", "Runbooks", "Metrics"])
            self.assertEqual(board["panels"][0]["type"], "row")
        to_nodes = {
            panel["title"]
            for panel in self.panels()
            if any(
                link["url"].startswith("/d/ashlar-node?") for link in panel["fieldConfig"]["defaults"].get("links", [])
            )
        }
        self.assertIn("Tokens reused by node", to_nodes)

    def test_an_alert_that_a_panel_names_has_its_threshold_there(self):
        """If the alert is about the value itself."""
        wanted = {
            "AshlarSlowLookups": 0.1,
            "AshlarTierDegraded": 1,
            "AshlarRdmaFallback": 1,
            "AshlarErasureStuck": 300,
            "AshlarDirectoryDisconnected": 1,
            "AshlarReloadFailed": 1,
            "AshlarRestarts": 3,
        }
        found = {}
        for panel in self.panels():
            for link in panel["links"]:
                steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
                found.setdefault(link["title"].removeprefix("Runbook: "), []).extend(
                    step["value"] for step in steps if step["value"]
                )
                self.assertEqual([step["value"] for step in steps[1:]], sorted(step["value"] for step in steps[1:]))
        for alert, value in wanted.items():
            self.assertIn(value, found[alert], alert)

    def test_panels_do_not_overlap(self):
        for board in BOARDS.values():
            taken = {}
            for panel in board["panels"]:
                at = panel["gridPos"]
                self.assertLessEqual(at["x"] + at["w"], 24)
                for x in range(at["x"], at["x"] + at["w"]):
                    for y in range(at["y"], at["y"] + at["h"]):
                        self.assertNotIn((x, y), taken, panel["title"])
                        taken[x, y] = panel["title"]


if __name__ == "__main__":
    unittest.main()
