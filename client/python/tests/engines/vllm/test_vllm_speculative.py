# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: what is saved is of accepted tokens alone, and tokens are those of an engine without either."""

import pytest
from tiny_engines import Child, connector, prompt, same, saved

NGRAM = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1)
COMMITTED = """
import ashlar
server.committed, own = [], ashlar.Cache.commit
def commit(self, tokens, *args, **kwargs):
    server.committed.append(tokens.tolist())
    return own(self, tokens, *args, **kwargs)
ashlar.Cache.commit = commit
"""


def drafts(child):
    """Proposed and accepted draft tokens."""
    metrics = child.call("evaluate", "{m.name: m.value for m in llm.get_metrics() if hasattr(m, 'value')}")
    return [metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]


def test_ngram_drafts_leave_tokens_and_what_is_kept_as_they_are(shared_daemon):
    exact = dict(dtype="float32")  # steps of several tokens round in another way
    first = prompt("ngram", 200)
    with Child("qwen3", enable_prefix_caching=True, **exact) as plain:
        answer = plain.generate([first], 400)
        second = first + answer[0][0] + prompt("next turn", 30)
        plain.call("erase")
        wanted = plain.generate([second], 40)
    with Child("qwen3", connector(shared_daemon), speculative_config=NGRAM, **exact) as child:
        child.call("execute", COMMITTED)
        assert child.generate([first], 400)[0][0] == answer[0][0]
        proposed, accepted = drafts(child)
        assert 0 < accepted < proposed, "drafts of both kinds"
        texts = child.call("evaluate", "server.committed")
        assert max(map(len, texts)) >= 512, "decoded tokens are kept, too"
        assert all(text == second[: len(text)] for text in texts), "of no draft that was rejected"
    for speculative in (dict(speculative_config=NGRAM), {}):
        with Child("qwen3", connector(shared_daemon), **speculative, **exact) as child:
            same(child.generate([second], 40), [each[:2] for each in wanted], 1e-3)
            assert saved(child) == 512, "found after a restart, with drafts and without"


def test_methods_with_layers_of_their_own_are_refused_by_name():
    import types

    from ashlar.vllm.identity import Unsupported
    from ashlar.vllm.model import _check

    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type="cpu"),
        model_config=types.SimpleNamespace(enable_sleep_mode=False),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
        speculative_config=types.SimpleNamespace(method="eagle3"),
    )
    with pytest.raises(Unsupported, match="speculative_config: method eagle3 .*set method to ngram"):
        _check(config)
