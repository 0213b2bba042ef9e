# SPDX-License-Identifier: Apache-2.0
"""Pages on an emulated GPU (kernels/cuda/emulator): its driver's allocations are memfds that carry the GPU's name. Here
they are mapped into CPU memory, which is not possible with a real GPU."""

import mmap
import os

import numpy as np
import pytest

import ashlar
import ashlar.daemon

DIM, HEADS, LINEAR, ATTENTION, PAGES = 8, 2, 0, 1, 128
MODEL = ashlar.Model(
    model_id="gpu-python",
    weights_digest="1",
    page_tokens=16,
    head=4,
    tail=4,
    layers=[
        ashlar.Linear(ashlar.Family.RETNET, HEADS, HEADS, DIM, DIM, decay_table=[-0.3, -0.01]),
        ashlar.Attention(HEADS, DIM, DIM),
    ],
)
TOKENS = np.arange(1, 603, dtype=np.int32)
EMULATED = os.environ.get("ASHLARD_EMULATED", "")
pytestmark = pytest.mark.skipif(not EMULATED, reason="this build has no emulated GPU")


@pytest.fixture
def gpu_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("ASHLARD", EMULATED)
    gpus = [{"device": 0}, {"device": 1}]
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path), config={"gpu": gpus}) as running:
        yield running


class Allocation:
    def __init__(self, device=1, size=4 << 20):
        self.descriptor = os.memfd_create(f"emulated-device-{device}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.array = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        self.memory = {
            "memory_kind": ashlar.MemoryKind.GPU,
            "gpu_descriptor": self.descriptor,
            "gpu_address": self.array.ctypes.data,
            "memory_bytes": size,
            "gpu": b"emulated GPU\0\0\0" + bytes([device]),
        }


def open_cache(daemon, **memory):
    return ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, pages=PAGES, capture_tokens=16, **memory)


def rows_of(cache, memory):
    """Keys and values in place: [pages, page_tokens, heads, dim]."""
    place = next(place for place in cache.places if place.layer == ATTENTION)
    strides = (place.page_stride, place.token_stride, place.key_head_stride, 4)
    return [
        np.ndarray((PAGES, 16, HEADS, DIM), np.float32, memory, offset, strides)
        for offset in (place.key_offset, place.value_offset)
    ]


def test_prefixes_go_from_and_to_pages_on_a_gpu(gpu_daemon):
    far, other = Allocation(), Allocation()
    engines = []
    for allocation in (far, other):
        engines.append((open_cache(gpu_daemon, **allocation.memory), allocation.array))
        os.close(allocation.descriptor)  # the daemon has its own descriptor
    near = open_cache(gpu_daemon)
    engines.append((near, near.memory))
    table = np.arange(20, 20 + 38)
    first = 1
    for cache, memory in engines:
        text = TOKENS + first
        for number, rows in enumerate(rows_of(cache, memory)):
            flat = np.concatenate([text, np.zeros(6)]).astype(np.float32) + number
            rows[table] = flat.reshape(38, 16, 1, 1)
        state = np.full((HEADS, DIM, DIM), first, np.float32)
        commit = cache.commit(text, [(len(text), [ashlar.LinearTensors(LINEAR, state)])], page_table=table)
        assert commit == ["kept"]
        for reader, its_memory in engines:
            landed = rows_of(reader, its_memory)
            for rows in landed:
                rows[60:100] = -7
            with reader.begin(np.append(text, -5), page_table=np.arange(60, 99)) as request:
                assert request.plan.prefix_tokens == len(text)
                loaded = np.zeros((HEADS, DIM, DIM), np.float32)
                assert request.advance(LINEAR, 0, len(text), loaded) == ashlar.Verdict.OK
                assert request.finish() == ashlar.Verdict.OK
            assert (loaded == first).all()
            for number, rows in enumerate(landed):
                flat = rows[60:99].reshape(-1, HEADS, DIM)
                assert (flat[: len(text)] == text[:, None, None] + number).all()
                assert (flat[len(text) :] == -7).all()
        first += 10_000


def test_memory_outside_the_cpu_has_no_array(gpu_daemon):
    allocation = Allocation()
    cache = open_cache(gpu_daemon, **allocation.memory)
    with pytest.raises(ValueError, match="memory_kind: GPU memory has no NumPy view"):
        _ = cache.memory
    with pytest.raises(ValueError, match="memory_kind: GPU memory has no NumPy view"):
        cache.page_rows(ATTENTION)
    state = allocation.array[: HEADS * DIM * DIM * 4].view(np.float32).reshape(HEADS, DIM, DIM)
    with pytest.raises(ValueError, match=r"checkpoints\[0\].linear\[0\].state: lies on the GPU"):
        cache.commit(TOKENS, [(len(TOKENS), [ashlar.LinearTensors(LINEAR, state)])], page_table=np.arange(38))


def test_memory_that_the_daemon_does_not_serve_is_refused(gpu_daemon, daemon_without):
    good = Allocation().memory
    with pytest.raises(RuntimeError, match="is not a GPU of this daemon"):
        open_cache(gpu_daemon, **good | {"gpu": b"x" * 16})
    with pytest.raises(ValueError, match="the daemon serves 2 GPUs"):
        open_cache(gpu_daemon, **good | {"gpu": b""})
    with pytest.raises(ValueError, match="gpu: 3 bytes were given; expected 16"):
        open_cache(gpu_daemon, **good | {"gpu": b"GPU"})
    with pytest.raises(ValueError, match="^memory_bytes: 4096; the pages need"):
        open_cache(gpu_daemon, **good | {"memory_bytes": 4096})
    with pytest.raises(RuntimeError, match="the daemon has no GPU"):
        open_cache(daemon_without, **good)


@pytest.fixture
def daemon_without(tmp_path_factory):
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path_factory.mktemp("near"))) as running:
        yield running
