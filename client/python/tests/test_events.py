# SPDX-License-Identifier: Apache-2.0
"""Events over ZeroMQ, read as routers read vLLM's events. The structs are those of vLLM 0.32's KV events."""

import time

import msgspec
import numpy as np
import pytest
import shortest
import zmq

import ashlar.daemon

TEXT = "A prefix of more than two blocks of two hundred and fifty-six tokens. " * 8


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """A router's view of one worker: its blocks, and the number of the next batch."""

    def __init__(self, context, folder):
        self.decoder = msgspec.msgpack.Decoder(EventBatch)
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(f"ipc://{folder}/events.sock")
        self.next = 0
        self.blocks = {}

    def close(self):
        self.socket.close(linger=0)

    def take(self, number, payload):
        assert number == self.next, "a batch was missed"
        self.next += 1
        for event in self.decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self.blocks.update(dict.fromkeys(event.block_hashes, event))
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self.blocks.pop(block, None)
            else:
                self.blocks.clear()

    def follow(self):
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv-events"
        self.take(int.from_bytes(number, "big"), payload)


@pytest.fixture
def daemon(tmp_path):
    events = {"zmq_address": f"ipc://{tmp_path}/events.sock", "zmq_replay_address": f"ipc://{tmp_path}/replay.sock"}
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path), config={"events": events}) as running:
        yield running


def commit(daemon, text):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    state = np.zeros(shortest.HEADS * shortest.DIM**2, dtype=np.float32)
    with ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, pages=64, capture_tokens=16) as cache:
        linear = [ashlar.LinearTensors(shortest.LINEAR, state)]
        outcome = cache.commit(tokens, [(len(tokens), linear)], page_table=np.arange(64, dtype=np.int32))
    assert outcome == ["kept"]
    return tokens


def test_a_router_receives_blocks_with_their_tokens(daemon, tmp_path):
    context = zmq.Context.instance()
    router = Router(context, tmp_path)
    try:
        time.sleep(0.5)  # until the subscription has arrived
        tokens = commit(daemon, TEXT)
        while len(router.blocks) < len(tokens) // 256:
            router.follow()
        chain, parent = [], None
        while block := next((b for b in router.blocks.items() if b[1].parent_block_hash == parent), None):
            parent, event = block
            assert event.block_size == 256 and event.medium == "CPU" and len(parent) == 32
            chain += event.token_ids
            router.blocks.pop(parent)
        assert chain == tokens[: len(chain)].tolist() and len(chain) == len(tokens) // 256 * 256
    finally:
        router.close()


def test_a_late_router_requests_missed_events(daemon, tmp_path):
    commit(daemon, TEXT)
    context = zmq.Context.instance()
    replay = context.socket(zmq.DEALER)  # accepts any number of answers
    replay.setsockopt(zmq.RCVTIMEO, 20_000)
    replay.connect(f"ipc://{tmp_path}/replay.sock")
    router = Router(context, tmp_path)
    try:
        while len(router.blocks) < 2:
            replay.send_multipart([b"", router.next.to_bytes(8, "big")])
            while (frames := replay.recv_multipart())[-2] != (-1).to_bytes(8, "big", signed=True):
                empty, topic, number, payload = frames
                assert (empty, topic) == (b"", b"kv-events")
                router.take(int.from_bytes(number, "big"), payload)
    finally:
        replay.close(linger=0)
        router.close()
    assert sum(block.parent_block_hash is None for block in router.blocks.values()) == 1
