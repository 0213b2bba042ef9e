# SPDX-License-Identifier: Apache-2.0
"""Caches on any device, copied through staging memory: with vLLM's specs, and a device that is not the CPU and lags."""

import types

import pytest
import torch
from driven_specs import Driven, be_far, config_of, describe, drive, in_child
from test_vllm_opaque import FULL, MODELS, states
from tiny_engines import BLOCK, PAIR, Child, connector, count, prompt, repeated, same, saved
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend

import ashlar
from ashlar.vllm import AshlarConnector, host_memory
from ashlar.vllm.host_memory import HostMemory, pin
from ashlar.vllm.messages import Load, StepMetadata
from ashlar.vllm.options import Options

MIB = 1 << 20
GDN = {"model.layers.0.gdn": states(Backend.GDN_ATTN, (3, 192), (4, 16, 16)), "model.layers.1.attn": FULL}
TEXT = types.SimpleNamespace(linear_num_key_heads=4)
WORKER = "__import__('vllm.distributed.kv_transfer', fromlist=['']).get_kv_transfer_group()._worker"
PLAIN = {"model.layers.0.attn": FULL}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_restored_through_staging_memory(model, far, shared_daemon):
    options = dict(name=f"staged {model} {far}", tokens=640, staged=8 * MIB, far=far)
    assert drive(MODELS[model], shared_daemon, **options) == (True, True)


@pytest.mark.parametrize("tokens", [128, 384, 600])
def test_delta_nets_are_restored_as_their_own_kind(tokens, shared_daemon):
    options = dict(name=f"staged delta nets {tokens}", tokens=tokens, staged=8 * MIB, far=True, text=TEXT)
    assert drive(GDN, shared_daemon, **options) == (True, True)


@pytest.mark.parametrize("tokens", [200, 600])
@pytest.mark.parametrize("model", ["windows", "plain"])
def test_texts_end_inside_blocks(model, tokens, shared_daemon):
    specs = PLAIN if model == "plain" else MODELS[model]
    options = dict(name=f"staged within {model} {tokens}", tokens=tokens, staged=8 * MIB, far=True)
    assert drive(specs, shared_daemon, **options) == (True, True)


@pytest.mark.parametrize(
    "layout, kernel_blocks",
    [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1), ("LBHNC", 4), ("LBNHC", 4)],
)
def test_every_layout_and_blocks_that_kernels_split_are_served(layout, kernel_blocks, shared_daemon):
    name = f"staged {layout} {kernel_blocks}"
    options = dict(tokens=640, staged=8 * MIB, far=True, layout=layout, kernel_blocks=kernel_blocks)
    specs = {f"model.layers.{i}.attn": FULL for i in range(3)}
    assert drive(specs, shared_daemon, name=name, **options) == (True, True)


# ---- order


def leave(device):
    """Does not spoil anything."""


def run_ahead(device):
    """Makes streams other than the engine's work at once."""
    real = device.Stream.add
    device.Stream.add = lambda stream, work: real(stream, work) if stream is device.ENGINE else work()


def omit_the_wait_for_the_step(device):
    device.Event.synchronize = lambda event: None


def omit_the_wait_for_copies_of_a_save(device):
    device.Stream.synchronize = lambda stream: None


def omit_the_query_for_the_end(device):
    device.Event.query = lambda event: True


def run_ahead_and_omit_the_query(device):
    run_ahead(device)
    omit_the_query_for_the_end(device)


@pytest.mark.parametrize(
    "spoil, right",
    [
        (leave, True),
        (run_ahead, True),
        (omit_the_wait_for_the_step, False),
        (omit_the_wait_for_copies_of_a_save, False),
        (omit_the_query_for_the_end, False),  # never asks whether copies into blocks have ended
        (run_ahead_and_omit_the_query, False),  # never asks whether the engine's work in these blocks has ended
    ],
)
def test_the_waits_between_streams_are_necessary_and_sufficient(spoil, right, shared_daemon):
    options = dict(name=f"order {spoil.__name__}", tokens=384, staged=8 * MIB, far=True, spoil=spoil)
    assert drive(PLAIN, shared_daemon, **options) == (True, right)


def test_nothing_is_done_inside_a_forward_pass():
    """A CUDA graph would not replay it."""
    connector = AshlarConnector.__new__(AshlarConnector)
    connector._worker = None  # any use of it fails
    del connector._worker
    connector.wait_for_layer_load("model.layers.0.attn")
    connector.save_kv_layer("model.layers.0.attn", None, None)
    assert not AshlarConnector.requires_piecewise_for_cudagraph({})


# ---- budget


def many_at_once(specs, daemon):
    """Three loads with staging memory for one: (loaded, right, pages free afterwards)."""
    be_far()
    config = config_of(specs)
    page = describe(config).page_bytes
    one, two = (
        Driven(config, describe(config, "budget", staged=4 * page, packed=False), daemon, far=True) for _ in range(2)
    )
    content = torch.randint(-128, 128, one.raw.shape, dtype=torch.int8)
    one.raw.copy_(content)
    source = one.blocks(384, 0)
    assert one.save(384, source)
    tables = [([begin, begin + 1, begin + 2],) for begin in (1, 4, 9)]
    loaded = two.loads(384, tables, daemon)
    right = all(two.content(table) == one.content(source) for table in tables)
    free = two.worker._caches.staging.take(4) is not None
    one.close()
    two.close()
    return loaded, right, free


def test_loads_at_once_share_the_staging_memory(shared_daemon):
    assert in_child(many_at_once, PLAIN, shared_daemon) == ([True] * 3, True, True)


def saved_again(specs, daemon):
    """Returns the number of blocks that each save copies, and whether the last text is restored."""
    be_far()
    config = config_of(specs)
    described = describe(config, "again", staged=8 * MIB, packed=False)
    one, two = (Driven(config, described, daemon, far=True) for _ in range(2))
    one.raw.copy_(torch.randint(-128, 128, one.raw.shape, dtype=torch.int8))
    staging, copied = one.worker._caches.staging, []
    gather = staging.gather
    staging.gather = lambda tables, pages: (copied.append(len(pages)), gather(tables, pages))
    source, target = one.blocks(640, 0), two.blocks(640, 11)
    for tokens, salt in ((300, ""), (640, ""), (640, "another"), (640, "")):
        one.save(tokens, tuple(table[: -(-tokens // 128)] for table in source), salt)
    same = two.load(640, target, daemon) and two.content(target) == one.content(source)
    pages = staging.pages
    free = staging.take(pages) is not None and staging.take(1) is None
    staging.give(range(pages))
    one.save(640, source)
    one.close()
    two.close()
    return copied, same, free


def test_a_text_that_grows_is_copied_once(shared_daemon):
    """The rows of a saved text stay in pages that nothing else needs. Texts with other salts do not share them."""
    assert in_child(saved_again, PLAIN, shared_daemon) == ([3, 3, 5, 0, 5], True, True)


def partly_present(specs, daemon):
    be_far()
    config = config_of(specs)
    described = describe(config, "present", staged=8 * MIB, packed=False)
    one, two = (Driven(config, described, daemon, far=True) for _ in range(2))
    one.raw.copy_(torch.randint(-128, 128, one.raw.shape, dtype=torch.int8))
    source, target = one.blocks(640, 0), ([3, 9, 4, 20, 7],)
    assert one.save(640, source)
    marker = torch.full((1, *two.caches["model.layers.0.attn"].shape[1:]), 7, dtype=torch.bfloat16)
    two.raw.zero_()
    for block in (3, 9, 4):
        two.caches["model.layers.0.attn"][block : block + 1].copy_(marker)
    loaded = two.load(640, target, daemon, present=384)
    before, behind = two.content(([3, 9, 4],)), two.content(([20, 7],))
    untouched = set(before["model.layers.0.attn"]) == {marker.view(torch.uint8).numpy().tobytes()}
    same = behind["model.layers.0.attn"] == one.content(source)["model.layers.0.attn"][3:]
    one.close()
    two.close()
    return loaded, untouched, same


def test_blocks_that_the_engine_has_already_are_not_written(shared_daemon):
    """Running requests share these blocks. 384 tokens are not a whole number of the cache's objects."""
    assert in_child(partly_present, PLAIN, shared_daemon) == (True, True, True)


def too_long(specs, daemon):
    be_far()
    config = config_of(specs)
    page = describe(config).page_bytes
    enough, little = (
        Driven(config, describe(config, "long", staged=pages * page, packed=False), daemon, far=True, call_ms=300)
        for pages in (5, 2)
    )
    assert enough.save(640, enough.blocks(640, 0))
    saved, loaded = little.save(640, little.blocks(640, 0)), little.load(640, little.blocks(640, 0), daemon)
    found = little.described.most_tokens, saved, loaded, little.worker.stats.take().data
    free = little.worker._caches.staging.take(2) is not None
    enough.close()
    little.close()
    return *found[:3], {key: value for key, value in found[3].items() if "fail" in str(key)}, free


def test_texts_that_do_not_fit_are_misses(shared_daemon):
    most, saved, loaded, failures, free = in_child(too_long, PLAIN, shared_daemon)
    assert (most, saved, loaded, free) == (256, False, False, True)
    assert list(failures.values()) == [1], failures


def failing_and_sleeping(specs, daemon):
    be_far()
    config = config_of(specs)
    page = describe(config).page_bytes
    one = Driven(config, describe(config, "asleep", staged=4 * page, packed=False), daemon, far=True)
    worker, results = one.worker, []
    one.raw.copy_(torch.randint(-128, 128, one.raw.shape, dtype=torch.int8))
    source, target = one.blocks(384, 0), one.blocks(384, 11)
    assert one.save(384, source)
    worker.start_loads(StepMetadata([Load("a", b"no plan", 384, 0, target, 4, "dram")], [], 0))
    results.append(worker.poll_loads(StepMetadata([], [], 0)) == ({"a"}, {"a"}))
    worker.unregister()
    results.append(not one.load(384, target, daemon))
    worker.restore()
    results.append(one.load(384, target, daemon))
    results.append(one.content(source) == one.content(target))
    results.append(worker._caches.staging.take(4) is not None)
    one.close()
    return results


def test_pages_are_returned_after_failures_and_an_engine_wakes_up(shared_daemon):
    assert in_child(failing_and_sleeping, PLAIN, shared_daemon) == [True] * 5


def unresolved(specs, daemon):
    """Returns whether a load fails, its blocks are held, and its pages are kept until the daemon no longer writes to
    them."""
    be_far()
    config = config_of(specs)
    described = describe(config, "unresolved", staged=4 * describe(config).page_bytes, packed=False)
    one = Driven(config, described, daemon, far=True)
    one.raw.copy_(torch.randint(-128, 128, one.raw.shape, dtype=torch.int8))
    source, target, staging = one.blocks(384, 0), one.blocks(384, 11), one.worker._caches.staging
    assert one.save(384, source)
    finish, quiet = ashlar.Request.poll_finish, ashlar.Request.poll_quiesced
    ashlar.Request.poll_finish = lambda request: ashlar.Verdict.RESTART
    ashlar.Request.poll_quiesced = lambda request: ashlar.Verdict.PENDING
    loaded = one.loads(384, [target], daemon)
    held, kept = bool(one.worker.report().unresolved), staging.take(4) is None
    ashlar.Request.poll_finish, ashlar.Request.poll_quiesced = finish, quiet
    again = one.loads(384, [target], daemon)
    one.close()
    return loaded, held, kept, again


def test_pages_are_kept_while_the_daemon_may_write_to_them(shared_daemon):
    """The engine's blocks are free at once, because the daemon never writes to them."""
    assert in_child(unresolved, PLAIN, shared_daemon) == ([False], False, True, [True])


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_registered_with_cuda_where_that_is_the_device(code, monkeypatch):
    """A registration that fails leaves an error, which the next launch of a kernel reports."""
    calls = []

    def register(address, size, flags):
        calls.append((address, size, flags))
        return code

    def launch(*_, device):
        calls.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", launch)
    memory, device = torch.empty(64, dtype=torch.int8), torch.device("cuda")
    assert pin(memory, device) is (code == 0)
    assert calls == [(memory.data_ptr(), 64, 0), *([device] if code else [])]


class Mark:
    ended = False

    def query(self):
        return self.ended

    def synchronize(self):
        self.ended = True


def test_host_memory_is_used_again_after_its_mark(monkeypatch):
    pinned = []
    monkeypatch.setattr(host_memory, "pin", lambda memory, device: pinned.append(memory.data_ptr()) or True)
    monkeypatch.setattr(host_memory, "unpin", lambda memory: pinned.remove(memory.data_ptr()))
    memory, mark = HostMemory(torch.device("cuda"), 3 << 12), Mark()
    one, other = memory.lease(), memory.lease()
    with torch.inference_mode():
        first = one.take((3, 4), torch.int64)
    one.give(mark)
    assert other.take((1000,)).data_ptr() != first.data_ptr() and len(pinned) == 2
    mark.ended = True
    again = other.take((1024,)).fill_(7)  # by a thread outside that mode
    assert again.data_ptr() == first.data_ptr() and len(pinned) == 2
    assert (
        other.copy(torch.arange(2000)).tolist() == list(range(2000)) and other.take((5000,), torch.int8).numel() == 5000
    )
    assert len(pinned) == 4, "leases may take more than the capacity"
    other.give(None)
    assert len(pinned) == 1, "unused memory is kept within the capacity"
    late = memory.lease()
    late.take((1,))
    late.take((2048,))
    assert len(pinned) == 2, "of unused memory"
    late.take((2000,))
    assert len(pinned) == 3
    late.give(Mark())
    memory.close()
    assert not pinned, "copies have ended"


def test_options_are_checked():
    for name, value in (("kv_memory", "cuda"), ("staging_bytes", -1), ("staging_bytes", "1GiB")):
        with pytest.raises(ValueError, match=f"kv_connector_extra_config.{name}: .*expected"):
            Options.read({name: value})


def test_staging_memory_for_less_than_a_block_is_refused(shared_daemon):
    with pytest.raises(
        Exception, match="staging_bytes: 100 is less than one block of the engine's caches; expected at least"
    ):
        drive(PLAIN, shared_daemon, staged=100)


# ---- whole engines, whose caches are in CPU memory


@pytest.mark.parametrize("model", [*PAIR, "ministral"])
def test_prompts_are_resumed_through_staging_memory_with_the_same_answer(model, expected, shared_daemon):
    block = BLOCK[model]
    text = prompt(f"staged {model}", 2 * max(block, 256) + 37)
    wanted = expected(model, [text])
    options = connector(shared_daemon, kv_memory="staged", staging_bytes=64 * MIB)
    with Child(model, options) as child, Child(model, options) as other:
        same(child.generate([text]), wanted)
        for reader in (child, other):
            before = saved(reader)
            reader.call("erase")
            same(reader.generate([text]), wanted)
            assert saved(reader) - before == repeated(model, len(text))
            assert count(reader, "load_failures") == 0


def test_a_prompt_longer_than_the_staging_memory_is_resumed_in_part(expected, shared_daemon):
    text = prompt("too long for staging", 1100)
    wanted = expected("qwen3", [text])
    with Child("qwen3", connector(shared_daemon, kv_memory="staged", staging_bytes=1)) as child:
        page = child.call("evaluate", f"{WORKER}._described.page_bytes")
    blocks = 512 // BLOCK["qwen3"]
    options = connector(shared_daemon, kv_memory="staged", staging_bytes=blocks * page)
    with Child("qwen3", options) as child, Child("qwen3", connector(shared_daemon)) as whole:
        same(whole.generate([text]), wanted)
        for _ in range(2):
            before = saved(child)
            child.call("erase")
            same(child.generate([text]), wanted)
            assert saved(child) - before == 512
        assert count(child, "stores", "too_long") > 0 and count(child, "load_failures") == 0
