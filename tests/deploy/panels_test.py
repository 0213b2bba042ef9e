#!/usr/bin/env python3
"""Every query of every panel, asked of a real Prometheus that scrapes a real daemon under load, returns data.

usage: panels_test.py    (environment: ASHLAR_SOURCE, ASHLARD, PYTHONPATH with the package ashlar)
"""

import os
import pathlib
import shutil
import sys
import tempfile
import time
import unittest
import urllib.request

sys.path[:0] = [str(pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "examples/python"), str(pathlib.Path(__file__).parent)]

import load  # noqa: E402
import monitoring  # noqa: E402

PATIENCE = 60.0  # seconds until the last panel has data


@unittest.skipUnless(shutil.which("prometheus"), "Prometheus is not installed (Debian: prometheus)")
class Panels(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        daemon, port = load.start_daemon(self.folder.name)
        self.addCleanup(daemon.stop)
        self.address = f"http://127.0.0.1:{port}"
        self.load = load.Load(daemon.rpc_socket, daemon.session_socket)
        self.addCleanup(self.load.stop)
        self.prometheus = monitoring.Prometheus(self.folder.name, f"127.0.0.1:{port}")
        self.addCleanup(self.prometheus.stop)

    def test_every_query_returns_data(self):
        empty, deadline = list(monitoring.queries()), time.monotonic() + PATIENCE
        count = len(empty)
        self.assertGreaterEqual(count, 25)
        while empty and time.monotonic() < deadline:
            time.sleep(1)
            try:
                empty = [each for each in empty if not monitoring.has_numbers(self.prometheus, each[2])]
            except OSError:
                continue  # Prometheus starts
        for board, title, query in empty:
            print(f"{board}: {title}: no data: {query}")
        print(f"{count - len(empty)} of {count} queries return data; {self.load.prompts} prompts")
        self.assertEqual(empty, [])
        with urllib.request.urlopen(self.address + "/", timeout=10) as reply:
            page = reply.read().decode()
        self.assertEqual(reply.headers["Content-Type"], "text/html; charset=utf-8")
        for part in ("serving</span>", "found in dram", "missed: never_seen", "evicted by price"):
            self.assertIn(part, page)
        self.assertNotIn("default", page, "a tenant's name")


if __name__ == "__main__":
    unittest.main()
