#!/usr/bin/env python3
"""Plants one breach at a time into a small clean tree: the checker must find that one and nothing else."""

import pathlib
import tempfile
import unittest

import check_house

WALK = """# Architecture

## The walk of one request through the code

| hop | file | why there |
|---|---|---|
| ask | `examples/rag/serving.cc`, `client/calls/land.cc` | the engine's side |

Libraries: `docs/libraries.md`.
"""
ROOMS = ("client/c", "daemon", "daemon/peer", "kernels/cuda", "storage", "tools")
CLEAN = {
    "CMakeLists.txt": "\n".join(f"{room}/x.cc" for room in ROOMS),
    "CONTRIBUTING.md": "\n".join(f"`{room}/`" for room in ROOMS),
    "storage/README.md": "`tier/` has tiers, `testing/` fakes",
    "storage/tier/CMakeLists.txt": "",
    "README.md": "line\n" * 80,
    "docs/architecture.md": WALK,
    "storage/cache.cc": "// The façade. What it finds is leased.\n" + "\n" * 449,
    "storage/cache_test.cc": "// Who asks, waits.\n" * 40,
    "storage/testdata/long.py": "\n" * 451,
    "storage/golden.hex": "00\n" * 451,
    "tools/ashlar": "no script\n" * 451,
    **{f"storage/f{i}.h": "" for i in range(15)},
    "build/release/generated.cc": "\n" * 451,
}

BREACHES = [
    ("README.md", "line\n" * 81, "README.md: 81 lines, 80 at most"),
    *[(path, "\n" * 451, f"{path}: 451 lines, 450 at most")
      for path in ("daemon/a.cc", "client/c/a.c", "kernels/cuda/a.cu", "client/python/ashlar/a.py", "proto/a.proto",
                   "cmake/A.cmake", "tools/CMakeLists.txt", "storage/tier/a_test.cc")],
    ("tools/demo", "#!/bin/sh\n" + "\n" * 450, "tools/demo: 451 lines, 450 at most"),
    ("daemon/elsewhere/a.h", "", "daemon/elsewhere: no README above it names it"),
    ("storage/elsewhere/a.h", "", "storage/elsewhere: no README above it names it"),
    ("storage/tier/testing/a.cc", "", "storage/tier/testing: no CMakeLists.txt, and none above it names its sources"),
    ("storage/one_more.cc", "", "storage: 17 source files lie loose, 16 at most"),
    *[(path, line, "41 comments open with What, Who or Whose, 40 at most: "
       + " ".join([*(f"storage/cache_test.cc:{i}" for i in range(1, 41)), f"{path}:1"]))
      for path, line in (("tools/a.cc", "  // What follows is long.\n"), ("tools/a.py", "# Whose is it?\n"),
                         ("tools/b.py", '"""Who knows."""\n'),
                         ("tools/a.h", "/// Who knows.\n"), ("tools/a.c", " * What else.\n"))],
    ("docs/architecture.md", "# Architecture\n", "docs/architecture.md: no walk of one request"),
    ("docs/architecture.md", WALK.replace("the engine's side", " "),
     "docs/architecture.md: the walk names examples/rag/serving.cc without a reason"),
    ("docs/architecture.md", WALK.replace("\nLib", "".join(f"| | `a/b{i}.cc` | why |\n" for i in range(39)) + "\nLib"),
     "docs/architecture.md: the walk names 41 files, 40 at most"),
]


class CheckHouse(unittest.TestCase):
    def check(self, extra):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**CLEAN, **extra}.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return check_house.check(root)

    def test_a_clean_tree_has_no_breach(self):
        self.assertEqual(self.check({}), [])

    def test_every_breach_is_found(self):
        for name, text, expected in BREACHES:
            with self.subTest(file=name, expected=expected):
                self.assertEqual(self.check({name: text}), [expected])


if __name__ == "__main__":
    unittest.main()
