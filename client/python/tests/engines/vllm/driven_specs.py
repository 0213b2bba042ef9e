# SPDX-License-Identifier: Apache-2.0
"""Drives the connector with vLLM's cache specs and block tensors, without an engine: blocks of random bytes are saved by
one worker, and loaded by another into other blocks."""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import time
import types

import numpy as np
import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import ashlar
from ashlar.checkpoint import Weights
from ashlar.vllm.identity import Identity
from ashlar.vllm.messages import Load, Save, StepMetadata
from ashlar.vllm.model import Described, layers_of
from ashlar.vllm.options import Options
from ashlar.vllm.worker import Worker

BLOCKS = 24


def config_of(specs, layout="LBNHC"):
    """`specs`: {layer name: spec}. Layers with one spec are a group, and a tensor."""
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


def describe(config, name="driven", ranks=1, text=None):
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
        packed=True,
        keeps_within=False,
    )


class Driven:
    """A worker, its caches, and the first free block of each text."""

    def __init__(self, config, described, daemon, kernel_blocks=1):
        options = Options(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket, wait_for_saves=True)
        self.config, self.described = config, described
        self.worker = Worker(described, options)
        self.caches = {}
        with self.worker.allocator.context():
            size = max(each.offset + each.size for each in config.kv_cache_tensors)
            self.raw = torch.zeros(max(size, 1 << 16), dtype=torch.int8, device="cpu")
        for tensor, group in zip(config.kv_cache_tensors, config.kv_cache_groups):
            spec, layout = group.kv_cache_spec, KVCacheLayout[config.kv_cache_layout]
            kernel = spec.block_size // kernel_blocks if kernel_blocks > 1 else None
            views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor, kernel)
            self.caches.update(zip(tensor.layers, views))
        self.worker.register(self.caches, {})

    def blocks(self, tokens, first):
        """Tables of a text, one a group: with the blocks that vLLM would keep of it."""
        count, tables = tokens // self.described.block, []
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

    def content(self, blocks):
        """{layer name: bytes that a resumed text reads}."""
        found = {}
        for number, group in enumerate(self.config.kv_cache_groups):
            for name in group.layer_names:
                tensor = self.caches[name].view(torch.uint8)
                parts = len(tensor) // BLOCKS
                whole = tensor.unflatten(0, (-1, parts))
                found[name] = [whole[block].contiguous().numpy().tobytes() for block in blocks[number] if block != 0]
        return found

    def save(self, tokens, blocks):
        text = np.arange(tokens, dtype=np.int32)
        self.worker.save(StepMetadata([], [Save(1, text, [tokens], blocks, tokens)], 1))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            report = self.worker.report()
            if report is not None and report.saved:
                return bool(report.kept)
        return False

    def load(self, tokens, blocks, daemon):
        """Returns whether the text was found and loaded."""
        scheduler = ashlar.Cache(
            self.described.named(self.described.model),
            daemon.rpc_socket,
            daemon.session_socket,
            memory_kind=ashlar.MemoryKind.NONE,
            capture_tokens=self.described.block,
        )
        with scheduler, scheduler.begin(np.arange(tokens + 1, dtype=np.int32)) as request:
            if request.plan.prefix_tokens != tokens:
                return False
            table = -(-(tokens + 1) // self.described.block)
            load = Load("a request", request.plan_bytes(), tokens, 0, tuple(map(list, blocks)), table, "dram")
            self.worker.start_loads(StepMetadata([load], [], 0))
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                ended, failed = self.worker.poll_loads(StepMetadata([], [], 0), ())
                if ended:
                    return not failed
        return False

    def close(self):
        self.worker.close()


def drive(specs, daemon, **options):
    """Saves and loads a text; returns whether it was found again and whether all of its bytes are the same.

    In a process of its own: engines are forked from this one, which may not have connected to a daemon.
    """
    sockets = types.SimpleNamespace(rpc_socket=str(daemon.rpc_socket), session_socket=str(daemon.session_socket))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_drive, specs, sockets, **options).result(timeout=60)


def _drive(specs, daemon, name="driven", tokens=None, layout="LBNHC", kernel_blocks=1, ranks=1, text=None):
    config = config_of(specs, layout)
    described = describe(config, name, ranks, text)
    tokens = tokens or 3 * described.block
    with contextlib.ExitStack() as stack:
        one, two = (Driven(config, described, daemon, kernel_blocks) for _ in range(2))
        stack.callback(one.close)
        stack.callback(two.close)
        # States of delta nets are numbers: bytes of no NaN, and of no number that a processor takes for zero.
        numbers = any(isinstance(layer, ashlar.Linear) for layer in described.model.layers)
        one.raw.copy_(torch.randint(*((16, 64) if numbers else (-128, 128)), one.raw.shape, dtype=torch.int8))
        source, target = one.blocks(tokens, 0), two.blocks(tokens, 11)
        if not one.save(tokens, source):
            return False, False
        two.raw.zero_()
        if not two.load(tokens, target, daemon):
            return False, False
        return True, one.content(source) == two.content(target)
