# SPDX-License-Identifier: Apache-2.0
"""Bodies of fixtures: engines that several tests share. Each generator yields a function, and ends its engines."""

from segmented_engines import PATIENT, Segmented
from tiny_engines import Child, connector


def answers():
    """Answers of engines without a cache, by model. Each prompt is computed once."""
    children, found = {}, {}

    def answer(model, prompts, tokens=6):
        keys = [(model, tokens, tuple(prompt)) for prompt in prompts]
        missing = {key: prompt for key, prompt in zip(keys, prompts) if key not in found}
        if missing:
            if model not in children:
                children[model] = Child(model, enable_prefix_caching=True)
            for key, prompt in missing.items():  # one by one: a batch of another shape may round differently
                children[model].call("erase")
                found[key] = children[model].generate([prompt], tokens)[0][:2]
        return [found[key] for key in keys]

    yield answer
    for child in children.values():
        child.close()


def _by_model(make):
    children = {}

    def get(model):
        if model not in children:
            children[model] = make(model)
        return children[model]

    yield get
    for child in children.values():
        child.close()


def cached(daemon):
    """One engine with the cache per model, for tests that do not end it."""
    return _by_model(lambda model: Child(model, connector(daemon)))


def segmented(daemon):
    options = connector(daemon, segments=True, **PATIENT)
    return _by_model(lambda model: Segmented(model, options, max_logprobs=512))
