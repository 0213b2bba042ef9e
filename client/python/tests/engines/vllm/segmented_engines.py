# SPDX-License-Identifier: Apache-2.0
"""Tiny engines that take segments of prompts from the cache, for the tests."""

from tiny_engines import Child, prompt

MODEL = "qwen3_5"
# For a busy machine, with longer waits than in tests of faults. Segments of few tokens are taken although they save no
# time. Tuples in float32 compose to its precision.
PATIENT = dict(call_ms=10000, lookup_ms=10000, land_ms=20000, min_segment_tokens=1, segment_dtype="float32")
# Of log-probabilities of an exact prompt whose steps differ from those of an engine without the cache: such an engine
# differs from itself by up to 0.045 if its steps have other lengths (bfloat16).
OTHER_STEPS = 6e-2


class Segmented(Child):
    def probe(self, name, *args, **kwargs):
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        return self.call("evaluate", f"__import__('segment_probe').{name}(server, {given})")

    def publish(self, texts, salt=None):
        """Lets the engine compute these texts separately, as a prompt's first segment and as a later one, so that it
        publishes them. Returns the number of published segments."""
        self.probe("settle")
        before = self.metrics().get(("published_segments", ()), 0)
        lead, query = texts[-1][:20][::-1], texts[0][:5][::-1]
        self.ask([lead, *texts], query, 1, salt=salt)
        self.ask(texts[:1], query, 1, salt=salt)
        self.probe("settle")
        self.call("erase")
        return self.metrics().get(("published_segments", ()), 0) - before

    def metrics(self):
        return self.call("metrics")

    def ask(self, texts, query, tokens=4, **options):
        """Returns (tokens, log-probabilities, cached tokens) of a prompt with these segments."""
        return self.probe("ask", sum(texts, []) + query, [len(text) for text in texts], tokens, **options)


def texts(name, number, tokens=100):
    return [prompt(f"{name} {i}", tokens) for i in range(number)]
