#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file. They are committed; a test holds them to this script.

usage: make_dashboards.py [--check]
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
TOKENS_PER_SECOND = "suffix: tokens/s"
NODE, TENANT = 'instance=~"$node"', 'instance=~"$node", tenant=~"$tenant"'


def p99(metric, by="", where=NODE):
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.99, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def median(metric, by="", where=NODE):
    return p99(metric, by, where).replace("0.99", "0.5", 1)


def rate(metric, by, where=NODE):
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def total(metric, by, where=NODE):
    return f"sum by ({by}) ({metric}{{{where}}})"


# Panels: title, unit, queries with their legends, and what else differs from a plain graph.
FLEET = [
    ("Tokens reused", "percentunit", [("ashlar:fleet_tokens_reused:ratio_rate5m", "")], {"type": "stat"}),
    ("GPU time saved in the last hour", "s", [("ashlar:fleet_saved_seconds:increase1h", "")], {"type": "stat"}),
    ("Nodes that answer", "short", [('sum(up{job="ashlar"})', "")], {"type": "stat"}),
    ("Errors that engines saw", "ops", [("sum(ashlar:failed_calls:rate5m)", "")],
     {"type": "stat", "red_from": 0.001}),
    ("Tokens reused by node", "percentunit", [("ashlar:node_tokens_reused:ratio_rate5m", "{{instance}}")], {}),
    ("Look-ups, 99th percentile", "s", [("ashlar:lookup_seconds:p99_5m", "{{instance}}")], {"red_from": 0.1}),
    ("How full the tiers are", "percentunit", [("ashlar:tier_used:ratio", "{{instance}} {{tier}}")], {}),
    ("Releases", "short", [("count by (version) (ashlar_build_info)", "{{version}}")], {}),
]
NODE_PANELS = [
    ("Tokens found and missed", TOKENS_PER_SECOND, [(rate("ashlar_hit_tokens_total", "tier"), "found in {{tier}}"),
                                        (rate("ashlar_miss_tokens_total", "reason"), "missed: {{reason}}")], {"stack": True}),
    ("Why tokens are missed", TOKENS_PER_SECOND, [(rate("ashlar_miss_tokens_total", "reason"), "{{reason}}")], {}),
    ("Prompts resumed, tokens (median)", "short",
     [(median("ashlar_prefix_resumed_tokens", "source"), "{{source}}")], {}),
    ("Memory and disk", "bytes", [(total("ashlar_tier_used_bytes", "tier"), "{{tier}} used"),
                                  (total("ashlar_tier_held_bytes", "tier"), "{{tier}} held"),
                                  (total("ashlar_tier_capacity_bytes", "tier"), "{{tier}} budget")], {}),
    ("Copies between tiers", "Bps", [(rate("ashlar_copied_bytes_total", "from, to"), "{{from}} to {{to}}")], {}),
    ("Degraded tiers", "short", [(f"ashlar_tier_degraded{{{NODE}}}", "{{instance}} {{tier}}")], {"red_from": 1}),
    ("Objects that memory alone has", "bytes", [(f"ashlar_unsaved_bytes{{{NODE}}}", "{{instance}}")], {}),
    ("Evictions", "ops", [(rate("ashlar_evictions_total", "tier, policy, reason"), "{{tier}}: {{reason}} by {{policy}}")], {}),
    ("Age at eviction (median)", "s", [(median("ashlar_eviction_age_seconds", "tier"), "{{tier}}")], {}),
    ("Unused before eviction (median)", "s", [(median("ashlar_eviction_idle_seconds", "tier"), "{{tier}}")], {}),
    ("Bytes landed and published", "Bps", [(rate("ashlar_landed_bytes_total", "instance"), "landed {{instance}}"),
                                           (rate("ashlar_published_bytes_total", "instance"), "published {{instance}}")], {}),
    ("Calls by method, 99th percentile", "s", [(p99("ashlar_rpc_duration_seconds", "method"), "{{method}}")], {}),
    ("Calls", "ops", [(rate("ashlar_rpcs_total", "method, code"), "{{method}} {{code}}")], {}),
    ("Turns of the metadata thread, 99th percentile", "s", [(p99("ashlar_metadata_turn_seconds"), "turn")], {"red_from": 0.01}),
    ("Queues", "short", [(f"ashlar_queue_depth{{{NODE}}}", "{{instance}} {{queue}}")], {}),
    ("Work refused by full queues", "ops", [(rate("ashlar_queue_rejections_total", "queue"), "{{queue}}")], {"red_from": 0.001}),
    ("Engines", "short", [(f"ashlar_sessions{{{NODE}}}", "sessions {{instance}}")], {}),
    ("Leases, landings, compositions", "short", [(f"ashlar_leases{{{NODE}}}", "leases"), (f"ashlar_landings{{{NODE}}}", "landings"),
                                                 (f"ashlar_compositions{{{NODE}}}", "compositions")], {}),
    ("Peers", "short", [(f"ashlar_cluster_members{{{NODE}}}", "members {{instance}}"),
                        (f"ashlar_peers_connected{{{NODE}}}", "connected {{instance}}")], {}),
    ("Bytes between nodes", "Bps", [(rate("ashlar_transport_bytes_total", "direction"), "{{direction}}")], {}),
    ("Objects asked of other nodes", "ops", [(rate("ashlar_remote_objects_total", "outcome"), "{{outcome}}")], {}),
    ("Directory", "short", [(f"ashlar_directory_entries{{{NODE}}}", "entries {{instance}}"),
                            (f"ashlar_directory_queued{{{NODE}}}", "waiting {{instance}}")], {}),
    ("Second holders asked, by who was first", "ops", [(rate("ashlar_remote_hedges_total", "outcome"), "{{outcome}}")], {}),
    ("RDMA asked for and not used", "short", [(f"ashlar_transport_slow_fabric{{{NODE}}}", "{{instance}}")], {"red_from": 1}),
    ("Checksums verified by the scrub", "Bps", [(rate("ashlar_scrub_bytes_total", "tier"), "{{tier}}")], {}),
    ("Damaged copies that the scrub dropped", "ops", [(rate("ashlar_scrub_damaged_total", "tier"), "{{tier}}")], {"red_from": 0.0001}),
    ("Waiting to be forgotten, the oldest", "s",
     [(f"max by (instance, where) (ashlar_forgettings_oldest_seconds{{{NODE}}})", "{{instance}} {{where}}")], {"red_from": 300}),
]
TENANT_PANELS = [
    ("Tokens reused", "percentunit", [("ashlar:tokens_reused:ratio_rate5m{" + TENANT + "}", "{{instance}} {{tenant}}")], {}),
    ("GPU time saved in an hour", "s", [("ashlar:saved_seconds:increase1h{" + TENANT + "}", "{{instance}} {{tenant}}")], {}),
    ("Why its tokens are missed", TOKENS_PER_SECOND, [(rate("ashlar_miss_tokens_total", "tenant, reason", TENANT), "{{tenant}} {{reason}}")], {}),
    ("Its memory and disk", "bytes", [(total("ashlar_tier_used_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} used"),
                                      (total("ashlar_tier_capacity_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} budget")], {}),
    ("Its public and private pools", "bytes",
     [(total("ashlar_pool_used_bytes", "tenant, tier, pool", TENANT), "{{tenant}} {{tier}} {{pool}}")], {}),
    ("Publishing, by the answer", "ops", [(rate("ashlar_reserve_outcomes_total", "tenant, outcome", TENANT), "{{tenant}} {{outcome}}")], {}),
    ("States committed", "ops", [(rate("ashlar_prefix_commits_total", "tenant, outcome", TENANT), "{{tenant}} {{outcome}}")], {}),
    ("Its regions", "bytes", [(f"ashlar_region_bytes{{{TENANT}}}", "{{tenant}}")], {}),
    ("Corrupt copies dropped", "ops", [(rate("ashlar_checksum_failures_total", "tenant", TENANT), "{{tenant}}")], {"red_from": 0.0001}),
]
DASHBOARDS = {
    "ashlar-fleet": ("Ashlar: fleet", FLEET, []),
    "ashlar-node": ("Ashlar: node", NODE_PANELS, ["node"]),
    "ashlar-tenant": ("Ashlar: tenant", TENANT_PANELS, ["node", "tenant"]),
}
VARIABLES = {"node": 'label_values(up{job="ashlar"}, instance)', "tenant": "label_values(ashlar_landed_bytes_total, tenant)"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


def panel(number, title, unit, queries, options):
    steps = [{"color": "green", "value": None}]
    if "red_from" in options:
        steps.append({"color": "red", "value": options["red_from"]})
    kind = options.get("type", "timeseries")
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if options.get("stack") else {"fillOpacity": 0}
    if "red_from" in options and kind == "timeseries":
        custom["thresholdsStyle"] = {"mode": "line"}
    return {
        "id": number + 1,
        "title": title,
        "type": kind,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom if kind == "timeseries" else {},
                                     "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
        "targets": [{"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend or "__auto"}
                    for i, (expr, legend) in enumerate(queries)],
    }


def dashboard(uid, title, panels, variables):
    chosen = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    chosen += [{"name": name, "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "query": VARIABLES[name], "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
                "current": {"text": "All", "value": "$__all"}} for name in variables]
    return {"uid": uid, "title": title, "tags": ["ashlar"], "schemaVersion": 38, "version": 1, "editable": True,
            "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "templating": {"list": chosen},
            "panels": [panel(i, *each) for i, each in enumerate(panels)]}


def main():
    stale = []
    for uid, (title, panels, variables) in DASHBOARDS.items():
        file, text = HERE / f"{uid}.json", json.dumps(dashboard(uid, title, panels, variables), indent=1) + "\n"
        if "--check" in sys.argv:
            stale += [] if file.exists() and file.read_text() == text else [file.name]
        else:
            file.write_text(text)
    if stale:
        print(f"not what make_dashboards.py writes: {', '.join(stale)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
