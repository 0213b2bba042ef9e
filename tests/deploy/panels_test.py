#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every query of every panel, sent to a real Prometheus that scrapes real daemons under load, returns data with the
labels of its legend, and not only 0 unless monitoring.MAY_BE_ZERO lists it. Without etcd there is one daemon, and
metrics of several nodes may be 0.

usage: panels_test.py    (environment: ASHLAR_SOURCE, ASHLARD, PYTHONPATH with the package ashlar)
"""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import unittest
import urllib.request

sys.path[:0] = [str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples/python"), str(pathlib.Path(__file__).parent)]

import fleet  # noqa: E402
import monitoring  # noqa: E402

PATIENCE = 60.0  # seconds until the last panel has data


@unittest.skipUnless(shutil.which("prometheus"), "Prometheus is not installed (Debian: prometheus)")
class Panels(unittest.TestCase):
    def test_every_query_returns_data(self):
        with contextlib.ExitStack() as cleanup:
            nodes = fleet.Fleet(cleanup.enter_context(tempfile.TemporaryDirectory()), cleanup)
            alone = nodes.etcd is None
            count, left = monitoring.prove(nodes.prometheus, PATIENCE, alone)
            for query, lacks in left.items():
                print(f"{query.board}: {query.panel}: {lacks}: {query.text}")
            print(
                f"{count - len(left)} of {count} queries return data; {[node.load.prompts for node in nodes.nodes]} prompts"
                + (", on one node: etcd is not installed" if alone else "")
            )
            self.assertGreaterEqual(count, 25)
            self.assertEqual(left, {})
            landed = {row["metric"]["tenant"] for row in nodes.prometheus.ask("ashlar_landed_bytes_total > 0")}
            self.assertEqual(landed, {"default", "neighbour"} if os.geteuid() == 0 else {"default"})
            self.status_page(nodes.nodes[0].port)

    def status_page(self, port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as reply:
            page = reply.read().decode()
        self.assertEqual(reply.headers["Content-Type"], "text/html; charset=utf-8")
        for part in ("serving</span>", "found in dram", "missed: never_seen", "evicted by price"):
            self.assertIn(part, page)
        for tenant in ("default", "neighbour"):
            self.assertNotIn(tenant, page)

    def test_only_what_the_dashboards_ask_for_is_excused(self):
        texts = "\n".join(query.text for query in monitoring.queries())
        for name in monitoring.MAY_BE_ZERO:
            self.assertRegex(texts, rf"\b{name}\b")

    def test_zeros_and_missing_labels_are_no_data(self):
        def lacks(text, *samples, legend="{{instance}} {{tenant}}", alone=False):
            return monitoring.Query("board", "panel", text, legend).missing(
                [{"metric": dict.fromkeys(labels, "x"), "value": [0, value]} for value, *labels in samples], alone
            )

        self.assertEqual(lacks("ashlar_peer_rtt_seconds"), "no data")
        self.assertEqual(lacks("ashlar_peer_rtt_seconds", alone=True), "")
        both = ("instance", "tenant")
        self.assertEqual(lacks("ashlar_leases", ("0", *both), ("1", *both)), "")
        self.assertEqual(lacks("ashlar_leases", ("0", *both)), "nothing but 0")
        self.assertEqual(lacks("ashlar_leases", ("NaN", *both)), "no data")
        self.assertEqual(lacks("ashlar_leases", ("1", "instance")), "no sample has the labels instance, tenant")
        self.assertEqual(lacks("sum(instance:ashlar_failed_rpcs:increase15m)", ("0",), legend=""), "")
        self.assertEqual(lacks("ashlar_peers_connected", ("0",), legend="", alone=True), "")
        self.assertEqual(lacks("ashlar_peers_connected", ("0",), legend=""), "nothing but 0")


if __name__ == "__main__":
    unittest.main()
