# SPDX-License-Identifier: Apache-2.0
"""The dashboards: boards, their rows by topic, and the panels of each row."""

import dataclasses

# By job: a daemon that another job scrapes as well would count twice, and other programs have metrics of the process, too.
NODE, TENANT = 'job="ashlar", instance=~"$node"', 'job="ashlar", instance=~"$node", tenant=~"$tenant"'
# What the recording rules sum is of that job only, and has no label of it.
RECORDED_NODE, RECORDED_TENANT = 'instance=~"$node"', 'instance=~"$node", tenant=~"$tenant"'
TOKENS, OBJECTS, CALLS = "suffix: tokens/s", "suffix: objects/s", "suffix: calls/s"


@dataclasses.dataclass
class Panel:
    title: str
    unit: str
    queries: list  # of (expression, legend)
    says: str = ""  # before what docs/metrics.md says of its metrics
    type: str = "timeseries"  # or stat
    stack: bool = False
    log: bool = False  # a scale for values that are far apart
    orange_from: float | None = None
    red_from: float | None = None
    red_below: float | None = None
    alerts: tuple = ()  # whose runbooks it links to


def quantile(share, metric, by="", where=NODE):
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def p99(metric, by="", where=NODE):
    return quantile(0.99, metric, by, where)


def median(metric, by="", where=NODE):
    return quantile(0.5, metric, by, where)


def rate(metric, by, where=NODE):
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def total(metric, by, where=NODE):
    return f"sum by ({by}) ({metric}{{{where}}})"


def gauge(metric, legend, where=NODE):
    return (f"{metric}{{{where}}}", legend)


def eviction_panels(where):
    by_policy = "{{tier}} by {{policy}}"
    return [
        Panel(
            "Evictions",
            OBJECTS,
            [(rate("ashlar_evictions_total", "tier, policy, reason", where), "{{tier}}: {{reason}} by {{policy}}")],
        ),
        Panel(
            "Age at eviction (median)",
            "s",
            [(median("ashlar_eviction_age_seconds", "tier, policy", where), by_policy)],
            "Young and by price or lru: too little room. By ttl: as the tenant's `ttl_seconds` says.",
        ),
        Panel(
            "Unused before eviction (median)",
            "s",
            [(median("ashlar_eviction_idle_seconds", "tier, policy", where), by_policy)],
        ),
    ]


LANDING = NODE + ', method=~"Land|LookupAndLand"'
FLEET = {
    "What it saves": [
        Panel(
            "Tokens reused",
            "percentunit",
            [("ashlar:fleet_tokens_reused:ratio_rate5m", "")],
            "The share of prompts' tokens that was found, on all nodes, in five minutes. What is good depends on the load: compare it with a week ago.",
            type="stat",
            alerts=("AshlarHitRateFell",),
        ),
        Panel(
            "GPU time saved in the last hour",
            "s",
            [("ashlar:fleet_saved_seconds:increase1h", "")],
            "Seconds of computing that hits stood for, by the rates that engines declare. Seams are included.",
            type="stat",
        ),
        Panel(
            "Errors that engines saw",
            "suffix: calls",
            [("sum(ashlar:failed_calls:increase15m)", "")],
            "Calls of the last 15 minutes that ended with INTERNAL, UNKNOWN or DATA_LOSS. Engines compute what these would have brought; it is always 0 in good health.",
            type="stat",
            red_from=0.001,
            alerts=("AshlarFailedCalls",),
        ),
        Panel(
            "Tokens reused by node",
            "percentunit",
            [("ashlar:node_tokens_reused:ratio_rate5m", "{{instance}}")],
            "The share of prompts' tokens that each node found. A node far below the others is new, or gets prompts that others have the texts of.",
            alerts=("AshlarHitRateFell",),
        ),
        Panel(
            "GPU time saved in an hour, by node",
            "s",
            [("sum by (instance) (ashlar:saved_seconds:increase1h)", "{{instance}}")],
            "Seconds of computing that hits stood for, by the rates that engines declare.",
        ),
        Panel(
            "Time to first token, by node",
            "s",
            [
                ("ashlar:lookup_saved_seconds:ratio_rate5m", "saved {{instance}}"),
                ("ashlar:landing_seconds:p99_5m", "added {{instance}}"),
            ],
            "Saved: computing that the hits of a look-up stand for, the mean. Added: until what was found has landed, the 99th percentile. The cache pays while saved is above added.",
            log=True,
        ),
    ],
    "Nodes": [
        Panel(
            "Nodes that answer",
            "short",
            [('sum(up{job="ashlar"})', "answer"), ('count(up{job="ashlar"})', "are scraped")],
            "The daemons that Prometheus scrapes, and those of them that answered last.",
            type="stat",
            alerts=("AshlarDown", "AshlarNoTargets", "AshlarPodsNotReady"),
        ),
        Panel(
            "Look-ups, 99th percentile",
            "s",
            [("ashlar:lookup_seconds:p99_5m", "{{instance}}")],
            "The time that a look-up adds to the time to first token, without the landing behind it.",
            red_from=0.1,
            alerts=("AshlarSlowLookups",),
        ),
        Panel(
            "How full the tiers are",
            "percentunit",
            [("ashlar:tier_used:ratio", "{{instance}} {{tier}}")],
            "What cached objects take of the tenants' budgets. A full tier is a good one: eviction makes room.",
        ),
        Panel(
            "Releases",
            "short",
            [('count by (version) (ashlar_build_info{job="ashlar"})', "{{version}}")],
            alerts=("AshlarVersionsDiffer",),
        ),
        Panel(
            "Time since the start",
            "s",
            [('time() - process_start_time_seconds{job="ashlar"}', "{{instance}}")],
            "A daemon that starts again and again loses each time what memory alone has.",
            alerts=("AshlarRestarts",),
        ),
        Panel("Memory of the daemons", "bytes", [('process_resident_memory_bytes{job="ashlar"}', "{{instance}}")]),
    ],
}
NODE_ROWS = {
    "Hits and misses": [
        Panel(
            "Tokens found and missed",
            TOKENS,
            [
                (rate("ashlar_hit_tokens_total", "tier"), "found in {{tier}}"),
                (rate("ashlar_miss_tokens_total", "reason"), "missed: {{reason}}"),
            ],
            stack=True,
        ),
        Panel(
            "Why tokens are missed",
            TOKENS,
            [(rate("ashlar_miss_tokens_total", "reason"), "{{reason}}")],
            alerts=("AshlarHitRateFell",),
        ),
        Panel(
            "Prompts resumed, tokens (median)",
            "suffix: tokens",
            [(median("ashlar_prefix_resumed_tokens", "source"), "{{source}}")],
        ),
    ],
    "Time to first token": [
        Panel(
            "Time added and saved",
            "s",
            [
                (
                    "sum by (instance) (ashlar:lookup_saved_seconds:ratio_rate5m{" + RECORDED_NODE + "})",
                    "saved {{instance}}, mean",
                ),
                (median("ashlar_lookup_duration_seconds"), "look-up, median"),
                (p99("ashlar_lookup_duration_seconds"), "look-up, 99th"),
                (median("ashlar_rpc_duration_seconds", where=LANDING), "landing, median"),
                (p99("ashlar_rpc_duration_seconds", where=LANDING), "landing, 99th"),
            ],
            "What the hits of a look-up save of computing, beside what look-up and landing add.",
            log=True,
            alerts=("AshlarSlowLookups",),
        ),
        Panel(
            "Calls by method, 99th percentile",
            "s",
            [(p99("ashlar_rpc_duration_seconds", "method") + " > 0", "{{method}}")],
            log=True,
        ),
        Panel(
            "Turns of the metadata thread, 99th percentile",
            "s",
            [(p99("ashlar_metadata_turn_seconds"), "turn")],
            red_from=0.01,
        ),
    ],
    "Memory and disk": [
        Panel(
            "Memory and disk",
            "bytes",
            [
                (total("ashlar_tier_used_bytes", "tier"), "{{tier}} used"),
                (total("ashlar_tier_held_bytes", "tier"), "{{tier}} held"),
                (total("ashlar_tier_capacity_bytes", "tier"), "{{tier}} budget"),
            ],
        ),
        Panel("Copies between tiers", "Bps", [(rate("ashlar_copied_bytes_total", "from, to"), "{{from}} to {{to}}")]),
        Panel("Copies under way", "short", [gauge("ashlar_copies_under_way", "{{instance}}")]),
        Panel(
            "Objects fetched ahead of their need",
            OBJECTS,
            [(rate("ashlar_prefetched_total", "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Objects that memory alone has",
            "bytes",
            [gauge("ashlar_unsaved_bytes", "{{instance}}")],
            alerts=("AshlarUnsavedBytesGrow",),
        ),
        Panel(
            "Degraded tiers",
            "short",
            [gauge("ashlar_tier_degraded", "{{instance}} {{tier}}")],
            red_from=1,
            alerts=("AshlarTierDegraded",),
        ),
        Panel(
            "Reads and writes that failed",
            "suffix: errors/s",
            [(rate("ashlar_tier_errors_total", "tier"), "{{tier}}")],
            red_from=0.0001,
            alerts=("AshlarTierErrors", "AshlarDatabaseSetAside"),
        ),
        Panel("Checksums verified by the scrub", "Bps", [(rate("ashlar_scrub_bytes_total", "tier"), "{{tier}}")]),
        Panel(
            "Damaged copies that the scrub dropped",
            "suffix: copies/s",
            [(rate("ashlar_scrub_damaged_total", "tier"), "{{tier}}")],
            red_from=0.0001,
            alerts=("AshlarCorruption",),
        ),
    ],
    "Evictions": eviction_panels(NODE),
    "Engines": [
        Panel(
            "Bytes landed and published",
            "Bps",
            [
                (rate("ashlar_landed_bytes_total", "instance"), "landed {{instance}}"),
                (rate("ashlar_published_bytes_total", "instance"), "published {{instance}}"),
            ],
        ),
        Panel(
            "Calls",
            CALLS,
            [(rate("ashlar_rpcs_total", "method, code") + " > 0", "{{method}} {{code}}")],
            alerts=("AshlarFailedCalls",),
        ),
        Panel("Engines", "short", [gauge("ashlar_sessions", "sessions {{instance}}")]),
        Panel(
            "Leases, landings, compositions",
            "short",
            [
                gauge("ashlar_leases", "leases {{instance}}"),
                gauge("ashlar_landings", "landings {{instance}}"),
                gauge("ashlar_compositions", "compositions {{instance}}"),
            ],
        ),
        Panel("Queues", "short", [gauge("ashlar_queue_depth", "{{instance}} {{queue}}")]),
        Panel(
            "Work refused by full queues",
            "suffix: jobs/s",
            [(rate("ashlar_queue_rejections_total", "queue"), "{{queue}}")],
            red_from=0.001,
            alerts=("AshlarQueueRejections",),
        ),
    ],
    "Other nodes: peers and transports": [
        Panel(
            "Peers",
            "short",
            [
                gauge("ashlar_cluster_members", "members {{instance}}"),
                gauge("ashlar_peers_connected", "connected {{instance}}"),
            ],
            alerts=("AshlarPeersMissing",),
        ),
        Panel(
            "Connections for bytes, by transport", "short", [gauge("ashlar_transport_peers", "{{instance}} {{path}}")]
        ),
        Panel(
            "Bytes between nodes",
            "Bps",
            [
                (rate("ashlar_transport_bytes_total", "direction"), "{{direction}}"),
                (rate("ashlar_transport_read_bytes_total", "instance"), "by network card, {{instance}}"),
            ],
        ),
        Panel(
            "Copies from each node, as measured",
            "Bps",
            [(f"avg by (peer) (ashlar_peer_rate_bytes_per_second{{{NODE}}} > 0)", "{{peer}}")],
        ),
        Panel(
            "Failed calls and copies, by node",
            "suffix: failures/s",
            [(rate("ashlar_peer_failures_total", "peer, type"), "{{peer}}: {{type}}")],
            orange_from=0.01,
        ),
        Panel(
            "Objects asked of other nodes", OBJECTS, [(rate("ashlar_remote_objects_total", "outcome"), "{{outcome}}")]
        ),
        Panel(
            "Look-ups that did not wait for all nodes",
            "suffix: look-ups/s",
            [(rate("ashlar_remote_late_lookups_total", "instance"), "{{instance}}")],
            orange_from=0.01,
        ),
        Panel(
            "Second holders asked, by who was first",
            "suffix: pieces/s",
            [(rate("ashlar_remote_hedges_total", "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Pieces that no node delivered",
            "suffix: pieces/s",
            [(rate("ashlar_remote_lost_pieces_total", "instance"), "{{instance}}")],
            red_from=0.001,
        ),
        Panel(
            "Nodes and requests that were refused",
            "suffix: refusals/s",
            [
                (rate("ashlar_peer_refusals_total", "reason"), "node: {{reason}}"),
                (rate("ashlar_transport_refused_total", "instance"), "no right, {{instance}}"),
                (rate("ashlar_transport_malformed_total", "instance"), "malformed, {{instance}}"),
            ],
            red_from=0.0001,
            alerts=("AshlarPeersRefused", "AshlarIntruder", "AshlarBytesRefused"),
        ),
        Panel(
            "RDMA asked for and not used",
            "short",
            [gauge("ashlar_transport_slow_fabric", "{{instance}}")],
            red_from=1,
            alerts=("AshlarSlowFabric",),
        ),
    ],
    "Other nodes: directory": [
        Panel(
            "etcd is reached",
            "short",
            [gauge("ashlar_directory_connected", "{{instance}}")],
            red_below=1,
            alerts=("AshlarDirectoryLost",),
        ),
        Panel("Objects of other nodes that are known", "short", [gauge("ashlar_directory_entries", "{{instance}}")]),
        Panel("Announcements that wait", "short", [gauge("ashlar_directory_queued", "{{instance}}")]),
        Panel(
            "Announcements dropped",
            "suffix: announcements/s",
            [(rate("ashlar_directory_dropped_total", "instance"), "{{instance}}")],
            orange_from=0.01,
        ),
        Panel(
            "Waiting to be erased, the oldest",
            "s",
            [(f"max by (instance, where) (ashlar_erasures_oldest_age_seconds{{{NODE}}})", "{{instance}} {{where}}")],
            red_from=300,
            alerts=("AshlarErasureStuck",),
        ),
    ],
    "Process": [
        Panel(
            "Memory of the process",
            "bytes",
            [gauge("process_resident_memory_bytes", "{{instance}}")],
            alerts=("AshlarDown",),
        ),
        Panel("CPU time", "suffix: cores", [(rate("process_cpu_seconds_total", "instance"), "{{instance}}")]),
        Panel(
            "Open files",
            "short",
            [gauge("process_open_fds", "open {{instance}}"), gauge("process_max_fds", "limit {{instance}}")],
            log=True,
        ),
        Panel(
            "Starts in an hour",
            "short",
            [(f"changes(process_start_time_seconds{{{NODE}}}[1h])", "{{instance}}")],
            orange_from=1,
            red_from=3,
            alerts=("AshlarRestarts",),
        ),
        Panel(
            "The last reload was taken over",
            "short",
            [gauge("ashlar_config_last_reload_successful", "{{instance}}")],
            red_below=1,
            alerts=("AshlarReloadRefused",),
        ),
        Panel(
            "Draining", "short", [gauge("ashlar_draining", "{{instance}}")], orange_from=1, alerts=("AshlarDraining",)
        ),
    ],
}
TENANT_ROWS = {
    "What it saves": [
        Panel(
            "Tokens reused",
            "percentunit",
            [("ashlar:tokens_reused:ratio_rate5m{" + RECORDED_TENANT + "}", "{{instance}} {{tenant}}")],
            "The share of the tenant's tokens that was found.",
            alerts=("AshlarHitRateFell",),
        ),
        Panel(
            "GPU time saved in an hour",
            "s",
            [("ashlar:saved_seconds:increase1h{" + RECORDED_TENANT + "}", "{{instance}} {{tenant}}")],
            "Seconds of computing that hits stood for, by the rates that the tenant's engines declare.",
        ),
        Panel(
            "Why its tokens are missed",
            TOKENS,
            [(rate("ashlar_miss_tokens_total", "tenant, reason", TENANT), "{{tenant}} {{reason}}")],
        ),
    ],
    "Its room": [
        Panel(
            "Its memory and disk",
            "bytes",
            [
                (total("ashlar_tier_used_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} used"),
                (total("ashlar_tier_capacity_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} budget"),
            ],
        ),
        Panel(
            "Its public and private pools",
            "bytes",
            [(total("ashlar_pool_used_bytes", "tenant, tier, pool", TENANT), "{{tenant}} {{tier}} {{pool}}")],
        ),
        Panel("Its regions", "bytes", [(f"ashlar_region_bytes{{{TENANT}}}", "{{instance}} {{tenant}}")]),
        Panel(
            "Memory that the machine refused",
            "suffix: arenas/s",
            [(rate("ashlar_memory_refusals_total", "tenant", TENANT), "{{tenant}}")],
            red_from=0.0001,
            alerts=("AshlarMemoryRefused",),
        ),
        Panel(
            "Work beyond its rates",
            CALLS,
            [(rate("ashlar_rate_refusals_total", "tenant, limit", TENANT), "{{tenant}} {{limit}}")],
        ),
    ],
    "Its evictions": eviction_panels(TENANT),
    "What it publishes": [
        Panel(
            "Publishing, by the answer",
            OBJECTS,
            [(rate("ashlar_reserve_outcomes_total", "tenant, outcome", TENANT), "{{tenant}} {{outcome}}")],
        ),
        Panel(
            "States committed",
            "suffix: states/s",
            [(rate("ashlar_prefix_commits_total", "tenant, outcome", TENANT), "{{tenant}} {{outcome}}")],
        ),
        Panel(
            "Corrupt copies dropped",
            "suffix: copies/s",
            [(rate("ashlar_checksum_failures_total", "tenant", TENANT), "{{tenant}}")],
            red_from=0.0001,
            alerts=("AshlarCorruption",),
        ),
    ],
}
# Title, variables, rows.
BOARDS = {
    "ashlar-fleet": ("Ashlar: fleet", [], FLEET),
    "ashlar-node": ("Ashlar: node", ["node"], NODE_ROWS),
    "ashlar-tenant": ("Ashlar: tenant", ["node", "tenant"], TENANT_ROWS),
}
