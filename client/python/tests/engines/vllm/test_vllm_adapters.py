# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: only an adapter with the same content finds what was computed with it."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_engines import Child, connector, count, prompt, repeated, same, saved
from vllm.lora.request import LoRARequest

from ashlar.vllm.adapters import ABSENT, LOADED, UNNAMED, KnownAdapters, LoadedAdapters

PARTS = dict(q_proj=(128, 64), k_proj=(64, 64), v_proj=(64, 64), o_proj=(64, 128))
FOUND = repeated("qwen3", 600)
EXACT = dict(dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8)
ASK = """
import vllm
from vllm.lora.request import LoRARequest
def ask(prompts, adapters, tokens):
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=1, max_tokens=tokens)
    requests = [LoRARequest(*each) if each else None for each in adapters]
    found = []
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, lora_request=requests)
    for best in (output.outputs[0] for output in outputs):
        found.append((list(best.token_ids), [each[t].logprob for each, t in zip(best.logprobs, best.token_ids)]))
    return found
server.ask = ask
server.load = lambda *adapter, **options: llm.llm_engine.add_lora(LoRARequest(*adapter, **options))
"""


def adapter(folder, seed):
    """Replaces an adapter's files."""
    source, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for name, (outputs, inputs) in PARTS.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, inputs, generator=source) * 0.3
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, 8, generator=source) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=list(PARTS), bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(base_model_name_or_path="base")))
    return str(folder)


class Engine(Child):
    def __init__(self, *connectors, **options):
        super().__init__("qwen3", *connectors, enable_prefix_caching=True, **{**EXACT, **options})
        self.call("execute", ASK)

    def ask(self, text, given, tokens=6):
        return self.call("evaluate", f"server.ask({[text]!r}, {[given]!r}, {tokens})")

    def load(self, *given, **options):
        assert self.call("evaluate", f"server.load(*{given!r}, **{options!r})")


def three(folder):
    return [adapter(folder / f"a{seed}", seed) for seed in range(3)]


def answers(adapters):
    """Answers of an engine without the cache, by the content of the adapter."""
    with Engine() as child:

        def ask(text, content):
            child.call("erase")
            return child.ask(text, (f"content {content}", content + 1, adapters[content]))

        yield ask


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return three(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def wanted(adapters):
    yield from answers(adapters)


def test_adapters_share_no_cached_prompts(shared_daemon, adapters, wanted, engine, expected, tmp_path):
    text = prompt("adapters", 600)
    first, second = ("first", 1, adapters[0]), ("second", 2, adapters[1])
    engine("qwen3").generate([text])
    with Engine(connector(shared_daemon)) as child:
        for given, content in ((first, 0), (second, 1)):
            for hit in (0, FOUND):
                child.call("erase")
                before = saved(child)
                same(child.ask(text, given, 6), wanted(text, content))
                assert saved(child) - before == hit, (
                    "the first prompt loads the adapter, whose content is not known yet"
                )
        child.call("erase")
        before = child.call("metrics")
        child.ask(text, None)
        after = child.call("metrics")
        assert before == after, "vLLM on a CPU may compute it with an adapter's weights"
        child.call("erase")
        same(child.call("evaluate", f"server.ask({[text] * 2!r}, {[first, second]!r}, 6)"),
             [*wanted(text, 0), *wanted(text, 1)], 1e-3)  # fmt: skip
    moved = shutil.copytree(adapters[0], tmp_path / "moved")
    with Engine(connector(shared_daemon)) as child:
        child.load("first", 7, str(moved))  # like a server that loads it before there are requests
        same(child.ask(text, ("first", 7, str(moved))), wanted(text, 0))
        assert saved(child) == FOUND, "the same content under its name is found by another engine, wherever it lies"
        child.load("other", 8, str(moved))
        same(child.ask(text, ("other", 8, str(moved))), wanted(text, 0))
        assert saved(child) == FOUND, "its name counts, too"


def finds(child, text, given, answer):
    """A first prompt may come before the workers have reported the adapter; it is computed then."""
    before = saved(child)
    for _ in range(4):
        child.call("erase")
        same(child.ask(text, given), answer)
        if saved(child) > before:
            break
    assert saved(child) == before + FOUND


def test_changed_content_under_the_same_name_is_not_reused(shared_daemon, adapters, wanted, tmp_path):
    text, folder = prompt("changes", 600), tmp_path / "changing"
    given = ("changing", 1, adapter(folder, 0))
    with Engine(connector(shared_daemon)) as child:
        child.load(*given)
        same(child.ask(text, given), wanted(text, 0))
        kept = count(child, "stores", "kept")
        assert kept == 1
        adapter(folder, 1)
        child.load(*given, load_inplace=True)
        # Until the workers report the change, vLLM's own blocks have the old content: such an answer mixes two contents, and
        # is not saved. The next one is right.
        child.ask(text, given)
        same(child.ask(text, given), wanted(text, 1))
        assert count(child, "stores", "kept") == kept + 1 and saved(child) == 0
        adapter(folder, 0)
        child.load(*given, load_inplace=True)
        finds(child, text, given, wanted(text, 0))
    with Engine(connector(shared_daemon)) as child:
        changed = ("changing", 1, adapter(folder, 1))
        child.load(*changed)
        finds(child, text, changed, wanted(text, 1))
        # Another adapter takes the name: vLLM's own blocks under the name belong to the old adapter.
        taken = ("changing", 2, adapters[2])
        child.load(*taken)
        same(child.ask(text, taken), wanted(text, 2))
        assert saved(child) == FOUND


def test_requests_that_load_their_adapter_again_are_computed(shared_daemon, adapters, wanted):
    text, given = prompt("in place", 600), ("in place", 1, adapters[0], None, True)
    with Engine(connector(shared_daemon)) as child:
        for _ in range(2):
            child.call("erase")
            same(child.ask(text, given), wanted(text, 0))
        assert child.call("metrics").keys() == set()


def known(*reports, ranks=1, names=(("name", 1),)):
    adapters = KnownAdapters(ranks)
    for name, number in names:
        adapters.arrive(LoRARequest(name, number, "/path"))
    changed = [adapters.hear(Counter(each)) for each in reports]
    return adapters, changed


def test_a_load_is_known_once_all_ranks_report_the_same_digest():
    adapters, _ = known({(1, 3, LOADED): 2}, {(1, 3, "aa"): 1}, ranks=2)
    assert adapters.find(1) is None and adapters.take_asked() == {1} and adapters.may_come(1)
    adapters.hear(Counter({(1, 3, "aa"): 1}))
    load, digest = adapters.find(1)
    assert (load.step, digest) == (3, "aa")
    adapters.hear(Counter({(1, 3, "bb"): 1}))
    assert adapters.find(1) is None, "ranks that differ"
    assert known({(1, 3, LOADED): 1}, {(1, 3, UNNAMED): 1})[0].may_come(1) is False
    assert known({(1, 3, ABSENT): 1})[0].may_come(1) is False


def test_other_content_or_an_unhashed_load_outdates_the_engines_blocks():
    first = [{(1, 3, LOADED): 1}, {(1, 3, "aa"): 1}]
    assert known(*first)[1] == [set(), set()]
    assert known({(1, 3, "aa"): 1, (1, 3, LOADED): 1})[0].find(1) is not None, "in one report"
    assert known(*first, {(1, 5, LOADED): 1}, {(1, 5, "aa"): 1})[1][-1] == set(), "evicted, and loaded as it was"
    assert known(*first, {(1, 5, LOADED): 1}, {(1, 5, "bb"): 1})[1][-1] == {"name"}
    unhashed = {(1, 5, LOADED): 1}, {(1, 6, LOADED): 1}
    assert known(*first, *unhashed, {(1, 6, "aa"): 1})[1][-1] == {"name"}
    gone = {(1, 5, LOADED): 1}, {(1, 6, ABSENT): 1}, {(1, 7, LOADED): 1}
    assert known(*first, *gone, {(1, 7, "aa"): 1})[1][-1] == {"name"}
    late, _ = known(*first, {(1, 5, LOADED): 1})
    late.hear(Counter({(1, 3, "aa"): 1}))
    assert late.find(1) is None, "a digest of the former load"
    assert late.arrive(LoRARequest("name", 2, "/path")) and not late.arrive(LoRARequest("name", 2, "/path"))


def test_workers_report_each_load_once():
    class Model:
        def __init__(self, value):
            self.id, self.loras = 1, {"layer": SimpleNamespace(lora_a=torch.full((2, 3), value), scaling=1)}

    present = {1: Model(1.0)}
    worker = LoadedAdapters(SimpleNamespace(lora_manager=SimpleNamespace(list_adapters=lambda: dict(present))))

    def look(step, *asked):
        reports = Counter()
        worker.look(step, asked, reports)
        worker._hasher.submit(int).result()
        worker.look(step, (), reports)
        return reports

    assert look(1) == {(1, 1, LOADED): 1}
    digest = {what for *_, what in look(2, 1)}
    assert look(3) == {} and look(4, 2) == {(2, 4, ABSENT): 1}
    present[1] = Model(1.0)
    assert look(5, 1) == {(1, 5, LOADED): 1, (1, 5, *digest): 1}, "as it was"
    present[1] = Model(2.0)
    assert (1, 6, *digest) not in look(6, 1)
    present[1] = Model(1.0)
    present[1].unknown = object
    assert look(7, 1)[1, 7, UNNAMED] == 1
    present.clear()
    assert look(8) == {(1, 8, ABSENT): 1}
