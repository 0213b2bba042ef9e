# SPDX-License-Identifier: Apache-2.0
"""Tiny engines that set prompts from segments, for the tests."""

from tiny_engines import Child, prompt

MODEL = "qwen3_5"
PATIENT = dict(
    call_ms=10000, land_ms=20000, compose_ms=60000
)  # of a busy machine; waits end sooner in a test of faults


class Segmented(Child):
    def probe(self, name, *args, **kwargs):
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        return self.call("evaluate", f"__import__('segment_probe').{name}(server, {given})")

    def ask(self, texts, query, tokens=4, **options):
        """(tokens, log-probabilities, cached tokens) of a prompt of these segments."""
        return self.probe("ask", sum(texts, []) + query, [len(text) for text in texts], tokens, **options)


def texts(name, number, tokens=100):
    return [prompt(f"{name} {i}", tokens) for i in range(number)]
