#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds one violation at a time to a small clean tree: the checker must find only that one."""

import pathlib
import tempfile
import unittest

import check_layering

CLEAN = {
    "tensor/types.h": "",
    "kernels/kernels.h": '#include "tensor/types.h"\n',
    "proto/layout.h": '#include "tensor/types.h"\n',
    "kernels/host/land.cc": '#include "kernels/kernels.h"\n',
    "proto/key.h": '#include "absl/status/status.h"\n',
    "storage/cache.h": '#include "kernels/kernels.h"\n#include "proto/key.h"\n',
    "client/include/ashlar/engine.h": '#include "kernels/kernels.h"\n#include "proto/key.h"\n',
    "client/channel.cc": '#include <grpcpp/grpcpp.h>\n#include "ashlar/v1/cache.grpc.pb.h"\n',
    "daemon/service.h": '#include "ashlar/v1/config.pb.h"\n#include "storage/cache.h"\n',
    "daemon/service.cc": '#include "proto/key.h"\n#include "daemon/service.h"\n#include "ashlar/v1/cache.grpc.pb.h"\n',
    "tools/bench/main.cc": '#include "ashlar/engine.h"\n#include "storage/cache.h"\n',
    "storage/ids.h": "",
    "storage/tier/tier.h": '#include "storage/ids.h"\n',
    "storage/objects/entry.h": '#include "storage/tier/tier.h"\n',
    "storage/objects/entry_test.cc": '#include "storage/lookup/lease.h"\n',
    "storage/lookup/lease.h": '#include "storage/objects/entry.h"\n',
    "examples/rag/main.cc": '#include "ashlar/engine.h"\n',
    "examples/c/main.c": '#include "ashlar.h"\n',
    "client/c/include/ashlar.h": "",
    "tests/integration/fake.h": "",
    "tests/integration/all_test.cc": '#include "daemon/service.h"\n#include "ashlar/engine.h"\n',
}

BREACHES = [
    ("tensor/a.h", '#include "proto/key.h"', "tensor/a.h:1: includes proto/key.h: tensor/ may not depend on proto/"),
    ("kernels/a.h", '#include "proto/key.h"', "kernels/a.h:1: includes proto/key.h: kernels/ may not depend on proto/"),
    (
        "proto/a.cc",
        '#include "kernels/kernels.h"',
        "proto/a.cc:1: includes kernels/kernels.h: proto/ may not depend on kernels/",
    ),
    (
        "storage/a.cc",
        '\n# include "daemon/service.h"',
        "storage/a.cc:2: includes daemon/service.h: storage/ may not depend on daemon/",
    ),
    (
        "storage/a_test.cc",
        '#include "client/include/ashlar/engine.h"',
        "storage/a_test.cc:1: includes client/include/ashlar/engine.h: storage/ may not depend on client/",
    ),
    (
        "client/a.h",
        '#include "storage/cache.h"',
        "client/a.h:1: includes storage/cache.h: client/ may not depend on storage/",
    ),
    (
        "daemon/a.cc",
        '#include "client/include/ashlar/engine.h"',
        "daemon/a.cc:1: includes client/include/ashlar/engine.h: daemon/ may not depend on client/",
    ),
    (
        "daemon/a.cc",
        "#include <client/include/ashlar/engine.h>",
        "daemon/a.cc:1: includes client/include/ashlar/engine.h: daemon/ may not depend on client/",
    ),
    (
        "tools/a.cc",
        '#include "daemon/service.h"',
        "tools/a.cc:1: includes daemon/service.h: tools/ may not depend on daemon/",
    ),
    (
        "storage/a.cc",
        '#include "tests/integration/fake.h"',
        "storage/a.cc:1: includes tests/integration/fake.h: storage/ may not depend on tests/",
    ),
    (
        "kernels/a.cc",
        '#include "ashlar/v1/cache.pb.h"',
        "kernels/a.cc:1: includes ashlar/v1/cache.pb.h: kernels/ may not depend on proto/",
    ),
    (
        "client/a.h",
        "#include <grpcpp/grpcpp.h>",
        "client/a.h:1: header includes grpcpp/grpcpp.h: gRPC's headers belong into .cc files",
    ),
    (
        "client/a.h",
        '#include "ashlar/v1/cache.grpc.pb.h"',
        "client/a.h:1: header includes ashlar/v1/cache.grpc.pb.h: gRPC's headers belong into .cc files",
    ),
    (
        "kernels/host/a.cc",
        '#include "../kernels.h"',
        "kernels/host/a.cc:1: includes ../kernels.h: paths are rooted at the repository",
    ),
    ("storage/a.cc", '#include "cache.h"', "storage/a.cc:1: includes cache.h: paths are rooted at the repository"),
    ("storage/a.cc", '#include "storage/gone.h"', "storage/a.cc:1: includes storage/gone.h: no such file"),
    (
        "storage/util/a.h",
        "",
        "storage/util: a folder is named after what it is for, not util/",
        "storage/util: has sources and no row in check_layering.py",
    ),
    (
        "storage/tier/a.h",
        '#include "storage/objects/entry.h"',
        "storage/tier/a.h:1: includes storage/objects/entry.h: storage/tier/ may not depend on storage/objects/",
        "circle: storage/objects/ → storage/tier/ → storage/objects/",
    ),
    ("storage/ids.cc", '#include "storage/tier/tier.h"', "circle: storage/ids → storage/tier/ → storage/ids"),
    (
        "storage/new/a.h",
        '#include "storage/objects/entry.h"',
        "storage/new: has sources and no row in check_layering.py",
    ),
    ("tests/new/a.cc", "", "tests/new: has sources and no row in check_layering.py"),
    ("examples/new/a.c", "", "examples/new: has sources and no row in check_layering.py"),
    ("storage/tier/b.h", '#include "storage/new/a.h"', "storage/tier/b.h:1: includes storage/new/a.h: no such file"),
    (
        "examples/c/a.c",
        '#include "storage/cache.h"',
        "examples/c/a.c:1: includes storage/cache.h: examples/ may not depend on storage/",
    ),
    ("storage/c.cc", '#include "ashlar.h"', "storage/c.cc:1: includes ashlar.h: storage/ may not depend on client/"),
    (
        "examples/rag/a.cc",
        '#include "storage/cache.h"',
        "examples/rag/a.cc:1: includes storage/cache.h: examples/ may not depend on storage/",
    ),
    ("client/session/a.cc", '#include "ashlar/gone.h"', "client/session/a.cc:1: includes ashlar/gone.h: no such file"),
    ("common/a.h", "", "common: a folder is named after what it is for, not common/"),
]


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class CheckLayering(unittest.TestCase):
    def check(self, extra):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            write(root, {**CLEAN, **extra})
            return check_layering.check(root)

    def test_a_clean_tree_has_no_breach(self):
        self.assertEqual(self.check({}), [])

    def test_every_breach_is_found(self):
        for name, text, *expected in BREACHES:
            with self.subTest(file=name, text=text):
                self.assertEqual(self.check({name: text}), expected)


if __name__ == "__main__":
    unittest.main()
