# SPDX-License-Identifier: Apache-2.0
"""Caches on an emulated GPU: the driver, its streams and the daemon's GPU are emulated, and the engine computes on the
CPU. No part of this has run on a real GPU."""

import gc
import multiprocessing
import os
import time
import traceback
import types

import emulated_gpu
import pytest
import torch
from daemon_view import held
from stub_connector import configured
from tiny_engines import BLOCK, PAIR, Child, connector, count, prompt, repeated, same, saved
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

import ashlar
import ashlar.daemon
import ashlar.vllm.memory as memory
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options

SIZE = 3 << 20


def allocate(size=SIZE):
    allocator = memory.Allocator()
    with allocator.context():
        made = torch.zeros(size, dtype=torch.int8, device="cpu")
    return allocator, made


@pytest.fixture(scope="module")
def gpu_daemon(tmp_path_factory):
    if not os.path.exists(emulated_gpu.ASHLARD):
        pytest.skip("this build has no emulated GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASHLARD", emulated_gpu.ASHLARD)
        folder = tmp_path_factory.mktemp("gpu")
        config = {"gpu": [{"device": 0}]}
        with ashlar.daemon.start(dram="512MiB", arena="8MiB", folder=str(folder), config=config) as running:
            yield running


def test_an_allocation_is_shared_zeroed_and_returned(monkeypatch):
    driver = emulated_gpu.Driver()
    emulated_gpu.emulate(monkeypatch, driver)
    before = len(os.listdir("/proc/self/fd"))
    allocator, made = allocate()
    ours = allocator.memory
    assert allocator.error is None and made.data_ptr() == ours.address and not made.any()
    options = ours.options()
    assert options["memory_bytes"] == 4 << 20, "all of the allocation"
    assert (options["memory_kind"], options["gpu"]) == (ashlar.MemoryKind.GPU, emulated_gpu.GPU)
    assert not os.get_inheritable(ours.descriptor), "not for programs that the engine starts"
    assert driver.handles == {}, "mapping and descriptor keep the memory"
    made[5] = 7
    assert os.pread(ours.descriptor, 1, 5) == b"\7"
    ours.close()
    assert made[5] == 7, "the engine's tensors stay"
    del allocator, ours, made
    gc.collect()
    assert driver.alive == 0 and len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fails", [*emulated_gpu.CALLS, "VIRTUAL_MEMORY", "FILE_DESCRIPTOR", "tensor", "bindings"])
def test_failures_leak_nothing_and_keep_the_engines_memory(fails, monkeypatch):
    driver = emulated_gpu.Driver(fails, fails if fails in ("VIRTUAL_MEMORY", "FILE_DESCRIPTOR") else "")
    emulated_gpu.emulate(monkeypatch, driver)

    def refuse(*_):
        raise RuntimeError(fails)

    if fails == "tensor":
        monkeypatch.setattr("ashlar.vllm.cuda.tensor_of", refuse)
    if fails == "bindings":
        monkeypatch.setattr("ashlar.vllm.cuda.load_driver", refuse)
    before = len(os.listdir("/proc/self/fd"))
    allocator, made = allocate()
    said = {"VIRTUAL_MEMORY": "no virtual memory management", "FILE_DESCRIPTOR": "no sharing by file descriptors"}
    assert said.get(fails, fails) in str(allocator.error)
    assert allocator.memory is None and made.shape == (SIZE,) and not made.any()
    gc.collect()
    assert driver.alive == 0 and len(os.listdir("/proc/self/fd")) == before
    if fails in driver.calls:
        assert f"{fails}: CUDA_ERROR_OF_A_TEST" == str(allocator.error)


def test_memory_is_returned_for_a_sleep_and_restored_at_the_same_addresses(monkeypatch):
    driver = emulated_gpu.Driver()
    emulated_gpu.emulate(monkeypatch, driver)
    before = len(os.listdir("/proc/self/fd"))
    allocator, made = allocate()
    ours, address = allocator.memory, made.data_ptr()
    for _ in range(2):
        made.fill_(7)
        ours.release()
        assert ours.descriptor == -1 and not driver.mapped and not driver.handles
        ours.release()
        ours.restore()
        assert made.data_ptr() == address == ours.options()["gpu_address"] and not made.any()
        made[5] = 7
        assert os.pread(ours.options()["gpu_descriptor"], 1, 5) == b"\7", "the descriptor is the new memory's"
        ours.restore()
        assert made[5] == 7, "a second call does nothing"
    driver.fails = "cuMemUnmap"
    with pytest.raises(OSError, match="cuMemUnmap: CUDA_ERROR_OF_A_TEST"):
        ours.release()
    ours.restore()
    assert made[5] == 7 and os.pread(ours.options()["gpu_descriptor"], 1, 5) == b"\7", "the engine keeps its memory"
    driver.fails = None
    ours.release()
    driver.fails = "cuMemCreate"
    with pytest.raises(OSError, match="cuMemCreate: CUDA_ERROR_OF_A_TEST"):
        ours.restore()
    ours.close()
    del allocator, ours, made
    gc.collect()
    assert driver.alive == 0 and len(os.listdir("/proc/self/fd")) == before


# ---- memory that vLLM registers

HEADS, TOKENS, KEY, BLOCKS, LAYERS = 2, 32, 8, 24, 3


def registered(layout, kernel_block=TOKENS, key=KEY, value=KEY):
    """Returns caches that vLLM's own code allocates from an allocator, by layer name."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=key, head_size_v=value, dtype=torch.float32
    )
    names = [f"layers.{i}.attn" for i in range(LAYERS)]
    size = spec.page_size_bytes * BLOCKS * LAYERS
    packed = spec.page_size_bytes * LAYERS if layout.is_block_outermost else None
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout, fixed_strides=(None, packed, None, None, None))
    tensors = [KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1])]
    config = KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(names, spec)])
    allocator = memory.Allocator()
    with allocator.context():
        caches = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_block])
    assert allocator.memory is not None, allocator.error
    return caches, allocator.memory


def described(value=KEY):
    layers = [ashlar.Attention(HEADS, KEY, value, stored=ashlar.StoredKeys.UNROTATED) for _ in range(LAYERS)]
    model = ashlar.Model(model_id="layouts", weights_digest=str(value), layers=layers, page_tokens=TOKENS)
    names = [(i, f"layers.{i}.attn") for i in range(LAYERS)]
    return Described(None, model, names, [], [], {0: list(range(LAYERS))}, 1, TOKENS, 256, False, False)


def rows(cache, blocks, kernel_block):
    """Returns the rows of some blocks, [tokens, heads, numbers], for any split of blocks by kernels."""
    parts = TOKENS // kernel_block
    cut = [block * parts + part for block in blocks for part in range(parts)]
    return cache[cut].permute(0, 2, 1, 3).reshape(-1, HEADS, cache.shape[3])


@pytest.mark.parametrize("value", [KEY, 4])
@pytest.mark.parametrize(
    "layout, kernel_block", [*((layout, TOKENS) for layout in KVCacheLayout), (KVCacheLayout.LBNHC, 16)]
)
def test_blocks_land_byte_for_byte_in_every_layout(layout, kernel_block, value, gpu_daemon, monkeypatch):
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver())
    in_child(land_in_layout, layout, kernel_block, value, gpu_daemon)


def in_child(work, *arguments):
    """Processes that have connected must not fork; this one forks the engines of other tests."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run():
        try:
            work(*arguments)
            theirs.send("")
        except BaseException:
            theirs.send(traceback.format_exc())
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    assert ours.poll(100)
    said = ours.recv()
    process.join(20)
    assert said == "", said


def land_in_layout(layout, kernel_block, value, gpu_daemon):
    model = described(value)
    engines = []
    for of, cut in ((KVCacheLayout.LBHNC, TOKENS), (layout, kernel_block)):
        caches, ours = registered(of, cut, value=value)
        cache = ashlar.Cache(
            model.model,
            gpu_daemon.rpc_socket,
            gpu_daemon.session_socket,
            **ours.options(),
            pages=memory.pages(model, caches),
            places=memory.places(model, caches, ours),
            capture_tokens=TOKENS,
        )
        engines.append((caches, cut, cache))
    assert engines[1][2].pages == BLOCKS
    text, mine = list(range(hash((layout.name, kernel_block, value)) % 100_000, 10**6))[:256], [3, 1, 4, 15, 9, 2, 6, 5]
    theirs = [7, 8, 10, 11, 12, 13, 14, 16, 17]
    for (source, cut, writer), (target, its_cut, reader) in (engines, engines[::-1]):
        text = text[::-1]
        for _, name in model.attention:
            source[name].uniform_()
            target[name].fill_(-7)
        assert writer.commit(text, [(256, [])], page_table=mine) == ["kept"]
        with reader.begin([*text, 1], page_table=theirs) as request:
            assert request.plan.prefix_tokens == 256
            assert request.finish() == ashlar.Verdict.OK
        for _, name in model.attention:
            landed = rows(target[name], theirs[:8], its_cut)
            assert torch.equal(landed, rows(source[name], mine, cut))
            others = [block for block in range(BLOCKS) if block not in theirs[:8]]
            assert (rows(target[name], others, its_cut) == -7).all(), "nothing else is written"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor[:, :1],
        lambda tensor: tensor.transpose(2, 3),
        lambda tensor: tensor[..., ::2],
        lambda tensor: tensor.flatten(1),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.permute(0, 2, 1, 3)[None],
    ],
    ids=["heads", "order", "strided", "flat", "elsewhere", "two dimensions more"],
)
def test_other_registrations_are_refused_by_name(spoil, monkeypatch):
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver())
    caches, ours = registered(KVCacheLayout.LBNHC)
    caches["layers.1.attn"] = spoil(caches["layers.1.attn"])
    with pytest.raises(Unsupported, match=r"layers.1.attn: unsupported shape \("):
        memory.places(described(), caches, ours)


def test_kernel_blocks_with_heads_first_are_refused(monkeypatch):
    """A block's tokens then have no common stride: each part has all of its heads before those of the next part."""
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver())
    caches, ours = registered(KVCacheLayout.LBHNC, 16)
    with pytest.raises(Unsupported, match="layers.0.attn: unsupported shape"):
        memory.places(described(), caches, ours)


# ---- whole engines

OBSERVE = """
import ashlar, ashlar.vllm.memory as memory
order = server.connector_of_worker()._caches.order
def watch(kind, name, before):
    real = getattr(kind, name)
    def watched(*arguments, **options):
        before(*arguments)
        return real(*arguments, **options)
    setattr(kind, name, watched)
watch(ashlar.Cache, "commit", lambda *_: order.note("commit", order.copying))
watch(ashlar.Cache, "land", lambda *_: order.note("land"))
watch(memory.States, "load", lambda *_: order.note("state", order.copying))
watch(memory.States, "tensors", lambda *_: order.note("state", order.copying))
watch(memory.Window, "tensors", lambda *_: order.note("state", order.copying))
watch(memory.Window, "fill", lambda *_: order.note("state", order.copying))
loads = server.connector_of_worker()._loads
real = loads._poll
def poll(landing):
    done = real(landing)
    if done is not None:
        order.note("reported", done)
    return done
loads._poll = poll
server.order = order
"""


@pytest.fixture
def far_engine(gpu_daemon, monkeypatch):
    """An engine whose caches are in emulated GPU memory."""
    import tiny_engines
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    monkeypatch.setattr(
        tiny_engines.Server, "connector_of_worker", lambda self: get_kv_transfer_group()._worker, raising=False
    )
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver(), emulated_gpu.Order())
    children = []

    def start(model, **options):
        child = Child(model, connector(gpu_daemon, **options))
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


@pytest.mark.parametrize("model", [*PAIR, "ministral"])
def test_prompts_are_resumed_from_a_gpus_memory_with_the_same_answer(model, far_engine, expected, gpu_daemon):
    block = BLOCK[model]
    texts = [prompt(f"far {model} {i}", 2 * max(block, 256) + 30 + i) for i in range(2)]
    wanted = expected(model, texts)
    child, other = far_engine(model), far_engine(model)
    kind = child.call("evaluate", "type(server.connector_of_worker().allocator.memory).__name__")
    assert kind == "CudaMemory"
    child.call("execute", OBSERVE)
    for text, answer in zip(texts, wanted):
        same(child.generate([text]), [answer])
        # The engine again, with its own blocks, and an engine that can only use the daemon.
        for reader in (child, other):
            before = saved(reader)
            reader.call("erase")
            same(reader.generate([text]), [answer])
            assert saved(reader) - before == repeated(model, len(text))
    assert count(child, "load_failures") == count(other, "load_failures") == 0
    seen = child.call("evaluate", "server.order.seen")
    ended = set()
    marks = [each[1] for each in seen if each[0] == "mark"]
    assert len(marks) >= 4
    latest = 0
    for what, *more in seen:
        if what == "mark":
            latest = more[0]
        elif what == "ended":
            ended.add(more[0])
        elif what in ("land", "commit"):
            assert latest in ended, "the daemon is asked only once the engine's work before it has ended"
    kinds = [each[0] for each in seen]
    assert kinds.count("land") == 2 and kinds.count("commit") >= 2 and kinds.count("reported") == 2
    assert all(more == [True] for what, *more in seen if what == "state"), "tensors are copied where that is waited for"
    assert all(more == [False] for what, *more in seen if what == "commit"), "and the copies have ended before"
    if model != "qwen3":
        assert "state" in kinds
        for at, kind in enumerate(kinds):
            if kind == "reported":
                assert "copied" in kinds[kinds[:at].index("land") : at], "states are there before the load is reported"


KV = "__import__('vllm.distributed.kv_transfer', fromlist=['']).get_kv_transfer_group()"
DRIVER = "__import__('ashlar.vllm.cuda', fromlist=['']).load_driver()"


def test_an_engine_returns_its_memory_for_a_sleep_and_uses_the_cache_afterwards(far_engine, expected, gpu_daemon):
    model, text = "qwen3_5", prompt("asleep", 2 * BLOCK["qwen3_5"] + 40)
    wanted, others = expected(model, [text]), held(gpu_daemon.metrics_socket)["region_bytes"]
    child = far_engine(model)
    same(child.generate([text]), wanted)
    for _ in range(2):
        before = saved(child)
        for _ in range(2):  # vLLM may call each one again
            child.call("evaluate", f"{KV}.unregister_kv_caches()")
        assert child.call("evaluate", f"len({DRIVER}.mapped)") == 0
        deadline = time.monotonic() + 10
        while (now := held(gpu_daemon.metrics_socket)["region_bytes"]) != others and time.monotonic() < deadline:
            time.sleep(0.05)
        assert now == others, "the daemon has unmapped it, too"
        for _ in range(2):
            child.call("evaluate", f"{KV}.restore_kv_caches()")
        assert child.call("evaluate", f"len({DRIVER}.mapped)") == 1
        child.call("erase")
        same(child.generate([text]), wanted)
        assert saved(child) - before == 2 * BLOCK[model]
    assert count(child, "load_failures") == 0


def test_an_engine_whose_daemon_ends_while_it_sleeps_computes(far_engine, expected, gpu_daemon, monkeypatch):
    model, text = "qwen3", prompt("asleep without a daemon", 600)
    child = far_engine(model)
    same(child.generate([text]), expected(model, [text]))
    child.call("evaluate", f"{KV}.unregister_kv_caches()")
    child.call(
        "execute", "import ashlar\ndef gone(*_, **__):\n    raise RuntimeError('no daemon')\nashlar.Cache = gone"
    )
    child.call("evaluate", f"{KV}.restore_kv_caches()")
    before = saved(child)
    child.call("erase")
    same(child.generate([text]), expected(model, [text]))
    assert saved(child) == before


def test_a_driver_that_refuses_leaves_an_engine_without_the_cache(gpu_daemon, expected, monkeypatch):
    text = prompt("refused", 600)
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver("cuMemCreate"))
    with Child("qwen3", connector(gpu_daemon)) as child:
        for _ in range(2):
            child.call("erase")
            same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 0 and count(child, "stores", "kept") == 0


def test_a_daemon_without_that_gpu_leaves_an_engine_without_the_cache(shared_daemon, expected, monkeypatch):
    text = prompt("no gpu", 600)
    emulated_gpu.emulate(monkeypatch, emulated_gpu.Driver(), emulated_gpu.Order())
    with Child("qwen3", connector(shared_daemon)) as child:
        for _ in range(2):
            child.call("erase")
            same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 0 and count(child, "stores", "kept") == 0


def test_segments_are_refused_on_a_gpu_with_a_warning(monkeypatch):
    """Checked by the configuration only: no engine with such a device runs here."""
    assert configured(monkeypatch, {"segments": True})[0].segments
    options, said = configured(monkeypatch, {"segments": True}, "cuda")
    assert not options.segments and said == [
        "Ashlar: segments are off: they have never run on cuda; run tools/gpu-check, then set segments_on_gpu; prompts "
        "with segments are computed"
    ]


@pytest.mark.parametrize(
    "device, hip, sleep, reason",
    [
        ("xpu", None, False, "kv_memory: the daemon cannot map the memory of xpu; set kv_memory to staged"),
        ("cuda", "6.4", False, "kv_memory: the daemon cannot map the memory of ROCm; set kv_memory to staged"),
        ("cuda", None, True, "enable_sleep_mode: not supported by this version of vLLM; use 0.33 or later"),
    ],
)
def test_unsupported_devices_are_named(device, hip, sleep, reason, monkeypatch):
    from ashlar.vllm.model import _check, is_staged

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)  # as in 0.32
    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device),
        model_config=types.SimpleNamespace(enable_sleep_mode=sleep),
    )
    with pytest.raises(Unsupported, match=reason):
        _check(config, Options(kv_memory="mapped"))
    assert is_staged(config, Options()) and not is_staged(config, Options(kv_memory="mapped"))
    config.parallel_config = types.SimpleNamespace(pipeline_parallel_size=2)
    if not sleep:
        with pytest.raises(Unsupported, match="pipeline_parallel_size"):  # refused by a later check
            _check(config, Options())


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "supports_sleep_mode"), reason="vLLM 0.33 asks for it")
def test_sleep_mode_is_served_on_a_gpu(monkeypatch):
    from ashlar.vllm import AshlarConnector
    from ashlar.vllm.model import _check

    assert AshlarConnector.supports_sleep_mode(None)
    monkeypatch.setattr(torch.version, "hip", None)
    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type="cuda"),
        model_config=types.SimpleNamespace(enable_sleep_mode=True),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=2),
    )
    with pytest.raises(Unsupported, match="pipeline_parallel_size"):  # the next check
        _check(config, Options())
