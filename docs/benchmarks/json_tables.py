"""The tables of pages in docs/benchmarks that come from a tool's JSON, which lies beside the page."""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def size(count):
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def mebibytes(count):
    return f"{count / (1 << 20):.1f}"


def transfer():
    rows = [["op", "link", "bytes", "GB/s", "p50 µs", "p99 µs", "cpu s/GB", "ratio", "to ucx_perftest"]]
    for case in read("transfer")["cases"]:
        perftest = case["ratio_perftest"]
        rows.append([case["op"], case["link"], size(case["bytes"]), f"{case['gbps']:.2f}", f"{case['p50_us']:.0f}",
                     f"{case['p99_us']:.0f}", f"{case['cpu_s_per_gb']:.2f} / {case['raw_cpu_s_per_gb']:.2f}",
                     f"{case['ratio']:.2f}", "–" if perftest is None else f"{perftest:.2f}"])
    return rows


def router_rows(cases, first):
    rows = [[first, "TTFT ms", "bound ms", "transfer ms", "TTFT / (bound + transfer)", "combine ms", "speed-up",
             "segments elsewhere"]]
    for case in cases:
        rows.append([str(case["workers"]), f"{case['ttft_ms']:.0f}", f"{case['bound_ms']:.0f}",
                     f"{case['transfer_ms']:.1f}" if case["transfer_ms"] else "–", f"{case['of_it']:.3f}",
                     f"{case['combine_ms']:.1f}", f"{case['speed_up']:.2f}", str(case["elsewhere"])])
    return rows


def router():
    return router_rows(read("router")["cases"], "workers")


def router_mixed():
    return router_rows(read("router")["mixed_cases"], "workers, mixed lengths")


def mirror():
    found = read("mirror")
    look_ups = (f"{found['lookup_empty_ms']:.2f}, {found['lookup_full_ms']:.2f} ({found['lookup_ratio']:.2f} times; "
                "bar 1.2)")
    return [["eight daemons and a million entries", ""],
            ["announcements a second, of all, mirrored by all eight",
             f"{found['announcements_per_second']:,.0f} ({found['announce_seconds']:.1f} s for all)"],
            ["a daemon that starts anew mirrors all, s", f"{found['mirror_seconds']:.1f}"],
            ["resident memory of a daemon: without, with the mirror, MiB",
             f"{mebibytes(found['resident_bytes_before'])}, {mebibytes(found['resident_bytes'])}"],
            ["the mirror by the daemon's own count, MiB", mebibytes(found["mirror_bytes"])],
            ["etcd: processor seconds while all is announced; while one daemon reads all",
             f"{found['etcd_cpu_announcing_s']:.1f}; {found['etcd_cpu_reading_s']:.1f}"],
            ["etcd's resident memory, MiB", f"{found['etcd_resident_bytes'] / (1 << 20):.0f}"],
            ["look-up of a prompt of 128 k tokens in segments of 2,048, found nowhere: median without, with the full "
             "mirror, ms", look_ups]]


MODELS = {"qwen3_5": "Qwen3.5", "qwen3": "Qwen3"}
VARIANTS = {"vllm": "vLLM's own prefix cache", "ashlar": "with Ashlar", "lmcache": "with LMCache"}


def vllm_lengths():
    kinds = ["without", "cold", "dram", "ssd"]
    rows = [["model", "tokens", "blocks", "prompts", *kinds, "without ÷ dram", "added, ms", "added, 95 %"]]
    for one in read("vllm")["lengths"]:
        rows.append([MODELS[one["model"]], str(one["tokens"]), f"{one['blocks']:g}", str(one["repeats"]),
                     *(f"{one[f'{kind}_ms']:.0f}" for kind in kinds), f"{one['without_ms'] / one['dram_ms']:.1f}",
                     f"{one['added_ms']:.1f}", f"{one['added_low_ms']:.1f} to {one['added_high_ms']:.1f}"])
    return rows


def vllm_rates():
    rows = [["model", "variant", "requests a second", "requests", "median", "90 %", "tokens from outside"]]
    for one in read("vllm")["rates"]:
        if one["variant"] in VARIANTS and "did_not_run" not in one:
            rows.append([MODELS[one["model"]], VARIANTS[one["variant"]], f"{one['qps']:g}", str(one["requests"]),
                         f"{one['ttft_p50_ms']:,.0f}", f"{one['ttft_p90_ms']:,.0f}", f"{one['external_hit_tokens']:,}"])
    return rows


# Ways by their names in quality.json, and by those of the table of sizes.
WAYS = {"full recompute": "recompute", "seams of 0, and 3 for the convolution": "seams 0 (head 3)", "seams of 4": "4",
        "seams of 8": "8", "seams of 16": "16", "seams of 32": "32", "head of one page": "head 16, tail 0",
        "naive addition, seams of 8": "naive, 8", "stale keys alone, seams of 8": "keys alone, 8"}


def quality_sizes():
    rows = [["segments × tokens", "answers", *WAYS.values()]]
    for cell in read("quality")["cells"]:
        found = [cell["accuracy"].get(way) for way in WAYS]
        rows.append([f"{cell['segments']} × {cell['segment_tokens']:,}", str(cell["answers"]),
                     *("–" if each is None else f"{each['all']:.1f}" for each in found)])
    return rows


def quality_ways():
    rows = [["way", "answers", "all", "recall", "copy", "points lost"]]
    pooled = read("quality")["pooled"]
    for way, found in ((way, pooled[way]) for way in WAYS):
        rows.append([way, f"{found['answers']:,}", *(f"{found[kind]:.1f}" for kind in ("all", "recall", "copy")),
                     f"{round(found['points_lost'], 1) + 0.0:.1f}"])  # + 0.0: no "-0.0"
    return rows


def quality_drift():
    """Of the last cell: the most segments of the most tokens."""
    drift = read("quality")["cells"][-1]["drift"]
    layers = list(next(iter(drift.values())))
    rows = [["way", *layers]]
    for way, found in ((way, drift[way]) for way in WAYS if way in drift):
        rows.append([way, *("below 1e-5" if found[layer]["l2"] < 1e-5 else
                            f"{found[layer]['l2']:.2f}, {found[layer]['angle_degrees']:.0f}°" for layer in layers)])
    return rows


# The page, and what its table holds. A table is known by its first line.
TABLES = [("transfer.md", transfer), ("router.md", router), ("router.md", router_mixed), ("directory.md", mirror),
          ("vllm.md", vllm_lengths), ("vllm.md", vllm_rates),
          ("quality.md", quality_sizes), ("quality.md", quality_ways), ("quality.md", quality_drift)]


def line(cells):
    return "| " + " | ".join(cells) + " |"


def with_tables(page, text):
    """The page's text with its tables as the JSON has them. ValueError: it has no such table."""
    lines = text.splitlines()
    for rows in (table() for name, table in TABLES if name == page):
        head = line(rows[0])
        if head not in lines:
            raise ValueError(f"{page}: no table that begins with {head}")
        begin = end = lines.index(head)
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        lines[begin:end] = [head, "|" + "---|" * len(rows[0]), *(line(row) for row in rows[1:])]
    return "\n".join(lines) + "\n"
