# SPDX-License-Identifier: Apache-2.0
"""Pages of HiCache's pools as objects of the cache.

HiCache names pages by chained hashes of their tokens, so hits are exact prefixes. A page of keys and values, a Mamba
state, and a page of any other pool are each one object of the cache. Every failure is a miss: no call raises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from ashlar import checkpoint
from ashlar.pages import Fetched, PageClient, PageStore, Slot
from ashlar.sglang import weight_changes
from ashlar.sglang.engine import Draft, Engine, agreed
from ashlar.sglang.metrics import AshlarMetrics, Counts
from ashlar.sockets import default_sockets

logger = logging.getLogger(__name__)

_LEAST_PAGE_TOKENS = 8  # least tokens of an object in the page store
_STORED = frozenset(["published", "already_present", "being_published"])


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys of the extra config that this backend reads."""

    rpc_socket: str = ""  # empty: as ashlar.sockets.default_sockets
    session_socket: str = ""
    weights_digest: str = ""  # empty: use the digest of the checkpoint's files, or a hub's commit
    tokens_per_second: float = 0.0  # rate of prefill; 0: unknown, and every page is worth loading
    staging_bytes: int = 64 << 20  # memory shared with the daemon, per pool
    timeout_ms: int = 5000  # limit of one call to the daemon
    land_ms: int = 5000  # limit of a landing, and of the wait for a free page in the shared memory
    retry_seconds: float = 5.0  # time between attempts to open a cache

    @staticmethod
    def read(config: dict[str, Any] | None) -> Settings:
        """Returns the settings of an extra config. ValueError: a value is wrong; the message begins with its key. Other
        keys are SGLang's own."""
        known: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
        values: dict[str, Any] = dict(zip(("rpc_socket", "session_socket"), default_sockets(), strict=True))
        for name, value in (config or {}).items():
            if name not in known:
                continue  # key of SGLang itself
            kind: Any = type(known[name])
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{name}: {value!r} was given; expected {kind.__name__}")
            if kind is not str and value < 0:
                raise ValueError(f"{name}: {value!r} is negative; expected 0 or more")
            values[name] = kind(value)
        return Settings(**values)


def _bytes(tensor: torch.Tensor) -> Slot:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


@dataclasses.dataclass
class _Pool:
    """A host pool, and its store once that is open."""

    host: Any
    page_bytes: int
    page_dtype: torch.dtype
    types: str  # types of the elements; page_dtype is bytes for states
    drafted: bool  # whether a draft model has computed a part of each page
    page_size: int
    store: PageStore | None = None
    next_attempt: float = 0.0


class AshlarStorage(HiCacheStorage):
    """HiCache's storage backend. Thread-safe: HiCache's prefetching and writing threads call it concurrently.

    ValueError: the extra config has a wrong value. No other call raises: every failure of the cache is a miss, and is
    logged. A page is copied between HiCache's host memory and memory that is shared with the daemon, and belongs to
    HiCache again when the call returns.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings = Settings.read(storage_config.extra_config)
        self._engine = Engine.here()
        name = storage_config.model_name or "unnamed"
        self._model = self._engine.model_id(name)
        self._flops_per_token = self._engine.flops_per_token(name)
        self._weights = self._engine.weights(name, self._settings.weights_digest)
        self._drafts = Draft.here()
        self._draft: checkpoint.Weights | None = None  # None: no pool has drafts, or the weights have no name
        if self._weights is None:
            logger.warning(
                "Ashlar: the cache is off for %s: cannot identify the weights (load_format: %s); load them from a local "
                "directory or a commit, or set weights_digest",
                self._model,
                self._engine.load_format or "not published",
            )
        # Generation of the engine's weights; after the first `clear`, a name that only this engine uses.
        self._generation = ""
        self._between = False  # whether weights have changed, and pages computed with the old ones were not flushed yet
        self._client: PageClient | None = None
        self._next_attempt = 0.0
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()  # held while clients and stores are opened
        self._closed = False
        self._own_counts = Counts({
            "tp_rank": storage_config.tp_rank, "pp_rank": storage_config.pp_rank, "dp_rank": storage_config.dp_rank
        })  # fmt: skip
        # Guards counts. Not held during calls to the daemon: SGLang's scheduler reads the counts in each step.
        self._counting = threading.Lock()
        self._counts: dict[str, list[Any]] = {
            f"{what}_{unit}": [] for what in ("prefetch", "backup") for unit in ("pgs", "bandwidth")
        }
        weight_changes.follow(self)
        if (weight_changes.changes() > 0 or weight_changes.UNSEEN) and not self._settings.weights_digest:
            self.clear()  # the checkpoint's name may refer to earlier weights
            logger.warning(
                "Ashlar: attached to a running engine, whose weights may differ from the checkpoint's: only this engine uses "
                "the pages of %s; set weights_digest in the extra config to share them", self._model,
            )  # fmt: skip

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host: Any) -> None:
        known = self._pools.get(name)
        if known is not None and known.host is host:
            return
        try:
            page = host.get_dummy_flat_data_page()
        except Exception as error:  # a logical pool, which has no pages of bytes, cannot be stored
            logger.warning("Ashlar: HiCache's pool %s is not cached: %s", name, error)
            return
        self._pools[name] = _Pool(
            host=host,
            page_bytes=page.numel() * page.element_size(),
            page_dtype=page.dtype,
            types=" ".join(str(getattr(host, name, page.dtype)) for name in ("temporal_dtype", "conv_dtype")),
            drafted=name.startswith("draft") or bool(getattr(host, "mtp_draft_buffer_infos", ())),
            page_size=max(1, getattr(host, "page_size", 1) or 1),
        )
        if self._pools[name].drafted and self._draft is None:
            self._draft = self._drafts.weights(self._engine, self._settings.weights_digest)
            if self._draft is None:
                logger.warning(
                    "Ashlar: HiCache's pool %s is not cached: cannot identify the weights of the draft model", name
                )

    def _content(self, name: str, pool: _Pool) -> str:
        """Returns everything besides model and page size that must agree between engines that share a pool's pages."""
        config = self._config
        parts = [
            f"hicache pool={name}",
            self._engine.content,
            f"format={getattr(pool.host, 'storage_format_tag', None) or ''}",
            f"layout={getattr(pool.host, 'layout', '')}",
            f"types={pool.types}",
            f"page={self._kv_page_size()}",
            f"pp={config.pp_rank}/{config.pp_size}",
            f"cp={config.attn_cp_rank}/{config.attn_cp_size}",
        ]
        if self._is_own_part(name, pool):
            parts.append(f"tp={config.tp_rank}/{config.tp_size}")
        if pool.drafted:
            parts.append(f"draft {self._drafts.content}")
        if config.dcp_size > 1:
            parts.append(f"dcp={config.dcp_rank}/{config.dcp_size} of {config.logical_page_size}")
        return " ".join(parts)

    def _is_own_part(self, name: str, pool: _Pool) -> bool:
        """Returns whether each rank has its own part of the pool: of keys, values and states. All ranks have the same
        latents. A draft model may have keys where the model has latents."""
        heads = name.startswith("draft") and isinstance(pool.host, MHATokenToKVPoolHost)
        return not self._config.is_mla_model or name == PoolName.MAMBA.value or heads

    def _kv_page_size(self) -> int:
        pool = self._pools.get(PoolName.KV.value)
        return 1 if pool is None else pool.page_size

    def _store(self, name: str) -> PageStore | None:
        """Returns None if there is no cache; every page is then a miss."""
        pool = self._pools.get(str(name))
        weights = None if self._weights is None else self._weights.digest()
        if pool is None or self._closed or weights is None or self._between:
            return None
        if pool.drafted:
            draft = None if self._draft is None else self._draft.digest()
            if draft is None:
                return None
            weights = hashlib.sha256(f"{weights} {draft}".encode()).hexdigest()
        if pool.store is not None:
            return pool.store
        with self._lock:
            now = time.monotonic()
            if pool.store is None and not self._closed and now >= max(self._next_attempt, pool.next_attempt):
                self._open(str(name), pool, weights, now)
            return pool.store

    def _open(self, name: str, pool: _Pool, weights: str, now: float) -> None:
        settings = self._settings
        try:
            if self._client is None:
                self._next_attempt = now + settings.retry_seconds
                self._client = PageClient(
                    settings.rpc_socket, settings.session_socket, name="sglang", timeout_ms=settings.timeout_ms
                )
                self._next_attempt = 0.0
            pool.next_attempt = now + settings.retry_seconds
            tokens = max(_LEAST_PAGE_TOKENS, self._kv_page_size())
            ranks = self._config.pp_size * (self._config.tp_size if self._is_own_part(name, pool) else 1)
            pool.store = PageStore(
                self._client,
                model_id=self._model,
                weights_digest=weights,
                content=self._content(name, pool),
                page_bytes=pool.page_bytes,
                page_tokens=tokens,
                # A page shorter than eight tokens counts as eight; the rate and the FLOPs correct its cost.
                tokens_per_second=settings.tokens_per_second * tokens / self._kv_page_size(),
                flops_per_token=self._flops_per_token * self._kv_page_size() / tokens / ranks,
                slots=max(2, min(1024, settings.staging_bytes // pool.page_bytes)),
                land_ms=settings.land_ms,
            )
        except Exception as error:
            logger.warning("Ashlar: cannot open the cache for HiCache's pool %s: %s", name, error)

    def _names(self, keys: list[str]) -> list[bytes]:
        """Returns the names of pages in the cache. All pages of a call belong to one generation."""
        generation = self._generation
        return [hashlib.sha256((generation + key).encode()).digest() for key in keys]

    # ---- pages of one pool; every failure is a miss

    def _guarded(self, what: str, fallback: Any, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:
            logger.exception("Ashlar: cannot %s HiCache's pages", what)
            return fallback

    def _exist(self, name: str, keys: list[str]) -> list[bool]:
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)
        return self._guarded("look up", [False] * len(keys), lambda: store.exists(self._names(keys)))

    def _set(self, name: str, keys: list[str], page_of: Callable[[int], torch.Tensor]) -> list[bool]:
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)

        def fill(index: int, slot: Slot) -> None:
            page = _bytes(page_of(index))
            if page.size != slot.size:
                raise ValueError(f"page: {page.size} bytes; expected {slot.size}, the page size of the pool")
            np.copyto(slot, page)

        begun = time.monotonic()
        outcomes = self._guarded("store", [], lambda: store.put(self._names(keys), fill))
        self._count("backup", outcomes.count("published"), store, begun)
        if self._config.enable_storage_metrics:
            for outcome in outcomes:
                self._own_counts.add(1, "stored_pages", outcome)
        return [outcome in _STORED for outcome in outcomes] or [False] * len(keys)

    def _get(self, name: str, keys: list[str], take: Callable[[int, torch.Tensor], None]) -> list[bool]:
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)
        dtype = self._pools[str(name)].page_dtype

        def read(index: int, slot: Slot) -> None:
            take(index, torch.from_numpy(slot).view(dtype))

        begun = time.monotonic()
        pages = self._guarded("fetch", None, lambda: store.fetch(self._names(keys), read))
        if pages is None:
            return [False] * len(keys)
        found = [page.miss is None for page in pages]
        self._count("prefetch", found.count(True), store, begun)
        if self._config.enable_storage_metrics:
            self._count_fetched(name, pages, time.monotonic() - begun)
        return found

    def _count_fetched(self, name: str, pages: list[Fetched], seconds: float) -> None:
        """Counts tokens of keys and values only: a state covers the same tokens."""
        keys = str(name) == PoolName.KV.value
        kind = "keys" if keys else "states" if str(name) == PoolName.MAMBA.value else str(name)
        tokens = self._pools[str(name)].page_size if keys else 0
        saved = 0
        for page in pages:
            if page.miss is not None:
                self._own_counts.add(1, "missed_pages", page.miss)
                continue
            tier = page.tier or "dram"
            self._own_counts.add(1, "loaded_pages", tier, kind)
            self._own_counts.add(tokens, "saved_tokens", tier, kind)
            saved += tokens
        self._own_counts.add(seconds, "load_seconds")
        if self._settings.tokens_per_second > 0:
            self._own_counts.add(max(0.0, saved / self._settings.tokens_per_second - seconds), "saved_seconds")

    def _count(self, what: str, pages: int, store: PageStore, begun: float) -> None:
        if pages == 0 or not self._config.enable_storage_metrics:
            return
        gigabytes = pages * store.page_bytes / 2**30
        with self._counting:
            self._counts[f"{what}_pgs"].append(pages)
            self._counts[f"{what}_bandwidth"].append(gigabytes / max(time.monotonic() - begun, 1e-9))

    # ---- interface v2

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv_pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages, which this backend does not store
            there = self._exist(transfer.name, keys[:kv_pages])
            run = there.index(False) if False in there else len(there)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                ends = set(range(1, run + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                ends = {end for end in range(1, kv_pages + 1) if all(there[max(0, end - window) : end])}
            if ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _each(
        self, transfers: list[PoolTransfer], move: Callable[[str, list[str], Any, list[int]], list[bool]]
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, pool = list(transfer.keys or []), self._pools.get(str(transfer.name))
            indices = transfer.host_indices
            if pool is None or indices is None or indices.numel() != len(keys) * pool.page_size:
                results[transfer.name] = [False] * len(keys)
                continue
            results[transfer.name] = move(str(transfer.name), keys, pool.host, indices[:: pool.page_size].tolist())
        return results

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._get_pages)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._set_pages)

    def _get_pages(self, name: str, keys: list[str], host: Any, at: list[int]) -> list[bool]:
        return self._get(name, keys, lambda i, page: host.set_from_flat_data_page(at[i], page))

    def _set_pages(self, name: str, keys: list[str], host: Any, at: list[int]) -> list[bool]:
        return self._set(name, keys, lambda i: host.get_data_page(at[i], flat=True))

    # ---- interface v1: keys and values by their places in the host pool

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        transfer = PoolTransfer(name=PoolName.KV, host_indices=host_indices, keys=keys)
        return self.batch_get_v2([transfer])[PoolName.KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        transfer = PoolTransfer(name=PoolName.KV, host_indices=host_indices, keys=keys)
        return self.batch_set_v2([transfer])[PoolName.KV]

    # ---- the first interface: pages of keys and values, one tensor per key

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        if len(targets) != len(keys):
            return [None] * len(keys)

        def take(index: int, page: torch.Tensor) -> None:
            targets[index].view(-1).view(torch.uint8).copy_(page.view(torch.uint8))

        landed = self._get(PoolName.KV.value, keys, take)
        return [target if hit else None for target, hit in zip(targets, landed)]

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        pages = list(values or [])
        return len(pages) == len(keys) and all(self._set(PoolName.KV.value, keys, lambda i: pages[i]))

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0] if target_location is not None else None

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value]) if value is not None else False

    def exists(self, key: str) -> bool:
        return self._exist(PoolName.KV.value, [key])[0]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        there = self._exist(PoolName.KV.value, keys)
        return there.index(False) if False in there else len(there)

    # ---- the rest

    def weights_change(self) -> None:
        """Called before the weights change. Until SGLang has flushed its memory, pages are neither stored nor found."""
        if not self._between:
            self._between = True
            logger.warning(
                "Ashlar: the weights of %s are changing; the cache is off until SGLang flushes its memory", self._model
            )

    def memory_flushed(self) -> None:
        """Called after SGLang has flushed its GPU and host memory."""
        if self._between:
            self.clear()
            self._between = False
            logger.info(
                "Ashlar: the weights of %s have changed; its pages are no longer shared with other engines", self._model
            )

    def clear(self) -> bool:
        """Called after a change of weights in place: the new weights have no digest.

        Afterwards the engine finds no page stored before, and only this engine finds the pages that it stores. Older
        pages stay available to other engines.
        """
        name = uuid.uuid4().hex
        # Only rank 0 stores the pages that all ranks look up.
        if self._config.is_mla_model and self._config.tp_size > 1:
            name = self._guarded("agree on a generation of", name, lambda: agreed(name))
        self._generation = name
        return True

    def get_stats(self) -> Any:
        """Returns the bytes moved since the last call, for SGLang's Prometheus metrics."""
        if not self._config.enable_storage_metrics:
            return None
        with self._counting:
            counts, self._counts = self._counts, {name: [] for name in self._counts}
        return AshlarMetrics(**counts, ashlar=self._own_counts.take())

    def close(self) -> None:
        """Ends the session. Call it after HiCache has stopped its threads: no other call may be in progress."""
        for weights in (self._weights, self._draft):
            if weights is not None:
                weights.close()
        with self._lock:
            self._closed = True
            stores = [pool.store for pool in self._pools.values() if pool.store is not None]
            for pool in self._pools.values():
                pool.store = None
            self._client = None
        for store in stores:
            store.close()
