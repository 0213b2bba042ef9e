# SPDX-License-Identifier: Apache-2.0
"""Tiny models and engines for the tests. Each engine is a forked child of this process, which has imported vLLM once."""

import contextlib
import gc
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
import traceback

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

import draft_states
import mamba2_checkpoints
import model_runner_v2
import prometheus_client
import torch
import torch._dynamo
import vllm
import vllm.model_executor.model_loader.dummy_loader as dummy_loader
import vllm.v1.executor.multiproc_executor as multiproc_executor
from tiny_models import BLOCK, CLOSE, CONFIGS, DTYPE, LINEAR, MAMBA, MODELS, PAIR, STATES, WINDOWED  # noqa: F401
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor.models import ModelRegistry

from ashlar.vllm import runs
from ashlar.vllm.messages import Fetched


def wide_weights(param, **_):
    """Dummy weights that give different tokens for different prompts: vLLM's own give every prompt the same token."""
    if not torch.is_floating_point(param):
        return
    name = f"{tuple(param.shape)}:{wide_weights.count}"
    if param.dim() > 1 and model_parallel_is_initialized() and get_tensor_model_parallel_world_size() > 1:
        name += f":{get_tensor_model_parallel_rank()}"  # ranks with equal weights would make equal shards
    wide_weights.count += 1
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
    values = torch.rand(param.shape, generator=generator) * 0.4 - 0.2
    if tuple(param.shape) == (LINEAR["linear_num_value_heads"],):
        values -= 2  # A_log and dt_bias: heads remember tens of tokens, so that a wrong state shows
    if tuple(param.shape) == (MAMBA["mamba_n_heads"],) and param.dtype == torch.float32:
        values = -0.01 - values.abs() / 10  # A of Mamba-2, likewise. It must decay: above 0 states grow without limit
    if param.dim() == 3 and param.shape[-1] == CONFIGS["lfm2"]["conv_L_cache"]:
        values *= 30  # short convolutions: their output is a product of three small numbers, and would be rounded away
    param.data.copy_(values.to(param.dtype))


wide_weights.count = 0


class Wide:
    """For engines in spawned processes (`worker_extension_cls`): importing this module widens their weights."""


class Watched:
    """Additional methods of a worker (`worker_extension_cls`), for information that only a rank's half of the connector
    has."""

    def _half(self):
        return get_kv_transfer_group()._worker

    def watch(self):
        half, seen = self._half(), {"loads": 0, "saves": 0, "states": []}
        self._seen, self._spoiled = seen, False
        fill, commit = half._caches.copy_states, half._saves.commit

        def filled(handle, load):
            if self._spoiled or not fill(handle, load):
                return False
            seen["loads"] += 1
            at = half._described.count(load.tokens) - 1
            tensors = [states.state(load.blocks[states.group][at]) for states in half._caches.states]
            seen["states"] = [
                hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors
            ]
            return True

        def committed(cache, saving):
            outcome = commit(cache, saving)
            seen["saves"] += outcome == "kept"
            return outcome

        half._caches.copy_states, half._saves.commit = filled, committed

    def watched(self):
        return dict(self._seen, rank=self._half()._described.model.tensor_parallel_rank)

    def flip_weights(self):
        for each in self.model_runner.get_model().parameters():
            if each.dim() > 1:
                each.data.copy_(each.data.flip(0))

    def remember_jumps(self):
        """Records this rank's jumps until `composed_apart`."""
        import segment_probe  # it imports modules that engines without segments do not need

        self._jumps = []
        self._remembering = segment_probe.remember_jumps(self._half()._composer, self._jumps)
        self._remembering.start()

    def composed_apart(self, tokens):
        """Returns, for each of this rank's layers, the differences of its shard of the states: `segment_probe.Apart`."""
        import segment_probe

        self._remembering.stop()
        found = segment_probe.jumps_against_one_run(self._half()._composer, self._jumps, tokens)
        return [vars(each) for each in found]

    def spoil_segments(self, rank):
        """Makes this rank's segments land nowhere; None: no rank's."""
        half = self._half()
        composer = half._composer
        vars(composer).pop("_land", None)
        if rank == half._described.model.tensor_parallel_rank:
            composer._land = lambda landing: Fetched(ended=True)

    def fail_parts(self, rank):
        """Makes this rank's parts of segments fail after they were computed."""
        half = self._half()
        if rank == half._described.model.tensor_parallel_rank:
            runs.Run.release_device = None

    def segment_probe_on(self, rank, name):
        """Calls a function of `segment_probe` on this rank."""
        import segment_probe

        if rank == self._half()._described.model.tensor_parallel_rank:
            getattr(segment_probe, name)()

    def composes(self):
        """Returns whether this rank lands and publishes segments."""
        return any(each.name == "ashlar-compose" for each in threading.enumerate())

    def keeps_parts(self):
        return self._half()._composer._kept is not None

    def spoil(self, rank):
        """Makes the loads of this rank fail; None: no rank's."""
        self._spoiled = rank == self._half()._described.model.tensor_parallel_rank


if os.environ.get("ASHLAR_WIDE_WEIGHTS") == "1":
    dummy_loader.initialize_single_dummy_weight = wide_weights


# Modules that an engine imports while it starts, which takes half of the start.
IMPORTED_LATE = (
    "vllm.v1.worker.cpu_worker",  # first: it changes torch before others look at it
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "ashlar.vllm",
)


def import_once():
    """Does work that every child would otherwise repeat."""
    dummy_loader.initialize_single_dummy_weight = wide_weights
    # vLLM's attention uses the CPU's matrix unit even if no product of the model has asked the kernel for it. An engine
    # whose first prompt is short would otherwise end with an illegal instruction.
    torch.cpu._init_amx()
    # Otherwise each engine compiles the function that ranks its first token, which takes as long as its start.
    torch._dynamo.config.disable = True
    mamba2_checkpoints.run_on_cpu()
    draft_states.run_on_cpu()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    for config in CONFIGS.values():
        for architecture in config["architectures"]:
            ModelRegistry._try_inspect_model_cls(architecture)
            ModelRegistry._try_load_model_cls(architecture)
    # Engines collect garbage several times while they start. Freezing the inherited objects exempts them.
    gc.collect()
    gc.freeze()


def model_folder(name, **changes):
    config = dict(CONFIGS[name], **changes)
    text = json.dumps(config, sort_keys=True)
    folder = pathlib.Path(tempfile.gettempdir()) / f"ashlar-{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return str(folder)


def prompt(seed, tokens):
    """Returns a text's tokens. Texts of the same seed are prefixes of one another."""
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(tokens)]


def settings_of(model, connector=None, transfer=None, **options):
    """Returns the arguments of vllm.LLM."""
    settings = dict(
        model=model_folder(model) if model in CONFIGS else model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=DTYPE.get(model, "bfloat16"),
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=256,
        seed=0,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    if BLOCK.get(model) == 384:
        settings["mamba_ssm_cache_dtype"] = "float32"  # the default on CPUs with AVX512-BF16; it decides the block
    settings.update(options)
    if connector is not None:
        settings["kv_transfer_config"] = dict(
            kv_connector="AshlarConnector",
            kv_connector_module_path="ashlar.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        )
    if transfer is not None:
        settings["kv_transfer_config"] = transfer
    return settings


class Child:
    """An engine in a separate process. Each call waits for at most `timeout` seconds."""

    def __init__(self, model, connector=None, processes=False, environment=None, transfer=None, **options):
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        settings = settings_of(model, connector, transfer, **options)
        self._process = context.Process(target=_serve, args=(theirs, settings, processes, environment or {}))
        # A daemon may have no children.
        self._process.daemon = not processes and options.get("tensor_parallel_size", 1) == 1
        self._process.start()
        theirs.close()
        try:
            self.started = self._answer(400 if processes else 180)  # a spawned process imports all modules again
        except BaseException:
            self.kill()
            raise

    def _answer(self, timeout):
        if not self._pipe.poll(timeout):
            raise TimeoutError("the engine did not answer")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def call(self, name, *args, timeout=300, **kwargs):
        self.send(name, *args, **kwargs)
        return self._answer(timeout)

    def send(self, name, *args, **kwargs):
        self._pipe.send((name, args, kwargs))

    def wait(self, timeout=300):
        return self._answer(timeout)

    def generate(self, prompts, tokens=6, timeout=300, salt=None):
        """[(tokens, log-probabilities, cached tokens)] of prompts, which are served together."""
        return self.call("generate", prompts, tokens, salt, timeout=timeout)

    def close(self):
        with contextlib.suppress(Exception):
            self.call("close", timeout=30)
        self.kill()

    def kill(self):
        if self._process.is_alive():
            self._process.join(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and the engine's own processes
        self._process.join(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        return False


class Server:
    """An engine in this process."""

    def __init__(self, settings):
        began = time.monotonic()
        self.llm = vllm.LLM(**settings)
        self.seconds = time.monotonic() - began

    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    def connector(self):
        return self.core().scheduler.connector

    def generate(self, prompts, tokens, salt=None):
        sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=tokens)
        salted = {} if salt is None else {"cache_salt": salt}
        outputs = self.llm.generate([{"prompt_token_ids": p, **salted} for p in prompts], sampling, use_tqdm=False)
        found = []
        for output in outputs:
            best = output.outputs[0]
            logs = [each[token].logprob for each, token in zip(best.logprobs, best.token_ids)]
            found.append((list(best.token_ids), logs, output.num_cached_tokens))
        return found

    def timed(self, tokens_list, new_tokens=1):
        began = time.perf_counter()
        self.generate([tokens_list], new_tokens)
        return time.perf_counter() - began

    def erase(self):
        """The engine's own prefix cache, not Ashlar's."""
        deadline = time.monotonic() + 2  # if the daemon hangs, blocks are held for longer
        while self.core().scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()  # like the loop of an engine in a separate process
        return self.llm.reset_prefix_cache()

    def metrics(self):
        """{(name, labels): value} of the connector's counters."""
        found = {}
        for sample in (each for metric in prometheus_client.REGISTRY.collect() for each in metric.samples):
            if sample.name.startswith("vllm:ashlar_") and sample.name.endswith("_total"):
                name = sample.name.removeprefix("vllm:ashlar_").removesuffix("_total")
                labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                found[name, tuple(sorted(labels.values()))] = sample.value
        return found

    def block_size(self):
        return self.llm.llm_engine.vllm_config.cache_config.block_size

    def free_blocks(self):
        return self.core().scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def files(self):
        """Open files of the engine's process."""
        return len(os.listdir("/proc/self/fd"))

    def evaluate(self, text):
        """Evaluates an expression in the engine's process."""
        return eval(text, {"server": self, "llm": self.llm})

    def execute(self, text):
        exec(text, {"server": self, "llm": self.llm})

    def close(self):
        gc.collect = lambda *_: 0  # the process ends after this
        self.llm.llm_engine.engine_core.shutdown()


def _serve(pipe, settings, processes, environment):
    os.setsid()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
    os.environ["ASHLAR_WIDE_WEIGHTS"] = "1"
    os.environ["PYTHONPATH"] = f"{pathlib.Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    os.environ.update(environment)
    # Forks the workers of several ranks, which vLLM would otherwise spawn.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        if model_runner_v2.wanted():
            model_runner_v2.run_on_cpu()
        server = Server(settings)
        pipe.send(("value", server.seconds))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        return
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(("value", getattr(server, name)(*args, **kwargs)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        if name == "close":
            break
    os._exit(0)


def connector(daemon, **options):
    sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
    # Emulates a slow engine: tiny models compute a prompt faster than it loads, and the daemon would decline the load.
    return dict(sockets, wait_for_saves=True, reopen_ms=200, **{"tokens_per_second": 1.0, **options})


def same(answers, expected, close=1e-4):
    """Compares tokens and log-probabilities. Log-probabilities detect slightly wrong states that leave the tokens
    equal."""
    assert [tokens for tokens, *_ in answers] == [tokens for tokens, _ in expected]
    for (_, logs, *_), (_, wanted) in zip(answers, expected):
        assert all(math.isclose(a, b, abs_tol=close) for a, b in zip(logs, wanted)), (logs, wanted)


def repeated(model, tokens):
    """Returns how many tokens of a prompt are resumed when it is repeated, after it was computed in one step."""
    if model in WINDOWED or model in ("qwen3", "phi3"):
        grain = max(256, -(-(WINDOWED.get(model, 1) - 1) // 128) * 128)
        return max(tokens - 8, (tokens - 1) // grain * grain)
    return (tokens - 1) // BLOCK[model] * BLOCK[model]


def saved(engine):
    return sum(value for (name, _), value in engine.call("metrics").items() if name == "saved_tokens")


def serves_again(child, texts, wanted, close=1e-4):
    """Checks that the engine uses a daemon again after it returns, and that every answer until then is right."""
    deadline, before = time.monotonic() + 20, saved(child)
    while saved(child) == before and time.monotonic() < deadline:
        child.call("erase")
        same(child.generate(texts), wanted, close)
    assert saved(child) > before, "the restarted daemon is used again"


def settle(child, free):
    """Steps until every save has ended, because blocks are held until then."""
    deadline = time.monotonic() + 30
    while True:
        child.call("erase")
        if child.call("free_blocks") == free or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert child.call("free_blocks") == free, "no block is lost"


def count(engine, name, *labels):
    return engine.call("metrics").get((name, tuple(sorted(labels))), 0)
