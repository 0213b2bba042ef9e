#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one difference at a time between a page, sources and a daemon's metrics: check_metrics must find it."""

import unittest

import check_metrics

PAGE = """| metric | type | labels | meaning | when to act |
|---|---|---|---|---|
| `ashlar_hits_total` | counter | tenant, kind | found | – |
| `ashlar_tier_copied_bytes_total` | counter | tenant, from | copied | – |
| `ashlar_turn_seconds` | histogram | – | turns | – |
| `ashlar_leases` | gauge | – | leases | many: few |
"""
SOURCE = """
  Counters<Kind> hits{CounterFamily("ashlar_hits_total", "Segments "
                                    "found"), tenants, {"kind"}};
  Family<Counter>& copied_family = CounterFamily("ashlar_tier_copied_bytes_total", "Bytes");
  Histogram& turn = prometheus::BuildHistogram().Name("ashlar_turn_seconds").Help("Turns").Register(*registry).Add({});
  Gauge& leases = SingleGauge("ashlar_leases", "Leases");
  copied_family
      .Add({{"tenant", name}, {"from", tier}});
"""
LIVE = """# HELP ashlar_turn_seconds Turns
# TYPE ashlar_turn_seconds histogram
ashlar_turn_seconds_count 4
ashlar_turn_seconds_bucket{le="+Inf"} 4
# TYPE ashlar_leases gauge
ashlar_leases 0
"""
WHERE = "docs/metrics.md: "

# Each planted error: the text, the old and the new words, and the message.
PLANTED = [
    ("page", "| `ashlar_leases` | gauge | – | leases | many: few |\n", "", "no row for ashlar_leases (gauge)"),
    ("page", "gauge", "counter", "ashlar_leases is a gauge, not a counter"),
    ("page", "tenant, kind", "tenant", "ashlar_hits_total has the labels kind, tenant"),
    ("page", "tenant, from", "tenant, to", "ashlar_tier_copied_bytes_total has the labels from, tenant"),
    ("page", "histogram | –", "histogram | queue", "ashlar_turn_seconds has the labels –"),
    (
        "source",
        '"ashlar_leases", "Leases"',
        '"ashlar_leases", "Leases"); SingleGauge("ashlar_new", "New"',
        "no row for ashlar_new (gauge)",
    ),
    ("source", 'SingleGauge("ashlar_leases"', 'SingleGauge("ashlar_grants"', "no row for ashlar_grants (gauge)"),
    (
        "source",
        "copied_family\n",
        "copied\n",
        "neither sources nor a daemon say which labels ashlar_tier_copied_bytes_total has",
    ),
    ("live", "ashlar_leases 0", 'ashlar_leases{tenant="a"} 0', "ashlar_leases has the labels tenant"),
    ("live", "ashlar_leases gauge", "ashlar_leases counter", "ashlar_leases is a counter, not a gauge"),
]


class CheckMetricsTest(unittest.TestCase):
    def test_a_correct_page_passes(self):
        self.assertEqual(check_metrics.check(PAGE, SOURCE, LIVE), [])

    def test_without_a_daemon_only_sources_are_compared(self):
        self.assertEqual(check_metrics.check(PAGE, SOURCE, ""), [])
        self.assertEqual(
            check_metrics.check(PAGE.replace("tenant, kind", "kind"), SOURCE, ""),
            [WHERE + "ashlar_hits_total has the labels kind, tenant"],
        )

    def test_each_difference_is_found(self):
        for which, right, planted, expected in PLANTED:
            with self.subTest(expected):
                texts = {"page": PAGE, "source": SOURCE, "live": LIVE}
                self.assertIn(right, texts[which])
                texts[which] = texts[which].replace(right, planted, 1)
                found = check_metrics.check(texts["page"], texts["source"], texts["live"])
                self.assertIn(WHERE + expected, found)

    def test_a_row_without_a_metric_is_found(self):
        row = "| `ashlar_gone` | gauge | – | gone | – |\n"
        self.assertEqual(check_metrics.check(PAGE + row, SOURCE, LIVE), [WHERE + "the daemon has no ashlar_gone"])

    def test_a_reason_without_a_row_is_found(self):
        outcomes = 'case MissReason::kNone:\n  return "none";\ncase MissReason::kBusy:\n  return "busy";\n'
        self.assertEqual(check_metrics.missing_reasons("|---|\n| `busy` | full | wait |\n", outcomes), [])
        self.assertEqual(
            check_metrics.missing_reasons("|---|\n", outcomes), ["docs/misses.md: no row for the reason busy"]
        )


if __name__ == "__main__":
    unittest.main()
