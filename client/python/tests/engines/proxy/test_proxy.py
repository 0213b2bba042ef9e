# SPDX-License-Identifier: Apache-2.0
"""The proxy's choice of an engine, its prompts and its command line."""

import asyncio
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import tomllib

import numpy as np
import pytest
import shortest
from message_templates import STYLES
from running_proxy import CHAT, FakeProber, Words, metrics, node, post, proxy_of, run
from tiny_tokenizer import CHATML, tokenizer

import ashlar
from ashlar.boundaries import Boundaries, declared_boundaries
from ashlar.chat_template import MessageTokens
from ashlar.probe import Probed
from ashlar.proxy.__main__ import arguments, main, model_id
from ashlar.proxy.backends import Backend, Backends, Known, estimate_of, parse_backend
from ashlar.proxy.prompts import Prompts, Question, Unprobed

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])


def test_a_prompt_goes_to_the_engine_that_has_it_cached():
    async def test():
        probers = {"a": FakeProber(node(0)), "b": FakeProber(node(800))}
        async with proxy_of(probers=probers) as (_, url, fakes, client):
            for _ in range(4):
                status, headers, body = await post(client, url)
                assert status == 200 and json.loads(body)["model"] == "b"
            assert headers["X-Ashlar-Backend"] == fakes["b"].url
            assert headers["X-Ashlar-Saved-Tokens"] == "800" and headers["X-Engine"] == "b"
            assert probers["a"].asked[0] == ([2, 103, 103, 105, 3], (), dict(model_id="m", salt="", cluster=False))
            found = await metrics(client, url)
            assert found[f'ashlar_proxy_saved_tokens_total{{backend="{fakes["b"].url}"}}'] == 3200
            assert found['ashlar_proxy_probes_total{outcome="found"}'] == 4

    run(test)


def test_requests_for_an_adapter_are_not_probed():
    """Their prefixes are cached under other names than those of the base model."""

    async def test():
        probers = {"a": FakeProber(node(0)), "b": FakeProber(node(800))}
        async with proxy_of(probers=probers) as (proxy, url, fakes, client):
            first, second = proxy.backends.all
            assert (await post(client, url, {**CHAT, "model": "tuned"}))[1]["X-Ashlar-Saved-Tokens"] == "800", "unknown"
            cards = [{"id": "base", "parent": None}, {"id": "alias"}, {"id": "tuned", "parent": "base"}]
            for fake in fakes.values():  # the names are read when a backend becomes healthy
                fake.models, fake.healthy = {"data": cards}, False
            while first.healthy or second.healthy:
                await asyncio.sleep(0.01)
            for fake in fakes.values():
                fake.healthy = True
            while not first.base_names or not second.base_names:
                await asyncio.sleep(0.01)
            assert first.base_names == {"base", "alias"}
            for model in ("base", "alias", "", None):
                assert (await post(client, url, {**CHAT, "model": model}))[1]["X-Ashlar-Saved-Tokens"] == "800"
            for model in ("tuned", ["base"]):
                assert "X-Ashlar-Saved-Tokens" not in (await post(client, url, {**CHAT, "model": model}))[1]
            assert (await metrics(client, url))['ashlar_proxy_probes_total{outcome="adapter"}'] == 2

    run(test)


@pytest.mark.parametrize("answer", [None, [], {"error": "no key"}, {"data": None}, {"data": [5]}, {"data": [{"x": 1}]}])
def test_a_server_that_does_not_list_its_models_is_probed_for_all(answer):
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(800))}) as (proxy, url, fakes, client):
            fakes["a"].models, wanted = answer, fakes["a"].checks + 2
            while fakes["a"].checks < wanted:
                await asyncio.sleep(0.01)
            assert (await post(client, url))[1]["X-Ashlar-Saved-Tokens"] == "800"
            assert proxy.backends.all[0].base_names == frozenset() and proxy.backends.all[0].healthy

    run(test)


def test_an_engine_that_is_busy_or_drains_loses_its_prompts():
    async def test():
        probers = {"a": FakeProber(node(0)), "b": FakeProber(node(800, wait_seconds=5.0))}
        async with proxy_of(probers=probers) as (_, url, _, client):
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800, draining=True),)
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800, sessions=0),)
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800),)
            assert json.loads((await post(client, url))[2])["model"] == "b"

    run(test)


def test_uncached_prompts_are_spread():
    async def test():
        probers = {name: FakeProber(node(0)) for name in "abc"}
        async with proxy_of("abc", probers) as (_, url, fakes, client):
            for fake in fakes.values():
                fake.delay = 0.2
            await asyncio.gather(*(post(client, url) for _ in range(9)))
            assert [len(fake.requests) for fake in fakes.values()] == [3, 3, 3]

    run(test)


def test_a_daemon_that_is_away_or_late_costs_nothing_but_its_estimate():
    async def test():
        late = FakeProber(node(900))
        late.seconds = 2.0
        gone = FakeProber()
        gone.error = ConnectionError("no daemon")
        probers = {"a": late, "b": gone, "c": FakeProber(node(4, prompt_tokens=5))}
        async with proxy_of("abc", probers, probe_seconds=0.2) as (_, url, _, client):
            began = asyncio.get_running_loop().time()
            assert json.loads((await post(client, url))[2])["model"] == "c"
            assert asyncio.get_running_loop().time() - began < 1.5
            probers["c"].error = ConnectionError("no daemon")
            assert (await post(client, url))[0] == 200
            assert (await metrics(client, url))['ashlar_proxy_probes_total{outcome="no_answer"}'] == 1

    run(test)


def test_a_wrong_name_of_the_model_is_reported(caplog):
    async def test():
        prober = FakeProber(node(4, prompt_tokens=5))
        prober.error = RuntimeError("model_id: no engine has opened 'm'")
        async with proxy_of("a", {"a": prober}) as (_, url, _, client):
            for _ in range(3):
                assert (await post(client, url))[0] == 200
            assert (await metrics(client, url))['ashlar_proxy_probes_total{outcome="no_model"}'] == 3
            reported = [
                record.getMessage() for record in caplog.records if "no engine has opened" in record.getMessage()
            ]
            assert len(reported) == 1 and "(--model-id 'm')" in reported[0]
            prober.error = None
            assert (await post(client, url))[1]["X-Ashlar-Saved-Tokens"] == "4"
            prober.error = RuntimeError("model_id: no engine has opened 'm'")
            await post(client, url)
            assert sum("no engine has opened" in record.getMessage() for record in caplog.records) == 2

    run(test)


def test_a_daemon_that_hangs_delays_one_request_only():
    async def test():
        hanging = FakeProber(node(900))
        hanging.seconds = 0.6
        probers = {"a": hanging, "b": FakeProber(node(0))}
        async with proxy_of(probers=probers, probe_seconds=0.5) as (proxy, url, _, client):
            await post(client, url)
            began = asyncio.get_running_loop().time()
            await post(client, url)
            assert asyncio.get_running_loop().time() - began < 0.4
            hanging.seconds = 0.0
            while (await post(client, url))[1].get("X-Ashlar-Saved-Tokens") != "900":  # a later probe is in time
                await asyncio.sleep(0.05)
            assert proxy.backends._silent == set()

    run(test)


def test_a_busy_engine_loses_prompts_of_which_it_saves_little():
    """Each request that is decoding adds a token to the step that computes the prompt."""
    backends = Backends([Backend("http://a"), Backend("http://b")], "m", 0.5, "cheapest")
    few = {"http://a": estimate_of(node(100, prompt_tokens=150)), "http://b": estimate_of(node(0, prompt_tokens=150))}
    known = Known(150, estimates=few)
    assert backends.choose(known)[0].url == "http://a"
    backends.all[0].in_flight = 90
    assert backends.choose(known)[0].url == "http://a"
    backends.all[0].in_flight = 110
    assert backends.choose(known)[0].url == "http://b"
    backends.close()


def test_while_requests_wait_computing_less_counts_more():
    """A second of computation delays every later request of the backend."""
    backends = Backends([Backend("http://a"), Backend("http://b")], "m", 0.5, "cheapest")
    saved = {"http://a": estimate_of(node(900)), "http://b": estimate_of(node(0))}  # 0.1 s and 1 s to compute
    known = Known(1000, estimates=saved)
    backends.all[0].pending_tokens, backends.all[1].pending_tokens = 1500, 400
    assert backends.choose(known)[0].url == "http://b", "the first token: 1.4 s, not 1.6"
    backends.all[0].awaiting = 2
    assert backends.choose(known)[0].url == "http://a", "all first tokens: 1.7 s, not 2.4"
    assert backends.seconds(backends.all[0], known) == pytest.approx(1.6)
    backends.close()


def test_a_prompt_counts_as_pending_until_it_is_computed():
    """Of an answer that is not streamed, the first byte follows the last token."""

    async def test():
        prober = FakeProber(node(0, prompt_tokens=5))  # 5 ms
        async with proxy_of("a", {"a": prober}) as (proxy, url, fakes, client):
            fakes["a"].failure, backend = "hang", proxy.backends.all[0]
            whole = asyncio.create_task(post(client, url))
            while not fakes["a"].requests or backend.pending_tokens:
                await asyncio.sleep(0.01)
            assert backend.in_flight == 1 and backend.awaiting == 0
            streamed = asyncio.create_task(post(client, url, {**CHAT, "stream": True}))
            while len(fakes["a"].requests) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert backend.pending_tokens == 5 and backend.awaiting == 1
            for task in (whole, streamed):
                task.cancel()
            while backend.in_flight:
                await asyncio.sleep(0.01)
            assert backend.pending_tokens == 0 and backend.awaiting == 0

    run(test)


def test_prompts_that_begin_alike_go_to_one_engine():
    async def test():
        async with proxy_of("abc", policy="prefix-hash") as (proxy, url, fakes, client):
            served = {}
            for number in range(30):
                prompt = [number] * 300
                for last in (1, 2):
                    answer = await post(client, url, {"prompt": [*prompt, last]}, "/v1/completions")
                    served.setdefault(number, set()).add(json.loads(answer[2])["model"])
            assert all(len(names) == 1 for names in served.values()), served
            assert all(len(fake.requests) >= 6 for fake in fakes.values())  # at random: 2e-4 that one has fewer
            proxy.backends.all[0].healthy = False
            moved = [number for number in range(30) if served[number] == {"a"}]
            known = [Known(301, np.full(256, number, np.int32).tobytes()) for number in range(30)]
            for number in range(30):
                first = proxy.backends.choose(known[number])[0].url
                assert first != fakes["a"].url
                assert number in moved or first == fakes[next(iter(served[number]))].url

    run(test)


def test_round_robin_takes_turns_without_probes():
    async def test():
        async with proxy_of("abc", policy="round-robin") as (_, url, fakes, client):
            for _ in range(6):
                await post(client, url)
            assert [len(fake.requests) for fake in fakes.values()] == [2, 2, 2]

    run(test)


def test_nodes_of_a_cluster_are_asked_through_one_daemon():
    prober = FakeProber(node(0, node="x"), node(700, node="y"))

    async def test():
        parsed = [parse_backend("http://127.0.0.1:1,node=x"), parse_backend("http://127.0.0.1:2,node=y")]
        backends = Backends(parsed, "m", 0.5, "cheapest")
        for sockets in backends._probers:
            backends._probers[sockets] = prober
        estimates, _ = await backends.probe(Question(np.arange(1000, dtype=np.int32)))
        assert [estimates[backend.url].saved for backend in parsed] == [0, 700]
        assert len(prober.asked) == 1 and prober.asked[0][2]["cluster"] is True
        assert backends.choose(Known(1000, estimates=estimates))[0] is parsed[1]
        backends.close()

    run(test)


def test_if_segments_cannot_be_probed_the_prefix_is():
    asked = []

    def probe(tokens, segments=(), **_):
        asked.append(segments)
        if segments and refuses:
            raise ValueError("ns: 2 open models match")
        return Probed((node(600 if segments else 200),), 0)

    prober, refuses = FakeProber(), False
    prober.probe = probe

    async def saved():
        backends = Backends([Backend("http://x", "/r", "/s")], "m", 0.5, "cheapest")
        backends._probers["/r", "/s"] = prober
        estimates, _ = await backends.probe(Question(np.arange(1000, dtype=np.int32), (400, 400)))
        backends.close()
        return estimates["http://x"].saved

    assert asyncio.run(saved()) == 600 and asked == [(400, 400)]
    refuses = True
    assert asyncio.run(saved()) == 200


def test_hybrids_are_probed_in_both_of_their_layouts(daemon, monkeypatch):
    """As vLLM's connector opens them: exact prefixes with the convolution's head, and segments with seams."""
    pieces = dataclasses.replace(shortest.MODEL, head=8, tail=8, dtype="segments")
    convolution = ashlar.Linear(ashlar.Family.GDN, 2, 2, 16, 16, conv_channels=8, conv_kernel=4)
    exact = dataclasses.replace(shortest.MODEL, head=3, tail=0, layers=[convolution, shortest.MODEL.layers[1]])
    monkeypatch.setattr(shortest, "MODEL", pieces)
    rules, arch, stone = (f"The {name} are quoted here." for name in ("rules", "arches", "stones"))
    tokens = np.frombuffer((rules + stone + arch + "Why?").encode(), np.uint8).astype(np.int32)
    lengths, sockets = (len(rules), len(stone), len(arch)), (daemon.rpc_socket, daemon.session_socket)
    engine = shortest.Engine(*sockets)
    engine.serve([rules, arch, stone], "Why?", 4)

    async def estimate(segments):
        backends = Backends([Backend("http://x", *sockets)], pieces.model_id, 5.0, "cheapest")
        found, _ = await backends.probe(Question(tokens, segments))
        backends.close()
        return found["http://x"]

    with ashlar.Cache(exact, *sockets, pages=64, capture_tokens=16):
        found = asyncio.run(estimate(lengths))
        assert found.saved == len(rules) + len(stone) + len(arch) - 2 * 16 and found.usable
        assert asyncio.run(estimate(())).saved == 0
    engine.cache.close()


@pytest.mark.parametrize(
    "text, error",
    [
        ("127.0.0.1:8000", "expected a URL"),
        ("ftp://x", "expected a URL"),
        ("http://user:secret@x", "expected one without"),
        ("http://x,socket=/a", "expected rpc=PATH, session=PATH or node=NAME"),
        ("http://x,rpc=/a", "one was given; expected both or none"),
        ("http://x,node=", "expected rpc=PATH"),
    ],
)
def test_wrong_backends_are_refused(text, error):
    with pytest.raises(ValueError, match="^--backend: .*" + error):
        parse_backend(text)


def test_prompts_become_the_engines_tokens():
    prompts = Prompts(Words(), Boundaries([7], None, 2))

    def of(body, path="/v1/completions"):
        return prompts.question(path, body)

    assert list(of({"prompt": "a bb"}).tokens) == [1, 101, 102]
    assert list(of({"prompt": "a bb", "add_special_tokens": False}).tokens) == [101, 102]
    assert list(of({"prompt": [5, 6]}).tokens) == [5, 6]
    assert list(of({"prompt": [[5, 6]]}).tokens) == [5, 6]
    assert of({"prompt": "a", "cache_salt": "user"}).salt == "user"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = of({"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    assert list(chat.tokens) == [2, 101, 101, 3]
    segmented = of({"prompt": "aa bb sep cc dd sep ee", "add_special_tokens": False})
    assert segmented.segments == (3, 3) and len(segmented.tokens) == 7
    ended = of({"prompt": "aa bb sep cc dd sep", "add_special_tokens": False})
    assert ended.segments == (3,)  # the last token is always computed
    declared = of({"prompt": [5] * 9, "kv_transfer_params": {"ashlar_segments": [4, 4]}})
    assert declared.segments == (4, 4)
    assert of({"prompt": [5] * 9, "kv_transfer_params": {"ashlar_segments": [4, 40]}}).segments == ()


@pytest.mark.parametrize(
    "body, path, reason",
    [
        ({}, "/v1/completions", "prompt"),
        ({"prompt": ["a", "b"]}, "/v1/completions", "prompt"),
        ({"prompt": [1, -1]}, "/v1/completions", "prompt"),
        ({"messages": []}, "/v1/chat/completions", "prompt"),
        ({"messages": ["x"]}, "/v1/chat/completions", "prompt"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, "/v1/chat/completions", "template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "/v1/chat/completions", "media"),
        ({"prompt": "a", "cache_salt": 5}, "/v1/completions", "salt"),
        ({"prompt": "\ud800"}, "/v1/completions", "prompt"),
        ({**CHAT, "chat_template": "{{ 1 }}"}, "/v1/chat/completions", "template"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "/v1/chat/completions", "template"),
        *(
            ({**CHAT, "chat_template_kwargs": kwargs}, "/v1/chat/completions", "template")
            for kwargs in (
                {"padding": "max_length", "max_length": 10**9},
                {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**9}},
            )
        ),
    ],
)
def test_prompts_that_cannot_be_known_are_not_probed(body, path, reason):
    with pytest.raises(Unprobed, match=reason):
        Prompts(Words()).question(path, body)


def test_variables_of_a_template_are_passed():
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert list(Prompts(Words()).question("/v1/chat/completions", body).tokens) == [2, 103, 103, 105, 3]


@pytest.mark.parametrize("given", ["as text", "as a file"])
def test_the_servers_template_serves_prompts_and_their_boundaries(given, monkeypatch, tmp_path):
    known, made = tokenizer(None, ["<|im_start|>", "<|im_end|>"]), []
    monkeypatch.setattr("ashlar.proxy.__main__.tokenizer", lambda *_: known)
    monkeypatch.setattr("ashlar.proxy.prompts.Prompts", lambda *given: made.append(Prompts(*given)))
    monkeypatch.setattr("aiohttp.web.run_app", lambda app, **_: app.close())
    (tmp_path / "server.jinja").write_text(CHATML)
    template = CHATML if given == "as text" else str(tmp_path / "server.jinja")
    options = ["--model", "m", "--chat-template", template, "--segment-boundaries", "messages", "--short-segment", "0"]
    assert main(["--backend", "http://x", *options]) == 0
    body = {"messages": [{"role": role, "content": "one two"} for role in ("system", "user")]}
    question = made[0].question("/v1/chat/completions", body)
    text = "".join(f"<|im_start|>{role}\none two<|im_end|>\n" for role in ("system", "user"))
    assert list(question.tokens) == known.encode(text + "<|im_start|>assistant\n")
    assert question.segments == (5, 5)
    with pytest.raises(Unprobed, match="template"):
        Prompts(known).question("/v1/chat/completions", body)


def test_messages_are_segments_whose_roles_have_different_tokens():
    style = STYLES["glm"]
    known = tokenizer(style.template, style.specials.split())
    roles = ("system", "user", "assistant", "user")
    body = {"messages": [{"role": role, "content": f"one {'two ' * i}"} for i, role in enumerate(roles, 1)]}
    question = Prompts(known, declared_boundaries((), "messages", known)).question("/v1/chat/completions", body)
    assert question.segments == (2, 3, 4, 7, 6), "its first two tokens, and messages with their roles' tokens"
    assert len(question.tokens) == 24


@pytest.mark.parametrize(
    "given, wanted",
    [
        ([], None),
        (["--segment-separator", "sep"], [6]),
        (["--segment-separator", "[7]"], [6]),
        (["--segment-separator", "[7, 9]"], []),
        (["--segment-separator", "[SEP]"], []),  # text
        (["--segment-boundaries", "messages"], [3]),
        (["--segment-boundaries", "messages", "--segment-separator", "[7]"], [3, 3]),
    ],
)
def test_segments_end_where_the_connectors_do(given, wanted, monkeypatch):
    monkeypatch.setattr("ashlar.boundaries.message_tokens", lambda tokenizer, template: MessageTokens((2,)))
    options = arguments().parse_args(["--backend", "http://x", "--model", "m", *given])
    found = declared_boundaries(options.segment_separator, options.segment_boundaries, Words(), short=2)
    assert (None if found is None else found.lengths([5, 5, 5, 2, 5, 7, 5])) == wanted


def test_without_a_tokenizer_only_token_ids_are_known():
    prompts = Prompts(None)
    assert list(prompts.question("/v1/completions", {"prompt": [5, 6]}).tokens) == [5, 6]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        with pytest.raises(Unprobed, match="tokenizer"):
            prompts.question(path, body)


def test_the_default_model_id_is_the_connectors(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "qwen")

    def of(*given):
        return model_id(arguments().parse_args(["--backend", "http://x", *given]))

    assert of("--model", str(tmp_path / "qwen")) == of("--model", str(tmp_path / "link")) == "qwen"
    assert of("--model", "org/name") == "org/name"
    assert of("--model", str(tmp_path / "qwen"), "--model-id", "other") == "other"
    assert of() == of("--model", "org/name", "--model-id", "") == ""


def test_the_extra_has_what_chat_templates_need():
    project = tomllib.loads((SOURCE / "client/python/pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w.-]+", each)[0].lower() for each in requirements}

    needed = [each for each in importlib.metadata.requires("transformers") if 'extra == "chat-template"' in each]
    assert needed and names(needed) <= names(project["optional-dependencies"]["proxy"])


@pytest.mark.parametrize(
    "given, error",
    [
        ([], "--backend"),
        (["--backend", "x"], "--backend: 'x' was given; expected a URL"),
        (["--backend", "http://x", "--backend", "http://x"], "--backend: a URL was given twice"),
        (["--backend", "http://x", "--tries", "0"], "--tries: 0 was given; expected more than 0"),
        (["--backend", "http://x", "--segment-separator", "#"], "--segment-separator: --model is required"),
        (["--backend", "http://x", "--segment-boundaries", "messages"], "--segment-boundaries: --model is required"),
        (["--backend", "http://x", "--segment-boundaries", "lines"], "--segment-boundaries: invalid choice: 'lines'"),
        (["--backend", "http://x", "--chat-template", "{{ 1 }}"], "--chat-template: --model is required"),
        (["--backend", "http://x", "--model", "m", "--chat-template", "/no/file"], "--chat-template: [Errno 2]"),
        (["--backend", "http://x", "--model", "/nowhere"], "--model: no tokenizer in '/nowhere'"),
    ],
)
def test_wrong_options_are_refused_by_name(given, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2 and error in capsys.readouterr().err
