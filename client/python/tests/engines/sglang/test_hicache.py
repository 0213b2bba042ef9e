# SPDX-License-Identifier: Apache-2.0
"""The storage backend under SGLang's own classes: its factory, host pools, and the HiCache controller's storage calls.

SGLang's copies between GPU and host memory need a GPU, so the tests fill host pools themselves.
"""

import contextlib
import json
import os
import pathlib
import time
from types import SimpleNamespace

import pytest

sglang = pytest.importorskip("sglang", reason="sglang is not installed (tools/engines-environment)")
torch = pytest.importorskip("torch")

from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation  # noqa: E402
from sglang.srt.mem_cache import hicache_storage as hicache  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

import ashlar.daemon  # noqa: E402
from ashlar.sglang import weight_changes  # noqa: E402

PAGE = 16  # tokens
GUIDE = (pathlib.Path(os.environ["ASHLAR_SOURCE"]) / "docs/sglang.md").read_text()
SETTINGS = json.loads(GUIDE.partition("```json ashlar.json\n")[2].partition("```")[0])
LAYERS, HEADS, DIM = 3, 2, 32


def kv_host(layout="page_first", tokens=PAGE * 40):
    device = MHATokenToKVPool(
        size=tokens,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=LAYERS,
    )


def mamba_host(slots=20, dtype=torch.float32):
    temporal = torch.zeros(2, slots, 4, 16, 8, dtype=dtype)
    conv = torch.zeros(2, slots, 96, 3, dtype=torch.bfloat16)
    return MambaPoolHost(
        MambaStateBufferInfo(temporal=temporal, conv=(conv,)),
        1.0,
        0,
        device_capacity=slots,
        pin_memory=False,
        layout="page_first",
    )


def fill(host, index, seed):
    page = host.get_data_page(index, flat=True)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (page.numel() * page.element_size(),), dtype=torch.uint8, generator=generator)
    host.set_from_flat_data_page(index, data.view(page.dtype))
    return data


def held(host, index):
    return host.get_data_page(index, flat=True).contiguous().view(torch.uint8).flatten()


def pages_of(numbers):
    return torch.cat([torch.arange(n * PAGE, (n + 1) * PAGE) for n in numbers])


def chain(tokens):
    return get_hash_str(list(tokens), None, page_size=PAGE)


def make(daemon, pools=(), model="tiny", extra=None, **changed):
    config = {
        **SETTINGS,
        "rpc_socket": daemon.rpc_socket,
        "session_socket": daemon.session_socket,
        "retry_seconds": 0.05,
        "weights_digest": "1",
        **(extra or {}),
    }
    fields = dict(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name=model,
        extra_config=config,
    )
    storage = hicache.HiCacheStorageConfig(**{**fields, **changed})
    backend = StorageBackendFactory.create_backend("dynamic", storage, None)
    for name, pool in pools:
        if name == PoolName.KV:
            backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


@pytest.fixture
def pools():
    return [(PoolName.KV, kv_host()), (PoolName.MAMBA, mamba_host())]


def store(backend, pools, hashes, seed=0, states=()):
    """Writes pages 0… of the host pools under these hashes. `states`: indices of hashes whose Mamba state is stored."""
    kv, mamba = pools[0][1], pools[1][1]
    kept = {("kv", h): fill(kv, i * PAGE, seed + i) for i, h in enumerate(hashes)}
    for slot, i in enumerate(states):
        kept["mamba", hashes[i]] = fill(mamba, slot, seed + 1000 + i)
    transfers = [PoolTransfer(name=PoolName.KV, host_indices=pages_of(range(len(hashes))), keys=list(hashes))]
    if states:
        transfers.append(
            PoolTransfer(
                name=PoolName.MAMBA,
                host_indices=torch.arange(len(states)),
                keys=[hashes[i] for i in states],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
        )
    results = backend.batch_set_v2(transfers)
    assert all(all(ok) for ok in results.values()), results
    return kept


def trailing(count=1):
    return PoolTransfer(name=PoolName.MAMBA, keys=["__placeholder__"] * count, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_the_dynamic_backend_stores_pages_and_states_byte_for_byte(daemon, pools):
    backend = make(daemon, pools)
    hashes = chain(range(PAGE * 6))
    kept = store(backend, pools, hashes, states=[2, 5])
    result = backend.batch_exists_v2(hashes, [trailing()])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [3, 6])
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 6}
    others = [(PoolName.KV, kv_host()), (PoolName.MAMBA, mamba_host())]
    reader = make(daemon, others)  # an engine that was started later
    got = reader.batch_get_v2(
        [
            PoolTransfer(name=PoolName.KV, host_indices=pages_of(range(10, 16)), keys=hashes),
            PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([7, 3]), keys=[hashes[2], hashes[5]]),
        ]
    )
    assert got == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True] * 2}
    for i, h in enumerate(hashes):
        assert torch.equal(held(others[0][1], (10 + i) * PAGE), kept["kv", h])
    assert torch.equal(held(others[1][1], 7), kept["mamba", hashes[2]])
    assert torch.equal(held(others[1][1], 3), kept["mamba", hashes[5]])


def test_answers_match_sglangs_file_backend(daemon, pools, tmp_path, monkeypatch):
    backend = make(daemon, pools)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    files = hicache.HiCacheFile(backend._config, str(tmp_path))
    for name, pool in pools:
        files.register_mem_host_pool_v2(pool, name)
    hashes = chain(range(PAGE * 8))
    for states in ([1, 4], [4, 5, 6], []):
        for each in (backend, files):
            store(each, pools, hashes[:7], states=states)
        for asked in (hashes, hashes[:3], hashes[2:], ["unknown", *hashes]):
            for transfers in (None, [trailing()], [trailing(2)], [PoolTransfer(name=PoolName.MAMBA, keys=list(asked))]):
                mine, theirs = (each.batch_exists_v2(asked, transfers) for each in (backend, files))
                assert mine.kv_hit_pages == theirs.kv_hit_pages
                assert mine.restorable_prefix_pages == theirs.restorable_prefix_pages
                assert mine.extra_pool_hit_pages == theirs.extra_pool_hit_pages


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("zero_copy", [True, False])
def test_the_controllers_own_calls_write_and_fetch_pages(daemon, layout, zero_copy):
    hashes = chain(range(PAGE * 5))
    written, read = kv_host(layout), kv_host(layout)
    data = [fill(written, i * PAGE, i) for i in range(5)]
    for host, set_pages in ((written, True), (read, False)):
        controller = SimpleNamespace(
            storage_backend=make(daemon, [(PoolName.KV, host)]),
            page_size=PAGE,
            storage_host_pool=host,
            prefetch_sync_queue=SimpleNamespace(put=lambda ack: None),
        )

        def bind(name, controller=controller):
            return getattr(HiCacheController, name).__get__(controller)

        controller.page_set_func = bind("_page_set_zero_copy" if zero_copy else "_generic_page_set")
        controller.page_get_func = bind("_page_get_zero_copy" if zero_copy else "_generic_page_get")
        controller._page_transfer_kv_batch = bind("_page_transfer_kv_batch")
        if set_pages:
            operation = StorageOperation(pages_of(range(5)), list(range(PAGE * 5)), hash_value=hashes)
            bind("_page_backup")(operation)
            assert operation.completed_tokens == PAGE * 5
            continue
        operation = PrefetchOperation.__new__(PrefetchOperation)
        operation.__dict__.update(
            request_id="r",
            hash_value=[*hashes, "unknown"],
            prefix_keys=None,
            pool_transfers=None,
            host_indices=pages_of(range(20, 26)),
            is_terminated=lambda: False,
        )
        assert bind("_page_transfer")(operation) == 5
        for i in range(5):
            assert torch.equal(held(read, (20 + i) * PAGE), data[i])


def test_the_hybrid_controller_finds_the_deepest_state(daemon, pools):
    backend = make(daemon, pools)
    tokens = list(range(PAGE * 6))
    store(backend, pools, chain(tokens), states=[3])
    operation = SimpleNamespace(
        token_ids=tokens,
        last_hash=None,
        prefix_keys=None,
        assume_stored=False,
        pool_transfers=[trailing()],
        pool_storage_result=hicache.PoolTransferResult.empty(),
    )
    controller = SimpleNamespace(storage_backend=backend, page_size=PAGE)
    found, count = HybridCacheController._storage_hit_query(controller, operation)
    assert (len(found), count) == (4, 4 * PAGE)
    assert operation.query_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}


def test_ranks_models_and_layouts_share_only_latents(daemon, pools):
    hashes = chain(range(PAGE * 2))
    store(make(daemon, pools, tp_size=2), pools, hashes, states=[1])
    found = lambda **changed: make(daemon, pools, **changed).batch_exists_v2(hashes, [trailing()]).kv_hit_pages
    assert found(tp_size=2) == 2
    for other in (
        dict(tp_size=2, tp_rank=1),
        dict(tp_size=1),
        dict(tp_size=2, model="other"),
        dict(tp_size=2, pp_size=2),
        dict(tp_size=2, extra={"weights_digest": "other"}),
    ):
        assert found(**other) == 0
    assert make(daemon, [(PoolName.KV, kv_host("layer_first"))], tp_size=2).batch_exists(hashes) == 0
    store(make(daemon, pools, tp_size=2, is_mla_model=True), pools, hashes, states=[1])
    other = make(daemon, pools, tp_size=2, tp_rank=1, is_mla_model=True)
    assert other.batch_exists(hashes) == 2, "all ranks have the same latents"
    assert other.batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 0, "but states of their own"


def test_states_of_another_type_with_as_many_bytes_are_misses(daemon):
    """--mamba-ssm-dtype: HiCache passes states as bytes."""
    hashes = chain(range(PAGE * 2))
    kv = (PoolName.KV, kv_host())
    halves = [kv, (PoolName.MAMBA, mamba_host(dtype=torch.float16))]
    store(make(daemon, halves), halves, hashes, states=[1])
    for dtype, pages in ((torch.float16, 2), (torch.bfloat16, 0)):
        found = make(daemon, [kv, (PoolName.MAMBA, mamba_host(dtype=dtype))]).batch_exists_v2(hashes, [trailing()])
        assert found.kv_hit_pages == pages


def test_pages_of_earlier_weights_are_misses_after_a_clear(daemon, pools):
    """The operator calls `clear` after a change of weights. SGLang's controller passes the request to the backend."""
    hashes = chain(range(PAGE * 3))
    backend, other = make(daemon, pools), make(daemon, pools)
    before = store(backend, pools, hashes, states=[2])
    controller = SimpleNamespace(enable_storage=True, storage_backend=backend)
    assert HybridCacheController.clear_storage_backend(controller) and backend.clear() is True
    assert backend.batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 0
    assert backend.batch_get_v1(hashes, pages_of(range(3))) == [False] * 3
    behind = store(backend, pools, hashes, seed=50, states=[2])
    for each, kept in ((backend, behind), (other, before)):
        assert each.batch_exists_v2(hashes, [trailing()]).restorable_prefix_pages == [3]
        transfers = [
            PoolTransfer(name=PoolName.KV, host_indices=pages_of(range(10, 13)), keys=hashes),
            PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([7]), keys=[hashes[2]]),
        ]
        assert each.batch_get_v2(transfers) == {PoolName.KV: [True] * 3, PoolName.MAMBA: [True]}
        for i, h in enumerate(hashes):
            assert torch.equal(held(pools[0][1], (10 + i) * PAGE), kept["kv", h])
        assert torch.equal(held(pools[1][1], 7), kept["mamba", hashes[2]])
    assert make(daemon, pools).batch_get_v1(hashes, pages_of(range(10, 13))) == [True] * 3
    assert torch.equal(held(pools[0][1], 10 * PAGE), before["kv", hashes[0]]), (
        "an engine of the checkpoint's own weights"
    )
    backend.clear()
    assert backend.batch_exists(hashes) == 0, "each clear begins anew"


class Ranks:
    """The group of the ranks, which are all in one process: rank 0 calls first."""

    name = None

    def broadcast_object(self, obj=None, src=0):
        assert src == 0
        self.name = self.name or obj
        return self.name


class Parted:
    def broadcast_object(self, obj=None, src=0):
        raise ConnectionError("as a test wants it")


def test_ranks_that_share_latents_find_pages_of_rank_0_after_a_clear(daemon, pools):
    hashes = chain(range(PAGE * 2))
    make_rank = lambda rank: make(daemon, pools, tp_size=2, tp_rank=rank, is_mla_model=True)
    ranks, other = [make_rank(0), make_rank(1)], make_rank(1)
    with get_parallel().override(attn_tp_group=Ranks()):
        assert all(rank.clear() for rank in ranks)
    store(ranks[0], pools, hashes, states=[1])
    assert ranks[1].batch_exists(hashes) == 2 and other.batch_exists(hashes) == 0
    assert ranks[1].batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 0, "states are each rank's own"
    with get_parallel().override(attn_tp_group=Parted()):
        assert ranks[1].clear() and ranks[1].batch_exists(hashes) == 0, "ranks that do not agree find nothing"
        heads = make(daemon, pools, tp_size=2)
        store(heads, pools, hashes)
        assert heads.clear() and heads.batch_exists(hashes) == 0
    assert ranks[0].batch_exists(hashes) == 2


def test_everything_is_a_miss_until_a_daemon_starts(tmp_path, pools):
    absent = SimpleNamespace(rpc_socket=f"{tmp_path}/rpc.sock", session_socket=f"{tmp_path}/session.sock")
    backend = make(absent, pools)
    hashes = chain(range(PAGE * 2))
    assert backend.batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 0
    assert backend.batch_set_v1(hashes, pages_of([0, 1])) == [False, False]
    assert backend.batch_get_v1(hashes, pages_of([0, 1])) == [False, False]
    assert backend.get(hashes[0], pools[0][1].get_dummy_flat_data_page()) is None
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path)):
        time.sleep(0.1)
        store(backend, pools, hashes, states=[1])
        assert backend.batch_exists_v2(hashes, [trailing()]).kv_hit_pages == 2


def test_metrics_have_sglangs_form(daemon, pools):
    backend = make(daemon, pools)
    hashes = chain(range(PAGE * 3))
    store(backend, pools, hashes)
    backend.batch_get_v1(hashes, pages_of(range(3)))
    metrics = backend.get_stats()
    assert metrics.backup_pgs == [3] and metrics.prefetch_pgs == [3]
    assert metrics.backup_bandwidth[0] > 0 and metrics.prefetch_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []


def test_wrong_settings_are_refused_by_key(daemon):
    for key, value in (("staging_bytes", "64MiB"), ("timeout_ms", -1), ("rpc_socket", 3)):
        with pytest.raises(ValueError, match=key):
            make(daemon, extra={key: value})
    backend = make(daemon, extra={"a_key_of_sglang": json})
    backend.close()
    assert backend.exists("a") is False


def updater(model):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    nothing = lambda *args, **kwargs: None
    return WeightUpdater(tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders={}, get_model=lambda: model,
                         update_model_fields=nothing, recapture_cuda_graph=nothing, get_model_runner=nothing)  # fmt: skip


def flush(backend):
    """SGLang's own reset of its controller, without threads."""
    done = lambda: None
    HiCacheController.reset(SimpleNamespace(
        storage_backend=backend, enable_storage=False, _stop_storage_threads=done, write_queue=[], load_queue=[],
        ack_write_queue=[], ack_load_queue=[], storage_stop_event=SimpleNamespace(clear=done),
    ))  # fmt: skip


def loads(model):
    return lambda named: model.load_state_dict(dict(named), strict=False)


CHANGES = {
    "tensor": lambda update, new: update.update_weights_from_tensor(new),
    "distributed": lambda update, new: update.load_weights_from_distributed(new),
    "disk": lambda update, new: update.update_weights_from_disk("/nowhere", "auto"),
    "ipc": lambda update, new: update.update_weights_from_ipc(None),
    "session": lambda update, new: update.begin_weight_update(),
}


@pytest.fixture
def unseen(monkeypatch):
    """Backends of other tests have names that begin with the checkpoint's name."""
    monkeypatch.setattr(weight_changes, "_seen", weight_changes._seen)
    assert weight_changes.INSTALLED


@pytest.mark.parametrize("way", CHANGES)
def test_a_change_of_weights_in_place_is_detected(daemon, pools, unseen, way):
    """Afterwards the engine finds no old page, and engines with the old weights find no page of the new ones."""
    hashes = chain(range(PAGE * 3))
    backend = make(daemon, pools)
    before = store(backend, pools, hashes[:2], states=[1])
    model = torch.nn.Linear(4, 4)
    model.load_weights = loads(model)
    with contextlib.suppress(Exception):  # some methods need a device, or SGLang's published configuration
        CHANGES[way](updater(model), [("weight", torch.ones(4, 4))])
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_set_v1(hashes, pages_of(range(3))) == [False] * 3, "the former pages are still in host memory"
    assert backend.clear() and backend.batch_exists(hashes) == 0, "before the flush it is too early"
    flush(backend)
    assert backend.batch_exists(hashes) == 0
    behind = store(backend, pools, hashes, seed=90, states=[2])
    engine = make(daemon, pools)  # an engine with the old weights, by their digest
    for each, kept, pages in ((backend, behind, 3), (engine, before, 2)):
        assert each.batch_exists(hashes) == pages
        assert each.batch_get_v1(hashes[:2], pages_of(range(10, 12))) == [True, True]
        assert torch.equal(held(pools[0][1], 10 * PAGE), kept["kv", hashes[0]])
    flush(backend)
    assert backend.batch_exists(hashes) == 3, "a flush without a change begins nothing"


def test_attaching_again_after_a_weight_change_starts_a_generation(daemon, pools, unseen, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hashes = chain(range(PAGE * 2))
    named = dict(model=str(tmp_path), extra={"weights_digest": ""})
    first = make(daemon, pools, **named)
    store(first, pools, hashes)
    assert make(daemon, pools, **named).batch_exists(hashes) == 2
    model = torch.nn.Linear(2, 2)
    model.load_weights = loads(model)
    with contextlib.suppress(Exception):
        updater(model).load_weights_from_distributed([("bias", torch.ones(2))])
    assert make(daemon, pools, **named).batch_exists(hashes) == 0


def test_weights_changed_before_the_first_attach_do_not_use_the_checkpoints_name(daemon, pools, monkeypatch, tmp_path):
    """The module is imported by the attach, after the change."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hashes = chain(range(PAGE * 2))
    named = dict(model=str(tmp_path), extra={"weights_digest": ""})
    store(make(daemon, pools, **named), pools, hashes)
    monkeypatch.setattr(weight_changes, "UNSEEN", True)
    late = make(daemon, pools, **named)
    assert late.batch_exists(hashes) == 0
    store(late, pools, hashes, seed=90)
    monkeypatch.setattr(weight_changes, "UNSEEN", False)
    other = make(daemon, pools, **named)
    assert other.batch_get_v1(hashes[:1], pages_of([10])) == [True]
    assert not torch.equal(held(pools[0][1], 10 * PAGE), held(pools[0][1], 0)), "the pages of before"
    monkeypatch.setattr(weight_changes, "UNSEEN", True)
    store(make(daemon, pools), pools, hashes)
    assert make(daemon, pools).batch_exists(hashes) == 2, "the operator names the weights"


def test_an_attach_at_the_start_differs_from_a_later_one():
    class Starting(HiCacheController):
        def __init__(self):
            self.attach_storage_backend()

        def attach_storage_backend(self):
            self.late = weight_changes.attached_late()

    controller = Starting()
    assert controller.late is False
    controller.attach_storage_backend()
    assert controller.late is True
    assert weight_changes.attached_late() is False and weight_changes.UNSEEN is False
