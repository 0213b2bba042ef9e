# SPDX-License-Identifier: Apache-2.0
"""Drives the connector with vLLM's cache specs and block tensors, without an engine: one worker saves blocks of random
bytes, and another loads them into other blocks. The tensors are on the CPU, or on the lagging device."""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import time
import types

import lagging_device
import numpy as np
import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import ashlar
import ashlar.vllm.rows
from ashlar.checkpoint import Weights
from ashlar.vllm.identity import Identity
from ashlar.vllm.messages import Load, Save, StepMetadata
from ashlar.vllm.model import Described, layers_of
from ashlar.vllm.options import Options
from ashlar.vllm.worker import Worker

BLOCKS = 24


def config_of(specs, layout="LBNHC"):
    """`specs`: {layer name: spec}. Layers with the same spec form a group and share a tensor."""
    groups, tensors, offset = [], [], 0
    for spec in dict.fromkeys(specs.values()):
        names = [name for name, each in specs.items() if each == spec]
        page = spec.page_size_bytes
        compact = KVCacheLayout[layout].is_layer_compact
        layer_stride, block_stride = (page * BLOCKS, page) if compact else (page, page * len(names))
        if layout == "BHLNC":
            layer_stride //= spec.num_heads
        size = page * BLOCKS * len(names)
        tensors.append(KVCacheTensor(size, names, layer_stride, block_stride, offset))
        groups.append(KVCacheGroupSpec(names, spec))
        offset += -(-size // 4096) * 4096
    return KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout=layout)


def describe(config, name="driven", ranks=1, text=None, staged=0, packed=True):
    layers = layers_of(config, text, ranks)
    weights = Weights("", f"digest of {name}")
    unset = dict.fromkeys(field.name for field in dataclasses.fields(Identity))
    named = {"model_id": name, "parts": {"specs": layers.specs}, "tokenizer": "", "weights": weights}
    identity = Identity(**unset | named)
    head = max([0, *(each.conv_kernel - 1 for each in layers.layout if isinstance(each, ashlar.Linear))])
    model = ashlar.Model(
        name,
        "",
        layers.layout,
        layers.block,
        head=head,
        dtype=config.kv_cache_layout,
        tensor_parallel_size=ranks,
    )
    return Described(
        identity=identity,
        model=model,
        attention=layers.attention,
        linear=layers.linear,
        windows=layers.windows,
        attention_groups=layers.attention_groups,
        groups=len(config.kv_cache_groups),
        block=layers.block,
        grain=layers.grain,
        packed=packed,
        keeps_within=False,
        staged=staged,
        segments=layers.segments,
    )


class Driven:
    """A worker, its caches, and the first free block of each text."""

    def __init__(self, config, described, daemon, kernel_blocks=1, far=False, **options):
        sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
        options = Options(**sockets, **{"wait_for_saves": True, **options})
        self.config, self.described = config, described
        self.worker = Worker(described, options)
        self.caches = {}
        with self.worker.allocation() or contextlib.nullcontext():
            size = max(1 << 16, *(each.offset + each.size for each in config.kv_cache_tensors))
            self.raw = lagging_device.zeros(size) if far else torch.zeros(size, dtype=torch.int8, device="cpu")
        for tensor, group in zip(config.kv_cache_tensors, config.kv_cache_groups):
            spec, layout = group.kv_cache_spec, KVCacheLayout[config.kv_cache_layout]
            kernel = spec.block_size // kernel_blocks if kernel_blocks > 1 else None
            views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor, kernel)
            self.caches.update(zip(tensor.layers, views))
        self.worker.register(self.caches, dict.fromkeys(self.caches))

    def blocks(self, tokens, first):
        """Block tables of a text, one per group, with the blocks that vLLM would keep."""
        count, tables = self.described.count(tokens), []
        for number, group in enumerate(self.config.kv_cache_groups):
            table = [(first + 7 * number + i) % (BLOCKS - 1) + 1 for i in range(count)]
            manager = KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec)
            if manager is MambaManager:
                table = [0] * (count - 1) + table[-1:]
            elif manager is not FullAttentionManager:
                place = next(place for place in self.described.windows if place.group == number)
                kept = len(self.described.window(place, [list(range(count))] * (number + 1), tokens))
                table = [0] * (count - kept) + table[count - kept :]
            tables.append(table)
        return tuple(tables)

    def content(self, blocks, tokens=0):
        """{layer name: bytes that a resumed text reads}. If a text ends inside a block with heads, only the bytes of
        its tokens."""
        found, within = {}, tokens % self.described.block
        rows = {name for layer, name in self.described.attention} | {place.name for place in self.described.windows}
        for number, group in enumerate(self.config.kv_cache_groups):
            for name in group.layer_names:
                tensor = self.caches[name].view(torch.uint8)
                whole = tensor.unflatten(0, (-1, len(tensor) // BLOCKS))
                kept = [
                    torch.empty(whole[0].shape, dtype=torch.uint8).copy_(whole[each]) for each in blocks[number] if each
                ]
                if within and name in rows and kept:
                    parts, heads, tokens_of_part, row = kept[-1].shape
                    kept[-1] = (
                        kept[-1].transpose(1, 2).reshape(parts * tokens_of_part, heads, row)[:within].contiguous()
                    )
                found[name] = [each.numpy().tobytes() for each in kept]
        return found

    def save(self, tokens, blocks, salt=""):
        text = np.arange(tokens, dtype=np.int32)
        self.worker.save(StepMetadata([], [Save(1, text, [tokens], blocks, tokens, salt)], 1))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            report = self.worker.report()
            if report is not None and report.saved:
                return bool(report.kept)
        return False

    def load(self, tokens, blocks, daemon, present=0):
        """Returns whether the text was found and loaded."""
        return self.loads(tokens, [blocks], daemon, present) == [True]

    def loads(self, tokens, tables, daemon, present=0, found=lambda: None):
        """Loads the text for several requests at once. Returns whether each was loaded; empty if the text was not
        found."""
        scheduler = ashlar.Cache(
            self.described.named(self.described.model),
            daemon.rpc_socket,
            daemon.session_socket,
            memory_kind=ashlar.MemoryKind.NONE,
            capture_tokens=self.described.block,
        )
        with scheduler, scheduler.begin(np.arange(tokens + 1, dtype=np.int32)) as request:
            if request.plan.prefix_tokens != tokens:
                return []
            table, plan, done = -(-(tokens + 1) // self.described.block), request.plan_bytes(), {}
            loads = [
                Load(str(number), plan, tokens, present, tuple(map(list, blocks)), table, "dram")
                for number, blocks in enumerate(tables)
            ]
            found()
            self.worker.start_loads(StepMetadata(loads, [], 0))
            deadline = time.monotonic() + 10
            while len(done) < len(loads) and time.monotonic() < deadline:
                ended, failed = self.worker.poll_loads(StepMetadata([], [], 0))
                done |= {name: name not in failed for name in ended}
        return [done.get(load.request, False) for load in loads]

    def close(self):
        self.worker.close()


def drive(specs, daemon, **options):
    """Saves and loads a text. Returns whether it was found and whether all of its bytes are equal.

    In a separate process: engines are forked from this process, which must not have connected to a daemon.
    """
    return in_child(_drive, specs, daemon, **options)


def in_child(work, specs, daemon, **options):
    sockets = types.SimpleNamespace(rpc_socket=str(daemon.rpc_socket), session_socket=str(daemon.session_socket))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, specs, sockets, **options).result(timeout=300)


def be_far():
    """Uses the lagging device for the rest of this process, which is a child."""
    lagging_device.register()
    ashlar.vllm.rows.packs = lambda: False


def _drive(
    specs, daemon, name="driven", tokens=None, layout="LBNHC", kernel_blocks=1, ranks=1, text=None, staged=0, far=False,
    spoil=None, **options,
):  # fmt: skip
    """`staged`: bytes of staging memory. `far`: whether the caches are on the lagging device; `spoil` is called with
    its module first."""
    config = config_of(specs, layout)
    described = describe(config, name, ranks, text, staged, packed=not far)
    tokens = tokens or 3 * described.block
    with contextlib.ExitStack() as stack:
        if far:
            be_far()
        one, two = (Driven(config, described, daemon, kernel_blocks, far, **options) for _ in range(2))
        stack.callback(one.close)
        stack.callback(two.close)
        if spoil is not None:
            spoil(lagging_device)
        # States of delta nets are numbers, so the bytes contain no NaN and no denormal, which a CPU may flush to zero.
        numbers = any(isinstance(layer, ashlar.Linear) for layer in described.model.layers)
        content = torch.randint(*((16, 64) if numbers else (-128, 128)), one.raw.shape, dtype=torch.int8)
        one.raw.copy_(content, non_blocking=True)  # a step of the engine, which may not have ended
        source, target = one.blocks(tokens, 0), two.blocks(tokens, 11)
        if not one.save(tokens, source):
            return False, False
        two.raw.zero_()
        if not two.load(tokens, target, daemon):
            return False, False
        return True, one.content(source, tokens) == two.content(target, tokens)
