# SPDX-License-Identifier: Apache-2.0
"""python -m ashlar.proxy: the command line."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from ashlar.boundaries import declared_boundaries, template_text
from ashlar.checkpoint import model_name
from ashlar.proxy.backends import POLICIES, Backends, parse_backend


def separator(text: str) -> str | list[int]:
    """Returns the token ids if `text` is a JSON list of them, otherwise `text`."""
    try:
        ids = json.loads(text)
    except ValueError:
        return text
    return ids if isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids) else text


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ashlar.proxy",
        description="An OpenAI-compatible proxy that sends each prompt to the engine that is expected to answer first.",
    )
    parser.add_argument(
        "--backend", action="append", required=True, metavar="URL[,rpc=PATH,session=PATH][,node=NAME]",
        help="an engine's server, and its daemon's sockets or its node in the cluster; repeat for each",
    )  # fmt: skip
    parser.add_argument("--model", help="name or folder with the tokenizer; without it only token ids are probed")
    parser.add_argument(
        "--chat-template", default="", metavar="TEMPLATE",
        help="the servers' --chat-template: a file or the template; needs --model; default: the model's own",
    )  # fmt: skip
    parser.add_argument(
        "--model-id", help="the connector's model_id; default: the name that the connector derives from --model"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default="cheapest",
        help="cheapest: least expected time, for this request and later ones; prefix-hash, round-robin: no probes; "
        "default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--segment-separator", type=separator, default="", metavar="TEXT",
        help="the connector's segment_separator: text, or a list of token ids such as [5,6]",
    )  # fmt: skip
    parser.add_argument(
        "--segment-boundaries",
        choices=("messages",),
        default="",
        help="the connector's segment_boundaries; needs --model, and special tokens between the chat template's messages",
    )
    parser.add_argument(
        "--short-segment", type=int, default=32, metavar="TOKENS",
        help="adjacent segments of fewer tokens are joined; set it to the connector's seam_head + seam_tail + min_tokens; "
        "default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the tokenizer's own code from the model's repository (trust_remote_code of Transformers)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=8080, help="default: %(default)s")
    parser.add_argument(
        "--probe-ms", type=float, default=200, help="limit of tokenizing, and of probing; default: %(default)s"
    )
    parser.add_argument("--max-in-flight", type=int, default=256, help="requests per backend; default: %(default)s")
    parser.add_argument(
        "--max-waiting", type=int, default=1024, help="further requests that wait; default: %(default)s"
    )
    parser.add_argument(
        "--wait-seconds", type=float, default=30, help="longest time in the queue; default: %(default)s"
    )
    parser.add_argument("--connect-seconds", type=float, default=2, help="limit of connecting; default: %(default)s")
    parser.add_argument(
        "--first-byte-seconds", type=float, default=600,
        help="longest wait for the first byte of an answer; if it is not streamed, that follows the whole answer; "
        "default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=300,
        help="longest time between two chunks of an answer, and for a client to read one or send its body; default: %(default)s",
    )
    parser.add_argument(
        "--check-seconds", type=float, default=2, help="interval of health checks; default: %(default)s"
    )
    parser.add_argument("--tries", type=int, default=3, help="backends per request; default: %(default)s")
    return parser


def model_id(options: argparse.Namespace) -> str:
    """Returns the name under which engines have opened the model, or an empty string if only one model is open."""
    if options.model_id is not None:
        return str(options.model_id)
    return model_name(options.model) if options.model else ""


def tokenizer(model: str, trust: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust)


def main(given: list[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(given)
    for name, value in vars(options).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0 and name != "short_segment":
            parser.error(f"--{name.replace('_', '-')}: {value} was given; expected more than 0")
    if isinstance(options.segment_separator, str) and options.segment_separator and not options.model:
        parser.error("--segment-separator: --model is required, to tokenize text; or pass a list of token ids")
    if options.segment_boundaries and not options.model:
        parser.error("--segment-boundaries: --model is required, for its chat template")
    if options.chat_template and not options.model:
        parser.error("--chat-template: --model is required, for its tokenizer")
    try:
        template = template_text(options.chat_template)
    except (OSError, ValueError) as error:
        parser.error(f"--chat-template: {error}; expected the value of the servers' --chat-template")
    try:
        from aiohttp import web

        from ashlar.proxy.prompts import Prompts
        from ashlar.proxy.server import Limits, Proxy
    except ModuleNotFoundError as error:
        print(f'{error}: pip install "ashlar[proxy]" installs what the proxy needs', file=sys.stderr)
        return 2
    try:
        parsed = [parse_backend(text) for text in options.backend]
    except ValueError as error:
        parser.error(str(error))
    if len({backend.url for backend in parsed}) < len(parsed):
        parser.error("--backend: a URL was given twice; expected each engine once")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    prompts, seconds = None, options.probe_ms / 1000
    if options.policy != "round-robin":
        try:
            found = tokenizer(options.model, options.trust_remote_code) if options.model else None
        except (OSError, ValueError, ImportError) as error:
            parser.error(f"--model: no tokenizer in {options.model!r}: {error}")
        try:
            ends = declared_boundaries(
                options.segment_separator, options.segment_boundaries, found, template, options.short_segment
            )
            prompts = Prompts(found, ends, template)
        except ValueError as error:  # the message begins with segment_separator or segment_boundaries
            parser.error(f"--{str(error).replace('_', '-', 1)}")
    limits = Limits(
        in_flight=options.max_in_flight, waiting=options.max_waiting, wait_seconds=options.wait_seconds,
        connect_seconds=options.connect_seconds, first_byte_seconds=options.first_byte_seconds,
        idle_seconds=options.idle_seconds, tries=options.tries, check_seconds=options.check_seconds,
    )  # fmt: skip

    async def app() -> web.Application:
        backends = Backends(parsed, model_id(options), seconds, options.policy)
        return Proxy(backends, prompts, limits, seconds).app()

    web.run_app(app(), host=options.host, port=options.port, handler_cancellation=True, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
