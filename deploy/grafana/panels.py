# SPDX-License-Identifier: Apache-2.0
"""The dashboards: boards, their rows by topic, and the panels of each row."""

import dataclasses

# Select one job: a daemon scraped by two jobs would count twice, and other programs export process metrics, too.
NODE, TENANT = 'job="ashlar", instance=~"$node"', 'job="ashlar", instance=~"$node", tenant=~"$tenant"'
# Recorded series cover this job only and have no job label.
RECORDED_NODE, RECORDED_TENANT = 'instance=~"$node"', 'instance=~"$node", tenant=~"$tenant"'
TOKENS, OBJECTS, CALLS = "suffix: tokens/s", "suffix: objects/s", "suffix: calls/s"


@dataclasses.dataclass
class Panel:
    title: str
    unit: str
    queries: list  # of (expression, legend)
    says: str = ""  # text before the description of docs/metrics.md
    type: str = "timeseries"  # or stat
    stack: bool = False
    log: bool = False  # logarithmic scale
    orange_from: float | None = None
    red_from: float | None = None
    red_below: float | None = None
    alerts: tuple = ()  # links to their runbooks


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
            "Low values by price or lru: too little space. By ttl: the tenant's `ttl_seconds`.",
        ),
        Panel(
            "Unused before eviction (median)",
            "s",
            [(median("ashlar_eviction_idle_seconds", "tier, policy", where), by_policy)],
        ),
    ]


LANDING = NODE + ', method=~"Land|LookupAndLand"'
FLEET = {
    "Savings": [
        Panel(
            "Tokens reused",
            "percentunit",
            [("job:ashlar_hit_tokens:ratio_rate5m", "")],
            "The share of prompt tokens found in the cache, on all nodes, in five minutes. It depends on the load: compare it with a week ago.",
            type="stat",
            alerts=("AshlarHitRateDropped",),
        ),
        Panel(
            "GPU time saved in the last hour",
            "s",
            [("job:ashlar_saved_seconds:increase1h", "")],
            "Compute time saved by hits, by the engines' declared rates, seams included.",
            type="stat",
        ),
        Panel(
            "Failed calls",
            "suffix: calls",
            [("sum(instance:ashlar_failed_rpcs:increase15m)", "")],
            "Calls of the last 15 minutes that failed with INTERNAL, UNKNOWN or DATA_LOSS; normally 0. Engines treat them as misses.",
            type="stat",
            red_from=0.001,
            alerts=("AshlarFailedCalls",),
        ),
        Panel(
            "Tokens reused by node",
            "percentunit",
            [("instance:ashlar_hit_tokens:ratio_rate5m", "{{instance}}")],
            "The share of prompt tokens found in the cache by each node. A node far below the others is new, or receives prompts whose objects are on other nodes.",
            alerts=("AshlarHitRateDropped",),
        ),
        Panel(
            "GPU time saved in an hour, by node",
            "s",
            [("sum by (instance) (instance_tenant:ashlar_saved_seconds:increase1h)", "{{instance}}")],
            "Compute time saved by hits, by the engines' declared rates.",
        ),
        Panel(
            "Time to first token, by node",
            "s",
            [
                ("instance:ashlar_lookup_saved_seconds:ratio_rate5m", "saved {{instance}}"),
                ("instance:ashlar_landing_duration_seconds:p99_rate5m", "added {{instance}}"),
            ],
            "Saved: mean compute time that the hits of a lookup replace. Added: 99th percentile of the time until the hits have landed. The cache pays off while saved is above added.",
            log=True,
        ),
    ],
    "Nodes": [
        Panel(
            "Reachable nodes",
            "short",
            [('sum(up{job="ashlar"})', "reachable"), ('count(up{job="ashlar"})', "scraped")],
            "Daemons that Prometheus scrapes, and those that answered the last scrape.",
            type="stat",
            alerts=("AshlarDown", "AshlarNoTargets", "AshlarPodsNotReady"),
        ),
        Panel(
            "Lookup latency, 99th percentile",
            "s",
            [("instance:ashlar_lookup_duration_seconds:p99_rate5m", "{{instance}}")],
            "The time that a lookup adds to the time to first token, without the landing.",
            red_from=0.1,
            alerts=("AshlarSlowLookups",),
        ),
        Panel(
            "Tier usage",
            "percentunit",
            [("instance_tier:ashlar_tier_used_bytes:ratio", "{{instance}} {{tier}}")],
            "The share of the tenants' budgets used by cached objects. Full tiers are normal: eviction makes space.",
        ),
        Panel(
            "Daemons by version",
            "short",
            [('count by (version) (ashlar_build_info{job="ashlar"})', "{{version}}")],
            alerts=("AshlarVersionMismatch",),
        ),
        Panel(
            "Uptime",
            "s",
            [('time() - process_start_time_seconds{job="ashlar"}', "{{instance}}")],
            "A daemon loses data that only memory has at each unplanned restart.",
            alerts=("AshlarRestarts",),
        ),
        Panel("Resident memory", "bytes", [('process_resident_memory_bytes{job="ashlar"}', "{{instance}}")]),
    ],
}
NODE_ROWS = {
    "Hits and misses": [
        Panel(
            "Hit and missed tokens",
            TOKENS,
            [
                (rate("ashlar_hit_tokens_total", "tier"), "hit: {{tier}}"),
                (rate("ashlar_miss_tokens_total", "reason"), "missed: {{reason}}"),
            ],
            stack=True,
        ),
        Panel(
            "Missed tokens by reason",
            TOKENS,
            [(rate("ashlar_miss_tokens_total", "reason"), "{{reason}}")],
            alerts=("AshlarHitRateDropped",),
        ),
        Panel(
            "Resumed tokens per prompt (median)",
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
                    "sum by (instance) (instance:ashlar_lookup_saved_seconds:ratio_rate5m{" + RECORDED_NODE + "})",
                    "saved {{instance}}, mean",
                ),
                (median("ashlar_lookup_duration_seconds"), "lookup, median"),
                (p99("ashlar_lookup_duration_seconds"), "lookup, 99th"),
                (median("ashlar_rpc_duration_seconds", where=LANDING), "landing, median"),
                (p99("ashlar_rpc_duration_seconds", where=LANDING), "landing, 99th"),
            ],
            "Compute time that the hits of a lookup save, and the time that lookup and landing add.",
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
            "Metadata thread tasks, 99th percentile",
            "s",
            [
                (p99("ashlar_metadata_task_duration_seconds"), "task"),
                (p99("ashlar_metadata_task_cpu_seconds"), "CPU time"),
            ],
            red_from=0.01,
        ),
    ],
    "Memory and disk": [
        Panel(
            "Memory and disk",
            "bytes",
            [
                (total("ashlar_tier_used_bytes", "tier"), "{{tier}} used"),
                (total("ashlar_tier_allocated_bytes", "tier"), "{{tier}} allocated"),
                (total("ashlar_tier_capacity_bytes", "tier"), "{{tier}} budget"),
            ],
        ),
        Panel(
            "Copies between tiers", "Bps", [(rate("ashlar_tier_copied_bytes_total", "from, to"), "{{from}} to {{to}}")]
        ),
        Panel("Copies in progress", "short", [gauge("ashlar_tier_copies_in_progress", "{{instance}}")]),
        Panel(
            "Prefetched objects",
            OBJECTS,
            [(rate("ashlar_prefetched_objects_total", "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Data only in memory",
            "bytes",
            [gauge("ashlar_memory_only_bytes", "{{instance}}")],
            alerts=("AshlarMemoryOnlyBytesGrowing",),
        ),
        Panel(
            "Degraded tiers",
            "short",
            [gauge("ashlar_tier_degraded", "{{instance}} {{tier}}")],
            red_from=1,
            alerts=("AshlarTierDegraded",),
        ),
        Panel(
            "Failed reads and writes",
            "suffix: errors/s",
            [(rate("ashlar_tier_errors_total", "tier"), "{{tier}}")],
            red_from=0.0001,
            alerts=("AshlarTierErrors", "AshlarDatabaseQuarantined"),
        ),
        Panel("Scrubbed bytes", "Bps", [(rate("ashlar_scrub_bytes_total", "tier"), "{{tier}}")]),
        Panel(
            "Corrupt copies found by the scrub",
            "suffix: copies/s",
            [(rate("ashlar_scrub_corrupt_copies_total", "tier"), "{{tier}}")],
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
        Panel("Sessions", "short", [gauge("ashlar_sessions", "sessions {{instance}}")]),
        Panel(
            "Leases, landings, compositions",
            "short",
            [
                gauge("ashlar_leases", "leases {{instance}}"),
                gauge("ashlar_landings_in_progress", "landings {{instance}}"),
                gauge("ashlar_compositions_in_progress", "compositions {{instance}}"),
            ],
        ),
        Panel("Queues", "short", [gauge("ashlar_queue_depth", "{{instance}} {{queue}}")]),
        Panel(
            "Tasks rejected by full queues",
            "suffix: jobs/s",
            [(rate("ashlar_queue_rejected_total", "queue"), "{{queue}}")],
            red_from=0.001,
            alerts=("AshlarQueueFull",),
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
            "Data connections by protocol",
            "short",
            [gauge("ashlar_transport_connections", "{{instance}} {{protocol}}")],
        ),
        Panel(
            "Bytes between nodes",
            "Bps",
            [
                (rate("ashlar_transport_bytes_total", "direction"), "{{direction}}"),
                (rate("ashlar_transport_rma_read_bytes_total", "instance"), "by network card, {{instance}}"),
            ],
        ),
        Panel(
            "Bandwidth by peer",
            "Bps",
            [(f"avg by (peer) (ashlar_peer_bandwidth_bytes_per_second{{{NODE}}} > 0)", "{{peer}}")],
        ),
        Panel(
            "Failed calls and copies by peer",
            "suffix: failures/s",
            [(rate("ashlar_peer_failures_total", "peer, type"), "{{peer}}: {{type}}")],
            orange_from=0.01,
        ),
        Panel(
            "Objects requested from peers", OBJECTS, [(rate("ashlar_remote_requests_total", "outcome"), "{{outcome}}")]
        ),
        Panel(
            "Lookups without all peers' answers",
            "suffix: lookups/s",
            [(rate("ashlar_remote_lookup_timeouts_total", "instance"), "{{instance}}")],
            orange_from=0.01,
        ),
        Panel(
            "Hedged requests by outcome",
            "suffix: pieces/s",
            [(rate("ashlar_remote_hedges_total", "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Failed fetches",
            "suffix: pieces/s",
            [(rate("ashlar_remote_fetch_failures_total", "instance"), "{{instance}}")],
            red_from=0.001,
        ),
        Panel(
            "Rejected peers and requests",
            "suffix: rejections/s",
            [
                (rate("ashlar_peers_rejected_total", "reason"), "peer: {{reason}}"),
                (rate("ashlar_transport_requests_rejected_total", "instance"), "no grant, {{instance}}"),
                (rate("ashlar_transport_malformed_messages_total", "instance"), "malformed, {{instance}}"),
            ],
            red_from=0.0001,
            alerts=("AshlarPeersRejected", "AshlarMalformedMessages", "AshlarTransferRequestsRejected"),
        ),
        Panel(
            "RDMA fallback",
            "short",
            [gauge("ashlar_transport_rdma_fallback", "{{instance}}")],
            red_from=1,
            alerts=("AshlarRdmaFallback",),
        ),
    ],
    "Other nodes: directory": [
        Panel(
            "Connected to etcd",
            "short",
            [gauge("ashlar_directory_connected", "{{instance}}")],
            red_below=1,
            alerts=("AshlarDirectoryDisconnected",),
        ),
        Panel("Known objects of other nodes", "short", [gauge("ashlar_directory_entries", "{{instance}}")]),
        Panel("Queued announcements", "short", [gauge("ashlar_directory_queue_depth", "{{instance}}")]),
        Panel(
            "Dropped announcements",
            "suffix: announcements/s",
            [(rate("ashlar_directory_announcements_dropped_total", "instance"), "{{instance}}")],
            orange_from=0.01,
        ),
        Panel(
            "Oldest pending erasure",
            "s",
            [
                (
                    f"max by (instance, location) (ashlar_erasures_oldest_age_seconds{{{NODE}}})",
                    "{{instance}} {{location}}",
                )
            ],
            red_from=300,
            alerts=("AshlarErasureStuck",),
        ),
    ],
    "Process": [
        Panel(
            "Resident memory",
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
            "Restarts in an hour",
            "short",
            [(f"changes(process_start_time_seconds{{{NODE}}}[1h])", "{{instance}}")],
            orange_from=1,
            red_from=3,
            alerts=("AshlarRestarts",),
        ),
        Panel(
            "Last configuration reload accepted",
            "short",
            [gauge("ashlar_config_last_reload_successful", "{{instance}}")],
            red_below=1,
            alerts=("AshlarReloadFailed",),
        ),
        Panel(
            "Draining", "short", [gauge("ashlar_draining", "{{instance}}")], orange_from=1, alerts=("AshlarDraining",)
        ),
    ],
}
TENANT_ROWS = {
    "Savings": [
        Panel(
            "Tokens reused",
            "percentunit",
            [("instance_tenant:ashlar_hit_tokens:ratio_rate5m{" + RECORDED_TENANT + "}", "{{instance}} {{tenant}}")],
            "The share of the tenant's prompt tokens found in the cache.",
            alerts=("AshlarHitRateDropped",),
        ),
        Panel(
            "GPU time saved in an hour",
            "s",
            [("instance_tenant:ashlar_saved_seconds:increase1h{" + RECORDED_TENANT + "}", "{{instance}} {{tenant}}")],
            "Compute time saved by hits, by the declared rates of the tenant's engines.",
        ),
        Panel(
            "Missed tokens by reason",
            TOKENS,
            [(rate("ashlar_miss_tokens_total", "tenant, reason", TENANT), "{{tenant}} {{reason}}")],
        ),
    ],
    "Memory and disk": [
        Panel(
            "Used and budget",
            "bytes",
            [
                (total("ashlar_tier_used_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} used"),
                (total("ashlar_tier_capacity_bytes", "tenant, tier", TENANT), "{{tenant}} {{tier}} budget"),
            ],
        ),
        Panel(
            "Public and private pools",
            "bytes",
            [(total("ashlar_pool_used_bytes", "tenant, tier, pool", TENANT), "{{tenant}} {{tier}} {{pool}}")],
        ),
        Panel("Regions", "bytes", [(f"ashlar_region_bytes{{{TENANT}}}", "{{instance}} {{tenant}}")]),
        Panel(
            "Failed allocations",
            "suffix: arenas/s",
            [(rate("ashlar_allocation_failures_total", "tenant", TENANT), "{{tenant}}")],
            red_from=0.0001,
            alerts=("AshlarAllocationFailures",),
        ),
        Panel(
            "Rate-limited requests",
            CALLS,
            [(rate("ashlar_rate_limited_requests_total", "tenant, limit", TENANT), "{{tenant}} {{limit}}")],
        ),
    ],
    "Evictions": eviction_panels(TENANT),
    "Publishing": [
        Panel(
            "Reservations by outcome",
            OBJECTS,
            [(rate("ashlar_reservations_total", "tenant, outcome", TENANT), "{{tenant}} {{outcome}}")],
        ),
        Panel(
            "Committed states by outcome",
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
