"""A real Prometheus that scrapes a daemon and evaluates the rules of deploy/prometheus, and the queries of the panels."""

import json
import os
import pathlib
import re
import socket
import subprocess
import urllib.parse
import urllib.request

ROOT = pathlib.Path(os.environ["ASHLAR_SOURCE"])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """Scrapes each second, and evaluates the rules each second: what takes minutes in a fleet takes seconds here."""

    def __init__(self, folder, target, hurry=False, real_waits=False):
        """`hurry`: alerts look back seconds instead of minutes, hours and days, and wait a second instead of minutes. With
        `real_waits` those wait as long as the rules say that wait two minutes at most."""
        self.url = f"http://127.0.0.1:{free_port()}"
        rules = (ROOT / "deploy/prometheus/ashlar.rules.yml").read_text().replace("interval: 30s", "interval: 1s")
        if hurry:
            rules = re.sub(r"\[(5m|15m|30m|1h)\]", "[10s]", rules).replace("[1d] offset 1h", "[30s] offset 10s")
            rules = re.sub(r"offset 1h", "offset 10s", rules)
            rules = re.sub(r"for: (?!1m|2m)\w+" if real_waits else r"for: \w+", "for: 1s", rules)
        self.waits = waits_of(rules)  # by alert, seconds
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

    def firing(self):
        """The names of the alerts that fire."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=10) as reply:
            return {alert["labels"]["alertname"] for alert in json.load(reply)["data"]["alerts"] if alert["state"] == "firing"}

    def stop(self):
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def waits_of(rules):
    """For how long each alert's condition must hold, in seconds."""
    seconds = {"s": 1, "m": 60, "h": 3600}
    parts = re.split(r"- alert: (\w+)\n", rules)[1:]
    found = {name: re.search(r"^ +for: (\d+)([smh])$", body, re.M) for name, body in zip(parts[::2], parts[1::2])}
    return {name: int(wait[1]) * seconds[wait[2]] if wait else 0 for name, wait in found.items()}


def queries():
    """(dashboard, panel, query) with the variables as 'All' sets them."""
    for file in sorted((ROOT / "deploy/grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "20s").replace("$node", ".*").replace("$tenant", ".*")
                yield file.stem, panel["title"], query


def has_numbers(prometheus, query):
    return any(sample["value"][1] != "NaN" for sample in prometheus.ask(query))
