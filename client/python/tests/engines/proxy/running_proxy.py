# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of fake engines, with fake answers of daemons."""

import asyncio
import contextlib

import aiohttp
from aiohttp import web
from fake_backend import FakeBackend

from ashlar.probe import NodeProbe, Probed
from ashlar.proxy.backends import Backend, Backends
from ashlar.proxy.prompts import Prompts
from ashlar.proxy.server import Limits, Proxy

CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}


def node(saved=0, **changes):
    fields = dict(
        node="", prompt_tokens=1000, prefix_tokens=saved, segment_tokens=0, tiers={}, fetch_seconds=0.0,
        compute_seconds=0.0, wait_seconds=0.0, queued_tokens=0, tokens_per_second=1000.0, sessions=1, landings=0,
        draining=False,
    )  # fmt: skip
    return NodeProbe(**{**fields, **changes})


class Words:
    """A tokenizer of words; `sep` is 7."""

    all_special_tokens = ["sep"]

    def get_added_vocab(self):
        return {}

    def encode(self, text, add_special_tokens=True):
        if "\ud800" in text:
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, …]")
        words = [7 if word == "sep" else 100 + len(word) for word in text.split()]
        return [1, *words] if add_special_tokens else words

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **options):
        if any(message["role"] == "forbidden" for message in messages):
            raise ValueError("role")
        tokens = [token for message in messages for token in (2, *self.encode(message["content"], False))]
        return tokens + ([3] if add_generation_prompt else [])


class FakeProber:
    """Answers with `nodes`, of one daemon."""

    def __init__(self, *nodes):
        self.nodes, self.asked, self.error, self.seconds = nodes, [], None, 0.0

    def probe(self, tokens, segments=(), **options):
        self.asked.append((list(tokens), tuple(segments), options))
        if self.seconds:
            import time

            time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return Probed(tuple(self.nodes), 0)

    def close(self):
        pass


@contextlib.asynccontextmanager
async def proxy_of(names="ab", probers=None, policy="cheapest", probe_seconds=0.5, **limits):
    """Yields the proxy, its URL, the fake engines and a client."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = {name: await stack.enter_async_context(FakeBackend(name).serving()) for name in names}
        parsed = [Backend(fake.url, f"/{name}/rpc", f"/{name}/session") for name, fake in fakes.items()]
        backends = Backends(parsed, "m", probe_seconds, policy)
        for name, prober in (probers or {}).items():
            backends._probers[f"/{name}/rpc", f"/{name}/session"] = prober
        prompts = None if policy == "round-robin" else Prompts(Words())
        usual = dict(check_seconds=0.5, connect_seconds=0.5, wait_seconds=5)
        proxy = Proxy(backends, prompts, Limits(**{**usual, **limits}), probe_seconds)
        runner = web.AppRunner(proxy.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stack.push_async_callback(runner.cleanup)
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield proxy, url, fakes, client


def run(test):
    asyncio.run(asyncio.wait_for(test(), 60))


async def post(client, url, body=CHAT, path="/v1/chat/completions", **options):
    async with client.post(url + path, json=body, **options) as answer:
        return answer.status, answer.headers, await answer.read()


async def metrics(client, url):
    async with client.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
