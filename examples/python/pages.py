# SPDX-License-Identifier: Apache-2.0
"""Stores pages of bytes under the caller's own keys, in a private daemon: python3 examples/python/pages.py"""

import hashlib

import numpy as np

import ashlar
import ashlar.daemon

PAGE_BYTES = 1 << 20


def main() -> bool:
    page = np.random.default_rng(1).integers(0, 256, PAGE_BYTES, np.uint8)
    landed = np.zeros_like(page)
    key = hashlib.sha256(b"the tokens up to this page").digest()
    with ashlar.daemon.start(dram="256MiB") as daemon:
        client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
        store = ashlar.PageStore(
            client, model_id="m", weights_digest="w", content="kv", page_bytes=PAGE_BYTES, page_tokens=64
        )
        outcomes = store.put([key], lambda i, slot: np.copyto(slot, page))
        misses = store.get([key], lambda i, slot: np.copyto(landed, slot))
        store.close()
    print(f"{outcomes[0]}; landed: {misses[0] is None and np.array_equal(page, landed)}")
    return misses == [None] and np.array_equal(page, landed)


if __name__ == "__main__":
    main()
