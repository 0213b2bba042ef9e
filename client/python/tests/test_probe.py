# SPDX-License-Identifier: Apache-2.0
"""Probes of a real daemon: what the next lookup finds, without being one."""

import dataclasses

import numpy as np
import pytest
import shortest

import ashlar

RULES, ARCH, STONE = "Answer from these pages.", "An arch stands because all fall.", "Ashlar is cut to one face."


def prompt(*parts):
    return np.frombuffer("".join(parts).encode(), np.uint8).astype(np.int32)


def probing(daemon):
    return ashlar.Prober(daemon.rpc_socket, daemon.session_socket)


def test_a_probe_finds_what_the_next_lookup_finds(daemon):
    tokens = prompt(RULES, ARCH, "and more words than one block of two hundred and fifty-six tokens needs." * 4)
    table, state = np.arange(64, dtype=np.int32), np.ones(shortest.HEADS * shortest.DIM**2, np.float32)
    options = dict(pages=64, capture_tokens=16)
    longer = np.concatenate([tokens, prompt("!")])
    with ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, **options) as cache:
        with probing(daemon) as prober:
            probed = prober.probe(longer, model_id=shortest.MODEL.model_id)
            (node,) = probed.nodes
            assert probed.cheapest == 0 and node.node == ""
            assert (node.prompt_tokens, node.saved_tokens, node.sessions) == (len(longer), 0, 1)
            assert cache.commit(tokens, [(len(tokens), [ashlar.LinearTensors(shortest.LINEAR, state)])],
                                page_table=table) == ["kept"]  # fmt: skip
            node = prober.probe(longer).nodes[0]
            assert (node.prefix_tokens, node.segment_tokens) == (len(tokens), 0)
            assert node.tiers == {"dram": len(tokens)}
            assert prober.probe(longer, salt="mine").nodes[0].saved_tokens == 0
            with cache.begin(longer, page_table=table) as request:
                assert request.plan.prefix_tokens == len(tokens)
                assert request.finish() == ashlar.Verdict.OK


def test_a_probe_finds_segments_in_any_order_without_their_seams(daemon):
    engine = shortest.Engine(daemon.rpc_socket, daemon.session_socket)
    engine.serve([RULES, ARCH, STONE], "Why?", 8)
    with probing(daemon) as prober:
        node = prober.probe(prompt(RULES, STONE, ARCH, "Why?"), [len(RULES), len(STONE), len(ARCH)]).nodes[0]
        interiors = len(ARCH) + len(STONE) - 2 * (shortest.MODEL.head + shortest.MODEL.tail)
        assert (node.prefix_tokens, node.segment_tokens) == (len(RULES), interiors)
        assert prober.probe(prompt(STONE, ARCH, "Why?"), [len(STONE), len(ARCH)]).nodes[0].prefix_tokens == 0
    engine.cache.close()


def test_a_model_with_a_layout_of_its_own_for_segments_is_probed_in_both(daemon, monkeypatch):
    """As vLLM's connector opens a hybrid model: exact prefixes need the convolution's head."""
    pieces = dataclasses.replace(shortest.MODEL, head=8, tail=8, dtype="segments")
    convolution = ashlar.Linear(ashlar.Family.GDN, 2, 2, shortest.DIM, shortest.DIM, conv_channels=8, conv_kernel=4)
    exact = dataclasses.replace(
        shortest.MODEL, head=3, tail=0, layers=[convolution, shortest.MODEL.layers[shortest.ATTENTION]]
    )
    # The second of two ranks.
    rank = dataclasses.replace(pieces, model_id=pieces.model_id + " rank 1 of 2", dtype="segments rank 1 of 2")
    monkeypatch.setattr(shortest, "MODEL", pieces)
    sockets, table = (daemon.rpc_socket, daemon.session_socket), np.arange(64, dtype=np.int32)
    engine = shortest.Engine(*sockets)
    engine.serve([RULES, ARCH, STONE], "Why?", 4)
    tokens, lengths = prompt(RULES, STONE, ARCH, "Why?"), [len(RULES), len(STONE), len(ARCH)]
    interiors = len(ARCH) + len(STONE) - 2 * 16
    with (
        ashlar.Cache(exact, *sockets, pages=64, capture_tokens=16) as cache,
        ashlar.Cache(rank, *sockets, pages=64),
        probing(daemon) as prober,
    ):

        def found(segments=(), **options):
            node = prober.probe(tokens, segments, **options).nodes[0]
            return node.prefix_tokens, node.segment_tokens

        assert found(lengths, model_id=exact.model_id) == found(lengths) == (len(RULES), interiors)
        assert found(model_id=exact.model_id) == found() == (0, 0)
        begin = tokens[: len(RULES) + 6]  # ends in the head of the second segment
        state, tail = np.ones((2, shortest.DIM, shortest.DIM), np.float32), np.ones((3, 8), np.float32)
        linear = ashlar.LinearTensors(shortest.LINEAR, state, conv_tail=tail)
        assert cache.commit(begin, [(len(begin), [linear])], page_table=table) == ["kept"]
        assert found(lengths, model_id=exact.model_id) == (len(begin), interiors)
        assert found(model_id=exact.model_id) == (len(begin), 0)
    engine.cache.close()


def test_wrong_probes_are_refused_by_name(daemon):
    tokens = prompt(RULES)
    with probing(daemon) as prober:
        with pytest.raises(RuntimeError, match="no engine of this tenant has opened such a model"):
            prober.probe(tokens)
        with ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, pages=64):
            assert prober.probe(tokens).nodes[0].prompt_tokens == len(tokens)
            with pytest.raises(RuntimeError, match="^model_id: no engine"):
                prober.probe(tokens, model_id="another")
            with pytest.raises(ValueError, match="^namespace: expected an even number of hexadecimal digits"):
                prober.probe(tokens, namespace="xyz")
            with pytest.raises(ValueError, match=r"segment_lengths\[0\]|segments\[0\]"):
                prober.probe(tokens, [len(tokens) + 1])
            with pytest.raises(ValueError, match="^tokens: not a list of integers"):
                prober.probe("text")
            with pytest.raises(ValueError, match="^conversation: "):
                prober.probe(tokens, conversation=b"abc")
    with pytest.raises(RuntimeError):
        prober.probe(tokens)  # closed


def test_without_a_daemon_there_is_no_prober(tmp_path):
    with pytest.raises(ConnectionError):
        ashlar.Prober(tmp_path / "rpc.sock", tmp_path / "session.sock")
