# SPDX-License-Identifier: Apache-2.0
"""Prompts that end inside vLLM's blocks: they are saved at their exact end, and resumed there."""

import functools
from types import SimpleNamespace

import jinja2
import pytest
import tiny_checkpoint
from test_vllm_states import WATCH
from tiny_engines import BLOCK, Child, connector, count, prompt, same, saved
from vllm.v1.core.sched.scheduler import Scheduler

from ashlar.vllm import stops
from ashlar.vllm.options import Options
from ashlar.vllm.template import rewritten_tokens, template_of

# Only attention, windows, a gated delta net, Mamba-2, short convolutions.
FAMILIES = ["qwen3", "ministral", "qwen3_5", "granite", "lfm2"]
STATES = ["qwen3_5", "granite", "lfm2"]
# Saves of running states wait until later steps have overwritten these.
SLOW = """
import time
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = get_kv_transfer_group()._worker
server.real, server.steps = (half._saves.commit, half.begin_step), 0
def begin_step(step):
    server.steps += 1
    server.real[1](step)
def commit(cache, saving):
    until, deadline = server.steps + 6, time.monotonic() + 60
    while saving.save.running and server.steps < until and time.monotonic() < deadline:
        time.sleep(0.005)
    return server.real[0](cache, saving)
half._saves.commit, half.begin_step = commit, begin_step
"""


def alike(model, answers, expected):
    """The engine rounds differently if it splits a prompt into other steps, also without the cache."""
    if model != "qwen3_5":
        same(answers, expected, 1e-3 if model == "lfm2" else 1e-4)
        return
    for (tokens, logs, _), (wanted, others) in zip(answers, expected):
        parting = next((i for i, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), len(tokens))
        assert parting > 0 and max(abs(a - b) for a, b in zip(logs[:parting], others)) < 0.2, (logs, others)


def kept_end(model, tokens):
    """Returns where a longer prompt resumes after this prompt was computed in one step."""
    if model == "qwen3" and tokens <= 256:
        return tokens
    if model in ("qwen3", "ministral"):
        return max(tokens - 8, tokens // 256 * 256)
    whole = tokens // BLOCK[model] * BLOCK[model]
    return tokens if tokens - whole >= 16 else whole


def without_saves_in_steps(daemon, **options):
    found = connector(daemon, **options)
    del found["wait_for_saves"]
    return found


@pytest.mark.parametrize("model", FAMILIES)
def test_longer_prompts_are_resumed_from_the_exact_end(model, daemon, expected):
    """Needs its own daemon: in a shared one, the prompts of other tests add depths where the daemon expects prompts to
    diverge."""
    block = BLOCK[model]
    with Child(model, connector(daemon)) as child:
        child.call("execute", WATCH)
        for tokens in (60, block - 1, block + 1, block + 77, 2 * block + 40):
            text = prompt(f"end {model} {tokens}", tokens)
            longer = text + prompt("more", 30)
            same(child.generate([text]), expected(model, [text]))
            child.call("erase")
            before = saved(child)
            alike(model, child.generate([longer]), expected(model, [longer]))
            end = kept_end(model, tokens)
            assert saved(child) - before == end
            if model in STATES:
                assert child.call("evaluate", f"server.filled[{end}]") == child.call("evaluate", f"server.kept[{end}]")
        assert count(child, "load_failures") == 0


# Notes the depths that are offered to the cache.
OFFERED = """
offers = server.connector()._scheduler._offers
hold, server.offered = offers._hold, []
def noting(followed, depths, ids, place=None):
    server.offered.append(depths)
    return hold(followed, depths, ids, place)
offers._hold = noting
"""


def test_prompts_of_at_most_256_tokens_resume_at_their_exact_end(daemon, expected, model="qwen3"):
    """A prompt resumes at least as late as each shorter one. Longer prompts are stored no more often than before."""
    ends = {16: [16], 60: [52, 60], 255: [247, 255], 256: [248, 256], 257: [249, 256], 264: [256], 265: [256, 257]}
    texts = {tokens: prompt(f"short {tokens}", tokens) for tokens in ends}
    with Child(model, connector(daemon)) as child:
        child.call("execute", OFFERED)
        for tokens, text in texts.items():
            same(child.generate([text], 1), expected(model, [text], 1))
            assert child.call("evaluate", "server.offered.pop()") == ends[tokens]
            child.call("erase")
            before = saved(child)
            longer = text + prompt("more", 30)
            same(child.generate([longer], 1), expected(model, [longer], 1))
            assert saved(child) - before == kept_end(model, tokens) == ends[tokens][-1]
        for tokens, text in texts.items():
            child.call("erase")
            before = saved(child)
            same(child.generate([text], 1), expected(model, [text], 1))
            assert saved(child) - before == max([depth for depth in ends[tokens] if depth < tokens], default=0)
        assert count(child, "load_failures") == 0


@pytest.mark.parametrize("tokens", [60, 300])
def test_a_short_answer_is_resumed(tokens, daemon, expected, model="qwen3"):
    """Although it may be less than `min_tokens` longer than the prompt, whose exact end is stored as well."""
    text = prompt(f"short answer {tokens}", tokens)
    with Child(model, connector(daemon)) as child:
        ((answer, logs),) = expected(model, [text], 10)
        same(child.generate([text], 10), [(answer, logs)])
        child.call("erase")
        longer = text + answer + prompt("next turn", 25)
        same(child.generate([longer]), expected(model, [longer]))
        assert saved(child) == tokens + 9


def test_a_gated_delta_net_answers_as_an_engine_that_takes_the_same_steps(engine, model="qwen3_5"):
    text = prompt("same steps", 200)
    longer = text + prompt("more", 30)
    with Child(model, max_num_batched_tokens=len(text)) as other:
        wanted = [each[:2] for each in other.generate([longer])]
    child = engine(model)
    child.generate([text])
    child.call("erase")
    before = saved(child)
    same(child.generate([longer]), wanted, 1e-6)
    assert saved(child) - before == len(text)


@pytest.mark.parametrize("model", FAMILIES)
def test_a_conversation_is_resumed_from_its_last_computed_token(model, shared_daemon, expected):
    """Two states of the prompt are saved while later steps run: the one at the prompt's end, which decoding overwrites,
    and the one at the last whole block."""
    block, new = BLOCK[model], 40
    with Child(model, without_saves_in_steps(shared_daemon)) as child:
        child.call("execute", SLOW)
        free = child.call("free_blocks")
        for tokens in (50, block + 20):
            text = prompt(f"talk {model} {tokens}", tokens)
            ((answer, logs),) = expected(model, [text], new)
            same(child.generate([text], new), [(answer, logs)])
            # The last prompt may also find the depth where it diverges from the one before.
            for begin, least, most in (
                (text + answer, tokens + new - 1, tokens + new - 1),
                (text + prompt("another answer", new), kept_end(model, tokens), tokens),
            ):
                longer = begin + prompt("next turn", 25)
                child.call("erase")
                before = saved(child)
                alike(model, child.generate([longer]), expected(model, [longer]))
                assert least <= saved(child) - before <= most
        child.call("erase")
        assert child.call("free_blocks") == free, "no block is held"
        assert count(child, "load_failures") == 0


def test_a_running_state_is_copied_before_it_is_overwritten(shared_daemon, expected, model="granite"):
    """Without the copy, a slow save would read the state of a later token, and the answers would differ."""
    text = prompt("overwritten", BLOCK[model] + 50)
    longer = text + prompt("more", 30)
    with Child(model, without_saves_in_steps(shared_daemon)) as child:
        child.call("execute", SLOW + "half._saves._copy_running = lambda saving: None")
        child.generate([text], 40)
        child.call("erase")
        ((wrong, others, _),) = child.generate([longer])
        assert saved(child) == len(text)
    ((tokens, logs),) = expected(model, [longer])
    assert wrong != tokens or max(abs(a - b) for a, b in zip(logs, others)) > 1e-3


def test_states_that_cannot_be_copied_are_not_saved(shared_daemon, expected, model="granite"):
    text = prompt("no copies", BLOCK[model] + 50)
    longer = text + prompt("more", 30)
    with Child(model, connector(shared_daemon)) as child:
        free = child.call("free_blocks")
        child.call(
            "execute",
            "from vllm.distributed.kv_transfer import get_kv_transfer_group\n"
            "half = get_kv_transfer_group()._worker\nwhile half._saves._running.acquire(blocking=False): pass",
        )
        same(child.generate([text]), expected(model, [text]))
        child.call("erase")
        same(child.generate([longer]), expected(model, [longer]))
        assert saved(child) == BLOCK[model], "the whole block's state is not overwritten"
        short = prompt("no copies, short", 60)
        same(child.generate([short]), expected(model, [short]))
        child.call("erase")
        assert count(child, "stores", "busy") == 2 and child.call("free_blocks") == free


# Writes a different number into each block of the engine. Blocks shared with running requests must not change.
MARKED = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = get_kv_transfer_group()._worker
pool = server.core().scheduler.kv_cache_manager.block_pool
server.marked = [block.block_id for block in pool.blocks if block.block_hash is not None]
tensors = [keys._blocks for keys in half._caches.keys.values()]
for tensor in tensors:
    for block in server.marked:
        tensor[block, 0, 0, 0] = 5.0
server.kept = lambda: all(float(tensor[block, 0, 0, 0]) == 5.0 for tensor in tensors for block in server.marked)
"""


@pytest.mark.parametrize("model", ["qwen3", "granite"])
def test_blocks_that_the_engine_shares_are_not_written(model, engine):
    child, block = engine(model), BLOCK[model]
    longer = prompt(f"shared {model}", 3 * block + 60)
    child.generate([longer + prompt("end", 20)])
    child.call("erase")
    child.generate([longer[: block + 20]])  # loaded or computed: the engine has one whole block
    child.call("execute", MARKED)
    before = saved(child)
    child.generate([longer + prompt("end", 20) + prompt("more", 30)])
    assert saved(child) - before > 2 * block
    assert child.call("evaluate", "len(server.marked) > 0 and server.kept()")
    child.call("erase")


@pytest.mark.parametrize("model", ["granite", "qwen3_5"])
def test_prefill_stops_before_a_prompts_last_tokens(model, shared_daemon, expected):
    """A chat template rewrites these tokens in the next turn, or the same prompt comes again."""
    text = prompt(f"stops {model}", BLOCK[model] + 77)
    with Child(model, connector(shared_daemon, checkpoint_tokens=8)) as child:
        alike(model, child.generate([text]), expected(model, [text]))
        before = saved(child)
        alike(model, child.generate([text]), expected(model, [text]))
        assert saved(child) - before == 77 - 8, "the whole block is in the engine's own cache"
        for again in (text, text[:-8] + prompt("rewritten", 30)):
            child.call("erase")
            before = saved(child)
            alike(model, child.generate([again]), expected(model, [again]))
            assert saved(child) - before == len(text) - 8
        assert count(child, "load_failures") == 0


TURNS = "{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}[assistant] "
TEMPLATES = {TURNS: 0, TURNS + "<think> ": 8, "{{ messages | length }} turns: " + TURNS: 0}  # numbers of letters


@pytest.mark.parametrize("template", TEMPLATES)
def test_rewritten_tokens_of_a_template_are_counted(template):
    render = jinja2.Template(template).render
    assert (
        rewritten_tokens(lambda messages: [ord(letter) for letter in render(messages=messages)]) == TEMPLATES[template]
    )


def test_a_chat_template_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"kv_connector_extra_config.chat_template: .*/none/of/these.*--chat-template"):
        template_of(Options(chat_template="/none/of/these"))


@pytest.mark.parametrize("given", ["by the model", "as a file", "as text"])
def test_prefill_stops_where_the_chat_template_rewrites(given, shared_daemon, expected, tmp_path, model="granite"):
    _, tokenizer = tiny_checkpoint.parts()
    server = TURNS + "<think> "
    if given == "by the model":
        tokenizer.chat_template, options = server, {}
    else:  # the server's --chat-template replaces the model's
        (tmp_path / "server.jinja").write_text(server)
        tokenizer.chat_template = TURNS
        options = dict(chat_template=server if given == "as text" else str(tmp_path / "server.jinja"))
    tokenizer.save_pretrained(tmp_path)
    tokenizer.chat_template = server
    messages = [{"role": "user", "content": "Why?"}]
    texts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
    messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Go on."}]
    texts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    kept = next(i for i, (a, b) in enumerate(zip(*texts)) if a != b)
    assert kept < len(texts[0])
    system = prompt(f"system prompt of a template {given}", 90)
    settings = dict(tokenizer=str(tmp_path), skip_tokenizer_init=False)
    with Child(model, connector(shared_daemon, **options), **settings) as child:
        for text, reused in zip(texts, (0, len(system) + kept)):
            child.call("erase")
            before = saved(child)
            same(child.generate([system + text]), expected(model, [system + text]))
            assert saved(child) - before == reused


@pytest.mark.parametrize("model, options", [("granite", dict(checkpoint_tokens=8)), ("qwen3", {})])
def test_the_third_prompt_is_resumed_where_the_second_diverged(model, options, daemon, expected):
    beginning = prompt(f"parts {model}", 345)
    with Child(model, connector(daemon, **options)) as child:
        for number, found in enumerate((0, 256 if model == "qwen3" else 0, 336)):
            text = beginning + prompt(f"parts {model} {number}", 90)
            child.call("erase")
            before = saved(child)
            same(child.generate([text]), expected(model, [text]))
            assert saved(child) - before == found


def test_prefill_stops_where_another_plugin_wraps_the_scheduler_too(monkeypatch):
    own = Scheduler._mamba_block_aligned_split

    @functools.wraps(own)
    def others(self, request, tokens, local=0, external=0):
        return tokens

    monkeypatch.setattr(Scheduler, "_mamba_block_aligned_split", others)
    stops.install()
    ours = Scheduler._mamba_block_aligned_split
    stops.install()
    assert Scheduler._mamba_block_aligned_split is ours, "once"
    connector = SimpleNamespace(prefill_end=lambda request, start, end: 40, next_stop=lambda request, start: None)
    scheduler = SimpleNamespace(connector=connector, has_mamba_layers=True)
    request = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=90, status="waiting")
    assert ours(scheduler, request, 64) == 40
    scheduler.connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    assert ours(scheduler, request, 64) == 40, "also inside another connector"
