# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of vLLM with and without Ashlar, on the CPU, with a small model of random weights.

    python3 examples/python/vllm_ttft.py --json ttft.json

Part 1, one engine: a prompt of each length that no cache has, then from dram, then from ssd after the daemon's restart.
`added_ms` is the median of the time that the connector adds to uncached prompts, with its 95 % confidence interval. All
times are in the file. Part 2, two engines at increasing rates of requests over shared documents: vLLM's own prefix
cache alone, with Ashlar, with LMCache (if `lmcache` is installed: a separate server to which both engines are
connected), with vLLM's OffloadingConnector and SimpleCPUOffloadConnector. Variants that do not run here are listed with
the reason. Needs the packages `ashlar` and `vllm`, and no network. docs/benchmarks/vllm.md has results.
"""

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import vllm

import ashlar.daemon

VARIANTS = ("vllm", "ashlar", "lmcache", "lmcache-copied", "lmcache-in-process", "offloading", "simple-offloading")
VOCABULARY = 512
WARM = 2  # prompts of each length that do not count: an engine's first step of a new length takes longer
SIZES = {"small": dict(hidden_size=64, intermediate_size=128), "medium": dict(hidden_size=256, intermediate_size=1024)}
MODELS = {
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=8, rope_theta=10000.0),
    "qwen3_5": dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
}


def model_folder(name, size):
    config = dict(
        MODELS[name],
        **SIZES[size],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        torch_dtype="bfloat16",
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    text = json.dumps(config, sort_keys=True)
    folder = pathlib.Path(tempfile.gettempdir()) / f"ashlar-ttft-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return str(folder)


def prompt(seed, tokens):
    source = random.Random(str(seed))
    return [source.randrange(VOCABULARY) for _ in range(tokens)]


class Server:
    """In the child process: one engine."""

    def __init__(self, settings):
        self.llm = vllm.LLM(**settings)
        self.sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
        self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], self.sampling, use_tqdm=False)

    def block(self):
        return self.llm.llm_engine.vllm_config.cache_config.block_size

    def erase(self):
        self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], self.sampling, use_tqdm=False)
        return self.llm.reset_prefix_cache()

    def first_token(self, tokens, segments=None):
        sampling = self.sampling
        if segments is not None:
            sampling = sampling.clone()
            sampling.extra_args = {"kv_transfer_params": {"ashlar_segments": segments}}
        began = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return time.perf_counter() - began

    def rest(self, seconds):
        time.sleep(seconds)

    def settle(self, seconds=60.0):
        """Steps as the loop of an engine in a process of its own does, while a connector has work."""
        scheduler, deadline = self.llm.llm_engine.engine_core.engine_core.scheduler, time.monotonic() + seconds
        while scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()

    def open_loop(self, arrivals, start_at):
        """arrivals: (seconds, tokens). Returns the time to the first token of each."""
        engine, waiting, since, took = self.llm.llm_engine, list(enumerate(arrivals)), {}, {}
        time.sleep(max(0.0, start_at - time.time()))
        began = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while waiting and waiting[0][1][0] <= now:
                number, (at, tokens) = waiting.pop(0)
                since[str(number)] = at
                engine.add_request(str(number), {"prompt_token_ids": tokens}, self.sampling)
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                if output.outputs and output.request_id not in took:
                    took[output.request_id] = time.perf_counter() - began - since[output.request_id]
        return [took[str(i)] for i in range(len(arrivals))]

    def external_hits(self):
        found = [m.value for m in self.llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
        return found[0] if found else 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory():
    """As the tcmalloc that vLLM preloads for its workers does. glibc returns large tensors to the kernel, so that the pages
    of the next ones are zeroed again: up to 40 ms of a step of 2,048 tokens, after steps of other sizes."""
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def import_once():
    """Imports modules for all engines, so that their garbage collections also skip these."""
    for name in (
        "vllm.v1.worker.cpu_worker",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.core.sched.scheduler",
    ):
        importlib.import_module(name)
    torch.cpu._init_amx()  # requests the matrix unit from the kernel; vLLM's attention uses it even if nothing else has
    gc.collect()
    gc.freeze()
    keep_freed_memory()


def calm_llvmlite():
    """vLLM reads `__dict__` of everything in a module; llvmlite, which LMCache loads, returns a function for it."""
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def named(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    ffi._lib_wrapper.__getattr__ = named


def serve(pipe, settings, environment):
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment)  # the process may have no children
    try:
        if "lmcache" in str(settings.get("kv_transfer_config")):
            calm_llvmlite()
        server = Server(settings)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            pipe.send((True, getattr(server, call[0])(*call[1:])))
        server.llm.llm_engine.engine_core.shutdown()
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


class Engine:
    """In the parent process. Engines are forked, so that vLLM is imported once."""

    def __init__(self, model, length, blocks, transfer=None, environment=None, **changes):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        settings = dict(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=length,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=blocks,
            seed=0,
            enable_prefix_caching=True,
            disable_log_stats=False,
        )
        settings.update(changes)
        if transfer is not None:
            settings["kv_transfer_config"] = transfer
        self.process = context.Process(target=serve, args=(theirs, settings, environment or {}), daemon=True)
        self.process.start()
        theirs.close()
        self.result(300)

    def result(self, timeout=600):
        if not self.pipe.poll(timeout):
            self.process.kill()
            raise TimeoutError("no answer from the engine")
        fine, value = self.pipe.recv()
        if not fine:
            raise RuntimeError(value)
        return value

    def send(self, *call):
        self.pipe.send(call)

    def call(self, *call):
        self.send(*call)
        return self.result()

    def close(self):
        try:
            self.pipe.send(None)
        except OSError:
            pass
        self.process.join(10)
        self.process.kill()
        self.process.join()


def ashlar_transfer(daemon, **options):
    return dict(
        kv_connector="AshlarConnector",
        kv_connector_module_path="ashlar.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket, **options),
    )


def median_and_bounds(differences):
    """Returns the median of paired differences, and the order statistics of its 95 % confidence interval."""
    ordered, count, spread = sorted(differences), len(differences), 0.98 * len(differences) ** 0.5
    return (
        statistics.median(ordered),
        ordered[max(0, int(count / 2 - spread))],
        ordered[min(count - 1, int(count / 2 + spread))],
    )


def one_length(bare, cached, daemon, seed, tokens, repeats):
    """Returns {kind: seconds of each turn}. Both engines have seen prompts of this length before; they alternate in
    going first."""
    times = {"without": [], "cold": [], "dram": [], "ssd": []}
    for turn in range(-WARM, repeats):
        text, found, pair = prompt((*seed, turn), tokens), {}, [("without", bare), ("cold", cached)]
        for kind, engine in pair[:: 1 if turn % 2 else -1]:
            engine.call("erase")
            found[kind] = engine.call("first_token", text)
        cached.call("rest", 0.3)
        cached.call("erase")
        found["dram"] = cached.call("first_token", text)
        if turn >= 0:
            for kind, seconds in found.items():
                times[kind].append(seconds)
    daemon.stop()
    daemon.start()
    cached.call("rest", 2.5)
    for turn in range(-WARM, repeats):
        cached.call("erase")
        seconds = cached.call("first_token", prompt((*seed, turn), tokens))
        if turn >= 0:
            times["ssd"].append(seconds)
    return times


def lengths_part(model, name, blocks_of_prompt, options, folder):
    rows, longest = [], max(blocks_of_prompt)
    with ashlar.daemon.start(dram="1GiB", ssd="2GiB", folder=folder) as daemon:
        limits = dict(length=int(longest * 512) + 512, blocks=256)
        bare, cached = Engine(model, **limits), Engine(model, **limits, transfer=ashlar_transfer(daemon))
        block = bare.call("block")
        for count in blocks_of_prompt:
            tokens = int(count * block) + 16 if count >= 1 else int(count * block)
            turns = options.repeats if count >= 1 else options.short_repeats
            times = one_length(bare, cached, daemon, (name, count), tokens, turns)
            row = {"model": name, "tokens": tokens, "blocks": count, "repeats": turns}
            row |= {f"{kind}_ms": round(1000 * statistics.median(each), 2) for kind, each in times.items()}
            added = [1000 * (cold - without) for cold, without in zip(times["cold"], times["without"])]
            row |= dict(
                zip(("added_ms", "added_low_ms", "added_high_ms"), (round(v, 2) for v in median_and_bounds(added)))
            )
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            row["samples_ms"] = {kind: [round(1000 * value, 2) for value in each] for kind, each in times.items()}
            rows.append(row)
        bare.close()
        cached.close()
    return rows


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def lmcache_transfer(folder):
    """Starts LMCache's server. Returns the configuration that connects an engine to it. The server reads and writes the
    engines' blocks in place."""
    if importlib.util.find_spec("lmcache") is None:
        raise RuntimeError("lmcache is not installed")
    port, http = free_port(), free_port()
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server", "--host", "127.0.0.1",
               "--port", port, "--http-port", http, "--l1-size-gb", 1, "--l1-init-size-gb", 1, "--max-workers", 2,
               "--eviction-policy", "LRU", "--disable-observability"]  # fmt: skip
    environment = dict(os.environ, LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING")
    with open(f"{folder}/server.log", "w") as log:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", http), 1):
                break
            time.sleep(0.2)
        else:
            last = pathlib.Path(log.name).read_text().strip().rpartition("\n")[2]
            raise RuntimeError(f"LMCache's server did not start; last line of its log: {last}")
        yield dict(
            kv_connector="LMCacheMPConnector",
            kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        )
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@contextlib.contextmanager
def variant_transfer(variant, folder):
    """Returns the `kv_transfer_config` of a variant of part 2, and starts what it needs."""
    offload = dict(kv_role="kv_both", kv_connector_extra_config=dict(cpu_bytes_to_use=1 << 30, num_cpu_blocks=4096))
    if variant == "vllm":
        yield None
    elif variant == "ashlar":
        with ashlar.daemon.start(dram="1GiB", folder=folder) as daemon:
            yield ashlar_transfer(daemon)
    elif variant == "lmcache":
        with lmcache_transfer(folder) as transfer:
            yield transfer
    elif variant == "lmcache-copied":  # copied by the engine, not by the server in its blocks
        with lmcache_transfer(folder) as transfer:
            transfer["kv_connector_extra_config"]["lmcache.mp.mp_transfer_mode"] = "engine_driven"
            yield transfer
    elif variant == "lmcache-in-process":
        yield dict(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    elif variant == "offloading":
        yield dict(offload, kv_connector="OffloadingConnector")
    elif variant == "simple-offloading":
        yield dict(offload, kv_connector="SimpleCPUOffloadConnector")
    else:
        raise RuntimeError("no such variant")


def rates_part(model, name, options, rates, folder):
    rows, seconds, documents, document_tokens = [], options.seconds, options.documents, options.document_tokens
    environment = dict(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING", LMCACHE_MP_TRANSFER_MODE="lmcache_driven",
                       LMCACHE_LOCAL_CPU="True", LMCACHE_MAX_LOCAL_CPU_SIZE="1")  # fmt: skip
    for variant in options.variants.split(","):
        (pathlib.Path(folder) / variant).mkdir(parents=True)
        pair = []
        try:
            with variant_transfer(variant, f"{folder}/{variant}") as transfer:
                try:
                    for _ in range(2):
                        pair.append(
                            Engine(model, document_tokens + 1024, 40, transfer=transfer, environment=environment)
                        )
                    for rate in rates:
                        rows.append(one_rate(pair, variant, name, rate, seconds, documents, document_tokens))
                finally:
                    for engine in pair:
                        engine.close()
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200]
            rows.append({"model": name, "variant": variant, "did_not_run": reason})
            print(f"{variant}: did not run: {reason}", flush=True)
    return rows


def one_rate(pair, variant, name, rate, seconds, documents, document_tokens):
    """Each engine gets half of the requests; each request is one of the documents and a distinct question."""
    source = random.Random(f"{name} {rate}")
    arrivals, at = ([], []), 0.0
    while at < seconds:
        document = prompt(("document", rate, source.randrange(documents)), document_tokens)
        question = prompt(("question", rate, at), 32)
        arrivals[source.randrange(2)].append((at, document + question))
        at += source.expovariate(rate)
    start = time.time() + 0.5
    before = [engine.call("external_hits") for engine in pair]
    for engine, each in zip(pair, arrivals):
        engine.send("open_loop", each, start)
    took = sorted(value for engine in pair for value in engine.result())
    hits = sum(engine.call("external_hits") for engine in pair) - sum(before)
    row = {
        "model": name,
        "variant": variant,
        "qps": rate,
        "requests": len(took),
        "ttft_p50_ms": round(1000 * statistics.median(took), 1),
        "ttft_p90_ms": round(1000 * took[int(0.9 * (len(took) - 1))], 1),
        "external_hit_tokens": int(hits),
    }
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--models", default="qwen3,qwen3_5", help="of qwen3, qwen3_5")
    parser.add_argument("--size", default="medium", choices=sorted(SIZES), help="of the model's layers")
    parser.add_argument("--blocks", default="0.5,2,4,8,16", help="lengths of prompts, in blocks of the engine")
    parser.add_argument("--repeats", type=int, default=7, help="prompts of each length; medians are shown")
    parser.add_argument("--short-repeats", type=int, default=60, help="of lengths below one block")
    parser.add_argument("--rates", default="0.5,1,2,4", help="requests a second, of two engines together; empty: none")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of part 2")
    parser.add_argument("--seconds", type=float, default=20, help="of each rate")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--document-tokens", type=int, default=2320)
    options = parser.parse_args()
    import_once()
    results = {
        "vllm": vllm.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "options": vars(options),
    }
    results |= {"lengths": [], "rates": []}
    blocks = [float(each) if "." in each else int(each) for each in options.blocks.split(",") if each]
    rates = [float(each) for each in options.rates.split(",") if each]
    with tempfile.TemporaryDirectory(prefix="ashlar-ttft-") as folder:
        for name in options.models.split(","):
            model = model_folder(name, options.size)
            if blocks:
                (pathlib.Path(folder) / name).mkdir()
                results["lengths"] += lengths_part(model, name, blocks, options, f"{folder}/{name}")
            if rates:
                results["rates"] += rates_part(model, name, options, rates, f"{folder}/{name}-rates")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
