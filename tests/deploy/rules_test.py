#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules, runbooks and dashboards match: promtool accepts the rules, every alert has its runbook, and every queried
metric exists.

usage: rules_test.py SOURCE_ROOT
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
sys.path.insert(0, str(ROOT / "deploy/grafana"))

import make_dashboards  # noqa: E402

RULES = ROOT / "deploy/prometheus/ashlar.rules.yml"
ALERT = re.compile(r"^ +- alert: (\w+)$", re.M)
METRIC = re.compile(r"(?<![\w:])(?:ashlar|process)_\w+")


def described():
    """The metrics of docs/metrics.md, with the suffixes that histograms have."""
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| ?`((?:ashlar|process)_\w+)` ?\| ?(\w+) ?\|", page, re.M)
    return {
        name + suffix
        for name, kind in rows
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }


class Rules(unittest.TestCase):
    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed (Debian: prometheus)")
    def test_promtool_accepts_and_tests_the_rules(self):
        for command in (["check", "rules", RULES.name], ["test", "rules", "ashlar.rules.test.yml"]):
            done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_alert_fires_and_is_quiet_in_a_test(self):
        tests = (RULES.parent / "ashlar.rules.test.yml").read_text()
        for alert in ALERT.findall(RULES.read_text()):
            self.assertIn(f"- name: {alert} fires\n", tests)
            self.assertIn(f"- name: {alert} is quiet\n", tests)

    def test_every_alert_has_its_runbook_and_every_runbook_its_alert(self):
        alerts = ALERT.findall(RULES.read_text())
        page = (ROOT / "docs/runbooks.md").read_text()
        self.assertEqual(alerts, re.findall(r"^## (\w+)$", page, re.M), "in the same order")
        for alert in alerts:
            section = page.split(f"## {alert}\n")[1].split("\n## ")[0]
            for part in ("**Means.**", "**Look.**", "**Do.**"):
                self.assertIn(part, section, alert)
            self.assertIn(f"runbook_url: https://ashlar.example/docs/runbooks.md#{alert.lower()}\n", RULES.read_text())

    def test_required_exporters_are_documented(self):
        rules, page = RULES.read_text(), (ROOT / "docs/runbooks.md").read_text()
        bodies = dict(zip(ALERT.findall(rules), ALERT.split(rules)[2::2]))
        foreign = [alert for alert, body in bodies.items() if "kube_" in body]
        self.assertEqual(foreign, ["AshlarPodsNotReady"])
        for alert in foreign:
            self.assertIn("kube-state-metrics", page.split(f"## {alert}\n")[1].split("\n## ")[0])
            for readme in ("deploy/README.md", "deploy/kustomize/README.md"):
                self.assertRegex((ROOT / readme).read_text(), f"{alert}.*kube-state-metrics", readme)

    def test_commands_on_nodes_have_the_rights_that_they_need(self):
        page = (ROOT / "docs/runbooks.md").read_text()
        commands = re.findall(r"`(kubectl [^`]*debug node/[^`]*)`", page)
        self.assertGreater(len(commands), 0)
        for command in commands:
            self.assertIn("--profile=sysadmin", command, "dmesg and smartctl")
            self.assertIn("-n ashlar", command, "a namespace whose Pod Security allows it")

    def test_commands_for_kubernetes_name_the_namespace(self):
        """Without a namespace they use `default`, and report that the object does not exist."""
        found = 0
        for page in ("docs/runbooks.md", "docs/operations.md", "docs/ashlarctl.md", "deploy/kustomize/README.md"):
            for command in re.findall(
                r"\bkubectl ((?!kustomize|apply|debug POD --copy-to)[^`\n]+)", (ROOT / page).read_text()
            ):
                if len(command.split()) > 1:
                    self.assertTrue(command.startswith("-n ashlar "), f"{page}: kubectl {command}")
                    found += 1
        self.assertGreater(found, 10)

    def test_queried_metrics_are_documented(self):
        known = described()
        texts = {RULES.name: RULES.read_text()}
        for uid, board in make_dashboards.boards().items():
            texts[uid] = "\n".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", []))
        records = set(re.findall(r"- record: (\S+)", texts[RULES.name]))
        for name, text in texts.items():
            self.assertEqual({metric for metric in METRIC.findall(text) if metric not in known}, set(), name)
            self.assertEqual(set(re.findall(r"\b\w+:ashlar_\w+:\w+", text)) - records, set(), name)

    def test_the_operators_rules_match_their_script(self):
        subprocess.run([sys.executable, RULES.parent / "make_prometheus_rule.py", "--check"], check=True)

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed (Debian: prometheus)")
    def test_promtool_accepts_the_examples(self):
        """Debian's Prometheus is built without Kubernetes discovery, so that part is removed from the second one."""
        for name, discoveries in (("prometheus.example.yml", 0), ("prometheus.kubernetes.example.yml", 1)):
            text, found = re.subn(r"    kubernetes_sd_configs:\n(?:      .*\n)+", "", (RULES.parent / name).read_text())
            self.assertEqual(found, discoveries, name)
            self.assertEqual(re.findall(r"job_name: (\S+)", text), ["ashlar"], name)
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(RULES, folder)
                file = pathlib.Path(folder, name)
                file.write_text(text)
                done = subprocess.run(
                    ["promtool", "check", "config", file], capture_output=True, text=True, check=False
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_query_reads_one_job(self):
        """A daemon that a second job also scrapes must not count twice."""
        texts = [RULES.read_text()]
        for board in make_dashboards.boards().values():
            texts += [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        for text in texts:
            text = re.sub(r"^ *(#|summary:|runbook_url:).*$", "", text, flags=re.M)
            for name, selector in re.findall(r"(?<![\w:])((?:ashlar|process)_\w+)(\{[^}]*\})?", text):
                self.assertIn('job="ashlar"', selector, f"{name} in {text if len(text) < 400 else 'the rules'}")

    def test_the_pages_commands_leave_no_placeholder(self):
        page = (ROOT / "deploy/README.md").read_text()
        script, path = re.search(r"`sed -i (\S+) (prometheus/\S+)`", page).groups()
        rules = subprocess.run(
            ["sed", script, ROOT / "deploy" / path], capture_output=True, text=True, check=True
        ).stdout
        program, *arguments = re.search(r"`(grafana/make_dashboards\.py) FOLDER (\S+)`", page).groups()
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, ROOT / "deploy" / program, folder, *arguments], check=True)
            written = {file.stem: file.read_text() for file in pathlib.Path(folder).glob("*.json")}
        self.assertEqual(written.keys(), make_dashboards.boards().keys())
        for name, text in {path: rules, **written}.items():
            self.assertIn("https://YOURS/", text, name)
            self.assertNotIn("https://ashlar.example", text, name)

    def test_runbooks_name_commands_that_exist(self):
        commands = (ROOT / "tools/ashlarctl/commands.cc").read_text()
        for command in set(re.findall(r"`ashlarctl ([a-z-]+)", (ROOT / "docs/runbooks.md").read_text())):
            self.assertIn(f'{{"{command}"', re.sub(r"\{\s+", "{", commands), command)


if __name__ == "__main__":
    unittest.main()
