# SPDX-License-Identifier: Apache-2.0
"""An engine with speculative decoding whose arithmetic alone is emulated: vLLM's scheduler, cache manager, specs and the
code that moves states of drafts run unchanged, and so does the connector.

Keys, states and convolutions' inputs are numbers that follow from the tokens before them, so each step can check that it
continues from the right ones.
"""

import random
import time
import types
from collections import Counter

import draft_states
import torch
import vllm.distributed
import vllm.v1.worker.mamba_utils as mamba_utils
from tiny_engines import connector as options_of
from tiny_engines import model_folder
from tiny_models import CONFIGS
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.utils import CpuGpuBuffer

import ashlar.vllm
import ashlar.vllm.model
import ashlar.vllm.rows
from ashlar.vllm.worker import Worker

VOCABULARY = 61
STOP = 7  # a token that ends an answer
COPIES = {
    Backend.GDN_ATTN: (get_conv_copy_spec, get_temporal_copy_spec),
    Backend.MAMBA2: (get_conv_copy_spec, get_temporal_copy_spec),
    Backend.SHORT_CONV: (get_conv_copy_spec,),
    Backend.LINEAR: (get_temporal_copy_spec,),
}
LAYOUT = "LBNHC"


def emulate():
    """For the rest of this process: no model and no group of ranks exist, and rows of keys are in order."""
    draft_states.run_on_cpu()
    vllm.distributed.get_tensor_model_parallel_rank = lambda: 0
    Worker.watch_weights = lambda *_: None
    ashlar.vllm.model.packs = ashlar.vllm.rows.packs = lambda: False
    init_none_hash(sha256)


def states(backend, shapes, block, drafts, dtypes=(torch.bfloat16, torch.float32)):
    """The spec of a layer with states: `shapes` without the inputs of drafts."""
    if backend is not Backend.LINEAR:
        (inputs, channels), *others = shapes
        shapes = ((inputs + drafts, channels), *others)
    return MambaSpec(
        block_size=block,
        shapes=tuple(shapes),
        dtypes=dtypes[-1:] if backend is Backend.LINEAR else dtypes[: len(shapes)],
        mamba_type=backend,
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


def attention(block, heads=2, size=32):
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)


def config_of(specs, blocks):
    """Layers of one spec form a group; the layer of a draft model or head shares the group of its spec."""
    groups, tensors, offset = [], [], 0
    for spec in dict.fromkeys(specs.values()):
        names = [name for name, each in specs.items() if each == spec]
        size = spec.page_size_bytes * blocks * len(names)
        tensors.append(KVCacheTensor(size, names, spec.page_size_bytes * blocks, spec.page_size_bytes, offset))
        groups.append(KVCacheGroupSpec(names, spec, is_eagle_group=any(name.startswith("mtp") for name in names)))
        offset += -(-size // 4096) * 4096
    return KVCacheConfig(blocks, tensors, groups, kv_cache_layout=LAYOUT)


class Text:
    """A request's tokens, and a digest of each prefix."""

    def __init__(self, tokens=()):
        self.tokens, self.digests = [], [1]
        for token in tokens:
            self.append(token)

    def append(self, token):
        self.tokens.append(token)
        self.digests.append((self.digests[-1] * 1000003 + token + 1) % (2**61 - 1))

    def with_drafts(self, drafts):
        other = Text()
        other.tokens, other.digests = list(self.tokens), list(self.digests)
        for token in drafts:
            other.append(token)
        return other

    def next(self):
        """The token that the model gives after this text."""
        return self.digests[-1] // 7 % VOCABULARY


def numbers(digests, layer, width):
    """Rows of numbers that identify prefixes: exact in every type of caches."""
    first = torch.tensor([(each + 31 * layer) % 97 for each in digests]).unsqueeze(1)
    step = torch.tensor([(each // 97 + layer) % 61 + 1 for each in digests]).unsqueeze(1)
    return (first + step * torch.arange(width)) % 113


class Engine:
    """`step` runs one step. With `overlap`, the next step is scheduled before the tokens of this one are known."""

    def __init__(self, daemon, specs, model, method, drafts, block, blocks=40, seed=0, overlap=False, budget=64, cache=True,
                 **options):  # fmt: skip
        self.drafts, self.block, self.method = drafts, block, method
        self.random, self.counts = random.Random(seed), Counter()
        settings = dict(method=method, num_speculative_tokens=drafts)
        if method == "ngram":
            settings |= dict(prompt_lookup_max=3, prompt_lookup_min=1)
        transfer = dict(
            kv_connector="AshlarConnector",
            kv_connector_module_path="ashlar.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=options_of(daemon, min_tokens=1, **options),
        )
        args = EngineArgs(
            model=model_folder(model) if model in CONFIGS else model, load_format="dummy", skip_tokenizer_init=True,
            max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=True, enforce_eager=True,
            speculative_config=settings if drafts else None, kv_transfer_config=transfer if cache else None,
            async_scheduling=overlap,
        )  # fmt: skip
        self.config = args.create_engine_config()
        cache = self.config.cache_config
        cache.block_size = cache.mamba_block_size = block
        cache.num_gpu_blocks, cache.mamba_cache_mode = blocks, "align"
        self.specs, self.layout = specs, config_of(specs, blocks)
        kind, self.overlap = AsyncScheduler if overlap else Scheduler, overlap
        self.scheduler = kind(self.config, self.layout, StructuredOutputManager(self.config), block, log_stats=False)
        self.connector, self.caches = None, {}
        if self.config.kv_transfer_config is not None:
            self.connector = ashlar.vllm.AshlarConnector(
                self.config, ashlar.vllm.connector.KVConnectorRole.WORKER, self.layout
            )
        self._allocate(blocks)
        self.copies = mamba_utils.MambaBuffers.create(
            4, self.layout, COPIES, self._buffer, torch.device("cpu"), drafts > 0
        )
        self.columns, self.texts, self.tables, self.computed, self.accepted = {}, {}, {}, {}, {}
        self.begun, self.proposed, self.in_flight = {}, {}, []
        self.hasher = get_request_block_hasher(block, sha256)

    @staticmethod
    def _buffer(*size, dtype):
        return CpuGpuBuffer(*size, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

    def _allocate(self, blocks):
        size = max(each.offset + each.size for each in self.layout.kv_cache_tensors)
        context = None if self.connector is None else self.connector.get_mem_pool_context()
        if context is None:
            raw = torch.zeros(size, dtype=torch.int8, device="cpu")
        else:
            with context:
                raw = torch.zeros(size, dtype=torch.int8, device="cpu")
        raw.copy_(torch.randint(-128, 128, raw.shape, dtype=torch.int8))  # what nothing has written is wrong
        for tensor, group in zip(self.layout.kv_cache_tensors, self.layout.kv_cache_groups):
            views = create_kv_cache_views(raw, group.kv_cache_spec, blocks, KVCacheLayout[LAYOUT], tensor, None)
            self.caches.update(zip(tensor.layers, views))
        self.config.compilation_config.static_forward_context.update(dict.fromkeys(self.caches))
        if self.connector is not None:
            self.connector.register_kv_caches(self.caches)
        self.layers = {}
        for name, tensor in self.caches.items():
            if isinstance(self.specs[name], MambaSpec):
                self.layers[name] = types.SimpleNamespace(kv_cache=self._parts(self.specs[name], tensor))

    @staticmethod
    def _parts(spec, tensor):
        found, begin, rows = [], 0, tensor.flatten(1)
        for shape, dtype in zip(spec.shapes, spec.dtypes):
            size = torch.Size(shape).numel() * dtype.itemsize
            part = rows[:, begin : begin + size].view(dtype)
            strides = [part.stride(0), *torch.empty(shape, device="meta").stride()]
            found.append(part.as_strided((len(rows), *shape), strides, part.storage_offset()))
            begin += size
        return found

    # ---- requests

    def add(self, name, prompt, tokens, stop=False):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=not stop, stop_token_ids=[STOP] if stop else None)
        sampling.skip_reading_prefix_cache = False
        self.texts[name] = Text(prompt)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def run(self, prompts, tokens, stop=False, preempts=False):
        """Serves prompts together. Returns their answers."""
        requests = [self.add(f"{len(self.texts)}", prompt, tokens, stop) for prompt in prompts]
        steps = 0
        while self.scheduler.has_unfinished_requests():
            self.step()
            steps += 1
            assert steps < 5000, "the requests end"
            if preempts and self.random.random() < 0.1:
                self.preempt()
        assert all(request.is_finished() for request in requests)
        self.drain()
        return [list(request.output_token_ids) for request in requests]

    def drain(self):
        while self.in_flight or self.scheduler.has_requests():
            self.step()

    def erase(self):
        """Empties the engine's own prefix cache, not Ashlar's."""
        self.drain()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def wait_until_open(self):
        """Both halves open the cache in the background."""
        halves = (self.scheduler.connector._scheduler, self.connector._worker)
        deadline = time.monotonic() + 20
        while any(half is None or half._opening.cache is None for half in halves) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(half is not None and half._opening.cache is not None for half in halves), "the cache is open"

    def close(self):
        self.scheduler.connector.shutdown()
        self.connector.shutdown()

    def step(self):
        output = self.scheduler.schedule()
        self.in_flight.append((output, self._execute(output)))
        while self.in_flight and len(self.in_flight) > self.overlap * self.scheduler.has_unfinished_requests():
            output, result = self.in_flight.pop(0)
            self.scheduler.update_from_output(output, result)
        if not self.overlap and self.drafts:
            made = {name: self.proposed[name] for name in output.num_scheduled_tokens if name in self.proposed}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(made), list(made.values())))

    def preempt(self):
        """Preempts all running requests, as vLLM does when it lacks blocks."""
        while self.scheduler.running:
            self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)

    # ---- a step of the worker

    def _execute(self, output):
        scheduled = output.num_scheduled_tokens
        for name in output.finished_req_ids:
            for each in (self.tables, self.computed, self.accepted, self.proposed):
                each.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in cached.resumed_req_ids:
                self._begin(name, blocks, computed)
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks):
                    table += more
        names = list(scheduled)
        if self.connector is not None:
            self.connector.bind_connector_metadata(output.kv_connector_metadata)
            self.connector.handle_preemptions(output.kv_connector_metadata)
        if names:
            batch = self._preprocess(output, names)
        if self.connector is not None:
            self.connector.start_load_kv(None)
        sampled = [self._compute(name, scheduled[name], output, batch) for name in names] if names else []
        if names:
            self._postprocess(output, names, batch)
        connected = None if self.connector is None else self._finish(output)
        return ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled, kv_connector_output=connected
        )

    def _begin(self, name, blocks, computed):
        self.tables[name] = [list(table) for table in blocks]
        self.computed[name], self.accepted[name], self.begun[name] = computed, 1, computed
        self.counts["resumed"] += computed

    def _finish(self, output):
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return made

    def _states(self, name):
        """(layer, number, blocks, tensors, spec) of layers with states."""
        for number, (layer, spec) in enumerate(self.specs.items()):
            if isinstance(spec, MambaSpec):
                group = next(i for i, each in enumerate(self.layout.kv_cache_groups) if layer in each.layer_names)
                yield number, self.tables[name][group], self.layers[layer].kv_cache, spec

    def _keys(self, name):
        for number, (layer, spec) in enumerate(self.specs.items()):
            if not isinstance(spec, MambaSpec):
                group = next(i for i, each in enumerate(self.layout.kv_cache_groups) if layer in each.layer_names)
                yield number, self.tables[name][group], self.caches[layer], layer.startswith("mtp")

    def _preprocess(self, output, names):
        """vLLM's own code moves states to the blocks of this step."""
        accepted = torch.tensor([self.accepted[name] for name in names], dtype=torch.int32)
        if not self.layers:
            return None
        width = max(len(table) for tables in self.tables.values() for table in tables)
        groups = self.copies.preprocess.mamba_group_ids
        tables = {group: torch.zeros(len(names), width, dtype=torch.int32) for group in groups}
        for group, tensor in tables.items():
            for row, name in enumerate(names):
                tensor[row, : len(self.tables[name][group])] = torch.tensor(self.tables[name][group])
        rows = {
            group: types.SimpleNamespace(get_device_tensor=lambda _, t=tensor: t) for group, tensor in tables.items()
        }
        batch = types.SimpleNamespace(req_ids=names, num_accepted_tokens_cpu=accepted.numpy(), block_table=rows)
        requests = {
            name: types.SimpleNamespace(num_computed_tokens=self.computed[name], block_ids=self.tables[name])
            for name in names
        }
        if self.copies.postprocess_align is not None:
            self.copies.postprocess_align.is_initialized = False  # the tables are new tensors
        mamba_utils.preprocess_mamba(
            output, self.layout, self.config.cache_config, self.columns, batch, requests, self.layers, COPIES,
            self.copies.preprocess, self.copies.postprocess_align,
        )  # fmt: skip
        batch.accepted, batch.requests, batch.keep = accepted, requests, tables
        return batch

    def _compute(self, name, count, output, batch):
        start, text = self.computed[name], self.texts[name]
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        if drafts and self.overlap and name in self.proposed:
            drafts = self.proposed[name][: len(drafts)]  # the scheduler has placeholders
        whole = text.with_drafts(drafts)
        end = start + count
        assert end <= len(whole.tokens), (name, start, count, len(text.tokens), drafts)
        speculative = bool(drafts) or (start >= self.scheduler.requests[name].num_prompt_tokens and count == 1)
        self._attend(name, start, end, whole)
        row = batch.req_ids.index(name) if batch is not None else 0
        for number, table, tensors, spec in self._states(name):
            self._recur(number, table, tensors, spec, self.columns[name], int(batch.accepted[row]) - 1, start, end, whole,
                        speculative)  # fmt: skip
        if end - len(drafts) < len(text.tokens):  # a part of the prompt
            self._propose(name, start, end, 0)
            return []
        assert end - len(drafts) == len(text.tokens), "the engine computes known tokens and drafts"
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(text.next())
            text.append(sampled[-1])
            if draft != sampled[-1]:
                break
        self.counts["drafts"] += len(drafts)
        self.counts["accepted"] += len(sampled) - 1
        if batch is not None:
            batch.accepted[row] = len(sampled)
        self.accepted[name] = len(sampled)
        self._propose(name, start, end - len(drafts) + len(sampled) - 1, len(sampled))
        return sampled

    def _attend(self, name, start, end, whole):
        for number, table, tensor, is_draft in self._keys(name):
            heads, row = tensor.shape[1], tensor.shape[3]
            places = [(table[i // self.block], i % self.block) for i in range(end)]
            ahead = 2 if is_draft else 1  # a row of a head also depends on the next token
            known = start if not is_draft else max(0, start - 1)
            wanted = numbers(whole.digests[ahead : ahead + known], number, heads * row)
            if known:
                blocks, rows = torch.tensor(places[:known]).T
                found, wanted = tensor[blocks, :, rows].reshape(known, -1), wanted.to(tensor.dtype)
                if is_draft and 0 < self.begun[name] <= known:  # this row may be that of another next token
                    wanted[self.begun[name] - 1] = found[self.begun[name] - 1]
                assert torch.equal(found, wanted), f"{name}: keys of layer {number} before {start}"
            if is_draft:
                continue
            blocks, rows = torch.tensor(places[start:]).T
            made = numbers(whole.digests[start + 1 : end + 1], number, heads * row)
            tensor[blocks, :, rows] = made.view(-1, heads, row).to(tensor.dtype)

    def _propose(self, name, start, end, sampled):
        """Writes the rows of the head's own layer, and drafts."""
        text = self.texts[name]
        for number, table, tensor, is_draft in self._keys(name):
            if not is_draft:
                continue
            heads, row = tensor.shape[1], tensor.shape[3]
            places = [(table[i // self.block], i % self.block) for i in range(start, end)]
            blocks, rows = torch.tensor(places).T
            made = numbers(text.digests[start + 2 : end + 2], number, heads * row)
            assert len(made) == end - start, "the next token is known"
            tensor[blocks, :, rows] = made.view(-1, heads, row).to(tensor.dtype)
        self.computed[name] = end
        if not sampled or not self.drafts:
            self.proposed.pop(name, None)
            return
        guess = text.with_drafts([])
        count = self.drafts if self.method != "ngram" else self.random.choice([0, self.drafts, self.drafts])
        for _ in range(count):
            right = self.random.random() < 0.8
            guess.append(guess.next() if right else self.random.randrange(VOCABULARY))
        self.proposed[name] = guess.tokens[len(text.tokens) :]

    def _recur(self, number, table, tensors, spec, column, bias, start, end, whole, speculative):
        kinds = COPIES[spec.mamba_type]
        for kind, tensor in zip(kinds, tensors):
            if kind is get_temporal_copy_spec:
                self._state(number, table, tensor, column, bias, start, end, whole, speculative)
            else:
                self._convolve(number, table, tensor, spec, column, bias, start, end, whole, speculative)

    @staticmethod
    def _state(number, table, tensor, column, bias, start, end, whole, speculative):
        def state(depth):
            return numbers([whole.digests[depth]], number, tensor[0].numel()).view(tensor[0].shape).to(tensor.dtype)

        if start > 0:
            assert torch.equal(tensor[table[column + bias]], state(start)), f"state of layer {number} at {start}"
        for depth in range(start + 1, end + 1) if speculative else [end]:
            tensor[table[column + (depth - start - 1 if speculative else 0)]] = state(depth)

    @staticmethod
    def _convolve(number, table, tensor, spec, column, bias, start, end, whole, speculative):
        inputs = spec.shapes[0][0] - spec.num_speculative_blocks  # of one state

        def rows(first, last):
            """Inputs of positions, zeros before the text."""
            made = numbers(whole.digests[max(0, first) + 1 : last + 1], number + 50, tensor.shape[2])
            return torch.cat([torch.zeros(max(0, -first), tensor.shape[2]), made]).to(tensor.dtype)

        block = tensor[table[column]]
        if start > 0:
            found = block[bias : bias + inputs]
            assert torch.equal(found, rows(start - inputs, start)), f"inputs of layer {number} at {start}"
        block.fill_(99)
        if speculative:
            block[: inputs + end - start - 1] = rows(start + 1 - inputs, end)
        else:
            block[:inputs] = rows(end - inputs, end)

    def _postprocess(self, output, names, batch):
        if batch is None or self.copies.postprocess_align is None:
            return
        context = self.copies.postprocess_align
        mamba_utils.stage_postprocess_inputs_to_gpu(context, output, names, len(names), batch.requests, self.columns)
        kept = torch.ones(len(names), dtype=torch.int32)
        mamba_utils.postprocess_mamba_align_gpu(
            bufs=self.copies, num_reqs=len(names), num_accepted_tokens_gpu=batch.accepted,
            num_accepted_tokens_cpu_tensor=kept, input_batch=batch, kv_cache_config=self.layout,
            forward_context=self.layers, mamba_state_copy_funcs=COPIES,
        )  # fmt: skip
        for name, count in zip(names, kept.tolist()):
            self.accepted[name] = count
