#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Computes the test vectors of docs/formats.md only with the standard library, and prints them: a name and hexadecimal
digits per line. proto/testdata has the same values in NAME.hex; formats_page_test.py compares them."""

import hashlib
import struct


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(value)) + value


identity = (
    b"AshI"
    + struct.pack("<I", 1)
    + b"".join(map(text, ["example/hybrid-2", "sha256:00ff", "float32", "", "utf-8", ""]))
)
no_rope = struct.pack("<BIdI", 0, 0, 1.0, 0)
gdn = struct.pack("<BBIIIIIBBBII", 2, 7, 1, 2, 8, 4, 0, 1, 3, 1, 24, 4) + no_rope
rope = struct.pack("<BIdIdd", 1, 4, 1.0, 2, 1.0, 0.01)
attention = struct.pack("<BBIIIBB", 1, 1, 2, 16, 16, 1, 0) + rope + struct.pack("<B", 1)
layout = b"AshL" + struct.pack("<IIIII", 1, 16, 8, 4, 2) + gdn + attention
namespace = hashlib.sha256(b"ashlar/namespace/1" + text("default") + text(identity) + text(layout)).digest()


def key(kind, tokens, media=()):
    data = struct.pack("<BB", 1, kind) + namespace + struct.pack(f"<Q{len(tokens)}i", len(tokens), *tokens)
    data += struct.pack("<Q", len(media)) + b"".join(struct.pack("<Q", at) + digest for at, digest in media)
    return hashlib.sha256(data).digest()


tokens = [1, 2, 3, -1, 2147483647]
print("identity", identity.hex())
print("layout", layout.hex())
print("namespace", namespace.hex())
print("key_segment", key(1, tokens).hex())
print("key_checkpoint_media", key(3, tokens, [(2, bytes(range(32)))]).hex())


def chained(kind, before, tokens, media=()):
    data = struct.pack("<BB", 2, kind) + namespace + before + struct.pack(f"<Q{len(tokens)}i", len(tokens), *tokens)
    if media:
        data += struct.pack("<Q", len(media)) + b"".join(struct.pack("<Q", at) + digest for at, digest in media)
    return hashlib.sha256(data).digest()


block = chained(2, bytes(32), range(256))
print("key_prefix_block", block.hex())
print("key_prefix_checkpoint", chained(3, block, tokens).hex())
print("key_prefix_span", chained(4, chained(3, block, tokens[:2]), tokens[2:]).hex())
print(
    "key_own_checkpoint",
    chained(3, hashlib.sha256(struct.pack("<BB", 2, 0) + namespace + bytes(range(16))).digest(), tokens).hex(),
)
image = bytes(range(32))
block = chained(2, bytes(32), range(256), [(2, image)])
print("key_prefix_block_media", block.hex())
print("key_prefix_checkpoint_media", chained(3, block, tokens, [(1, image)]).hex())

salt = hashlib.sha256(b"ashlar/salt/1" + b"user 7").digest()
print("salt", salt.hex())
namespace = hashlib.sha256(struct.pack("<B", 3) + namespace + salt).digest()  # namespace of all keys below
print("key_segment_salt", key(1, [1, 2, 3, -1, 2147483647]).hex())
block = chained(2, bytes(32), range(256))
print("key_prefix_checkpoint_salt", chained(3, block, tokens).hex())

opaque = struct.pack("<BIQ", 3, 48, 100_000) + struct.pack("<BIQ", 3, 0, 6)
own = struct.pack("<BB", 0, 1)  # the gdn layer's fields of version 2, because it has none of its own
print("layout_opaque", (b"AshL" + struct.pack("<IIIII", 3, 16, 8, 4, 4) + gdn + own + attention + opaque).hex())
tails = struct.pack("<BB", 3, 2)  # conv_dtype bf16, [conv_channels, conv_kernel - 1]
print("layout_tails", (b"AshL" + struct.pack("<IIIII", 2, 16, 8, 4, 2) + gdn + tails + attention).hex())
