# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes daemons and evaluates the rules of deploy/prometheus, and the queries of the panels."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(os.environ["ASHLAR_SOURCE"])
sys.path.insert(0, str(ROOT / "deploy/grafana"))

import make_dashboards  # noqa: E402


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """Scrapes and evaluates the rules every second: what takes minutes in a fleet takes seconds here."""

    def __init__(self, folder, targets, hurry=False, real_waits=False):
        """`hurry`: alerts look back seconds instead of minutes, hours and days, and wait a second instead of minutes.
        With `real_waits`, alerts whose rules wait at most two minutes wait that long."""
        self.url = f"http://127.0.0.1:{free_port()}"
        rules = (ROOT / "deploy/prometheus/ashlar.rules.yml").read_text().replace("interval: 30s", "interval: 1s")
        if hurry:
            rules = re.sub(r"\[(5m|15m|30m|1h)\]", "[10s]", rules).replace("[1d] offset 1h", "[30s] offset 10s")
            rules = re.sub(r"offset 1h", "offset 10s", rules)
            rules = re.sub(r"for: (?!1m|2m)\w+" if real_waits else r"for: \w+", "for: 1s", rules)
        self.waits = waits_of(rules)  # by alert, in seconds
        pathlib.Path(folder, "ashlar.rules.yml").write_text(rules)
        pathlib.Path(folder, "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [ashlar.rules.yml]\n"
            f"scrape_configs: [{{job_name: ashlar, static_configs: [{{targets: {targets}}}]}}]\n"
        )
        self._log = open(pathlib.Path(folder, "prometheus.log"), "wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                f"--web.listen-address={self.url[7:]}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, query):
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": query}), timeout=10
        ) as reply:
            return json.load(reply)["data"]["result"]

    def firing(self):
        """The names of the firing alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=10) as reply:
            return {
                alert["labels"]["alertname"]
                for alert in json.load(reply)["data"]["alerts"]
                if alert["state"] == "firing"
            }

    def stop(self):
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def waits_of(rules):
    """Returns how long each alert's condition must hold, in seconds."""
    seconds = {"s": 1, "m": 60, "h": 3600}
    parts = re.split(r"- alert: (\w+)\n", rules)[1:]
    found = {name: re.search(r"^ +for: (\d+)([smh])$", body, re.M) for name, body in zip(parts[::2], parts[1::2])}
    return {name: int(wait[1]) * seconds[wait[2]] if wait else 0 for name, wait in found.items()}


# Counts of rare events and faults, and levels that return to 0 before they are measured: queries of them may show only
# 0.
MAY_BE_ZERO = {
    "instance:ashlar_failed_rpcs:increase15m",
    "ashlar_checksum_failures_total",
    "ashlar_compositions_in_progress",
    "ashlar_directory_announcements_dropped_total",
    "ashlar_draining",
    "ashlar_erasures_oldest_age_seconds",
    "ashlar_landings_in_progress",
    "ashlar_allocation_failures_total",
    "ashlar_peer_failures_total",
    "ashlar_peers_rejected_total",
    "ashlar_prefetched_objects_total",
    "ashlar_queue_depth",
    "ashlar_queue_rejected_total",
    "ashlar_rate_limited_requests_total",
    "ashlar_remote_hedges_total",
    "ashlar_remote_lookup_timeouts_total",
    "ashlar_remote_fetch_failures_total",
    "ashlar_scrub_corrupt_copies_total",
    "ashlar_tier_degraded",
    "ashlar_tier_errors_total",
    "ashlar_transport_malformed_messages_total",
    "ashlar_transport_rma_read_bytes_total",  # by RDMA only
    "ashlar_transport_requests_rejected_total",
    "ashlar_transport_rdma_fallback",
    "changes\\(process_start_time_seconds",
}
# The same holds for metrics of several nodes on a single node.
OF_SEVERAL_NODES = re.compile(r"ashlar_(cluster|peers?|directory|remote|transport|offers?|offered)_")


@dataclasses.dataclass(frozen=True)
class Query:
    board: str
    panel: str
    text: str  # with the variables set as for 'All'
    legend: str

    def may_be_zero(self, alone):
        return (
            any(re.search(rf"\b{name}\b", self.text) for name in MAY_BE_ZERO)
            or alone
            and bool(OF_SEVERAL_NODES.search(self.text))
        )

    def missing(self, samples, alone):
        """Names the missing samples that keep the query from being proven; empty: it is proven."""
        labels = set(re.findall(r"{{(\w+)}}", self.legend))
        samples = [each for each in samples if each["value"][1] != "NaN"]
        if not samples:  # a single node has no series of other nodes
            return "" if alone and "ashlar_peer_" in self.text else "no data"
        if not any(labels <= each["metric"].keys() for each in samples):
            return f"no sample has the labels {', '.join(sorted(labels))}"
        if self.may_be_zero(alone) or any(float(each["value"][1]) != 0 for each in samples):
            return ""
        return "nothing but 0"


def queries():
    for uid, board in make_dashboards.boards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                query = (
                    target["expr"].replace("$__rate_interval", "20s").replace("$node", ".*").replace("$tenant", ".*")
                )
                yield Query(uid, panel["title"], query, target["legendFormat"])


def prove(prometheus, patience, alone):
    """Repeats all queries of all dashboards until each has shown what it should, or for `patience` seconds. Returns
    their number, and the unproven ones with what they lack."""
    left, deadline = {query: "not asked" for query in queries()}, time.monotonic() + patience
    count = len(left)
    while left and time.monotonic() < deadline:
        time.sleep(1)
        with contextlib.suppress(OSError):  # Prometheus starts
            lacking = {query: query.missing(prometheus.ask(query.text), alone) for query in left}
            left = {query: what for query, what in lacking.items() if what}
    return count, left
