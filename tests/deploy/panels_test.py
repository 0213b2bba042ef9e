#!/usr/bin/env python3
"""Every query of every panel, asked of a real Prometheus that scrapes a real daemon under load, returns data.

usage: panels_test.py    (environment: ASHLAR_SOURCE, ASHLARD, PYTHONPATH with the package ashlar)
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

ROOT = pathlib.Path(os.environ["ASHLAR_SOURCE"])
sys.path[:0] = [str(ROOT / "examples/python"), str(pathlib.Path(__file__).parent)]

import ashlar.daemon  # noqa: E402
import load  # noqa: E402

PATIENCE = 60.0  # seconds until the last panel has data


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """Scrapes each second, and evaluates the rules each second: what takes minutes in a fleet takes seconds here."""

    def __init__(self, folder, target):
        self.url = f"http://127.0.0.1:{free_port()}"
        rules = (ROOT / "deploy/prometheus/ashlar.rules.yml").read_text().replace("interval: 30s", "interval: 1s")
        pathlib.Path(folder, "ashlar.rules.yml").write_text(rules)
        pathlib.Path(folder, "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [ashlar.rules.yml]\n"
            f"scrape_configs: [{{job_name: ashlar, static_configs: [{{targets: ['{target}']}}]}}]\n")
        self._log = open(pathlib.Path(folder, "prometheus.log"), "wb")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
             f"--web.listen-address={self.url[7:]}"], stdout=self._log, stderr=self._log)

    def ask(self, query):
        with urllib.request.urlopen(f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": query}), timeout=10) as reply:
            return json.load(reply)["data"]["result"]

    def stop(self):
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def queries():
    """(dashboard, panel, query) with the variables as 'All' sets them."""
    for file in sorted((ROOT / "deploy/grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "20s").replace("$node", ".*").replace("$tenant", ".*")
                yield file.stem, panel["title"], query


@unittest.skipUnless(shutil.which("prometheus"), "Prometheus is not installed (Debian: prometheus)")
class Panels(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        port = free_port()
        daemon = ashlar.daemon.start(
            dram="16MiB", arena="1MiB", ssd="32MiB", folder=self.folder.name,
            config={"tenants": [{"name": "default", "uids": [os.getuid()], "dram_bytes": "16MiB", "ssd_bytes": "32MiB"}]})
        daemon.stop()
        config = pathlib.Path(self.folder.name, "ashlard.yaml")
        config.write_text(config.read_text().replace("listen: {", f'listen: {{metrics_address: "127.0.0.1:{port}", ', 1))
        daemon.start()
        self.addCleanup(daemon.stop)
        self.load = load.Load(daemon.rpc_socket, daemon.session_socket)
        self.addCleanup(self.load.stop)
        self.prometheus = Prometheus(self.folder.name, f"127.0.0.1:{port}")
        self.addCleanup(self.prometheus.stop)

    def test_every_query_returns_data(self):
        empty, deadline = list(queries()), time.monotonic() + PATIENCE
        count = len(empty)
        self.assertGreaterEqual(count, 25)
        while empty and time.monotonic() < deadline:
            time.sleep(1)
            try:
                empty = [each for each in empty if not self.has_numbers(each[2])]
            except OSError:
                continue  # Prometheus starts
        for board, title, query in empty:
            print(f"{board}: {title}: no data: {query}")
        print(f"{count - len(empty)} of {count} queries return data; {self.load.prompts} prompts")
        self.assertEqual(empty, [])

    def has_numbers(self, query):
        return any(sample["value"][1] != "NaN" for sample in self.prometheus.ask(query))


if __name__ == "__main__":
    unittest.main()
