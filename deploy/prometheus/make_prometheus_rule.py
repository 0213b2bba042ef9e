#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes deploy/kustomize/base/prometheusrule.yaml, the rules for the Prometheus operator, from ashlar.rules.yml beside this
file. It is committed; a test holds it to this script.

usage: make_prometheus_rule.py [--check]
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
RULES, OUT = HERE / "ashlar.rules.yml", HERE.parent / "kustomize/base/prometheusrule.yaml"
HEAD = """\
# For the Prometheus operator. Written by deploy/prometheus/make_prometheus_rule.py; change ashlar.rules.yml there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ashlar
spec:
"""


def text():
    lines = RULES.read_text().splitlines()
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines[lines.index("groups:") :])


def main():
    if "--check" not in sys.argv:
        OUT.write_text(text())
    elif OUT.read_text() != text():
        print(f"{OUT.name} is not what make_prometheus_rule.py writes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
