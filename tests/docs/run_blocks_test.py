#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds one wrong block at a time to a small tree of right ones, with scripts instead of the programs: run_blocks must
find it."""

import pathlib
import tempfile
import unittest

import page_blocks
import run_blocks

PROGRAMS = {
    # Accepts any configuration except one with a field `wrong`; runs until it is killed.
    "ashlard": """#!/bin/bash
[[ "$1" == --help ]] && { echo "--config FILE"; exit 0; }
if grep -q wrong "$2"; then echo "wrong: unknown field" >&2; exit 2; fi
grep -q ^listen "$2" && grep -q ^dram "$2" || exit 3
[[ "$3" == --check-config ]] && exit 0
touch "$(grep -o '/[^ ]*/rpc.sock' "$2")"
echo "daemon started"
sleep 600
""",
    "ashlarctl": """#!/bin/bash
[[ "$1" == --help ]] && { echo "stats  --json"; exit 0; }
[[ -e "$(dirname "$ASHLAR_ADMIN_SOCKET")/rpc.sock" ]] || { echo "no daemon" >&2; exit 1; }
echo "up 3 s: 7 objects"
echo "tenant default"
""",
    "some_test": """#!/bin/bash
[[ "$2" == *Known* ]] && printf 'Some.\\n  Known\\n'
exit 0
""",
}
RULES = """# pattern | checks | reason
tools/slow* | options of `tools/slow` | long
*some_test --gtest_filter=* | cases | long
cmake --preset * | presets | long
tests/long.py | script `tests/long_test.py` | long
tests/longer.py * | script `tests/long_test.py::test_the_same_in_little` | long
"""
PAGE = """# Page

```yaml ashlard.yaml
dram: {capacity_bytes: 1GiB}
```

```console
$ ashlard --config ashlard.yaml &
daemon started
$ ashlarctl stats
up …: 7 objects
…
$ test -e /run/ashlar/rpc.sock && echo "here: /run/ashlar/rpc.sock"
here: /run/ashlar/rpc.sock
$ cd tools && ls \\
    slow
slow
```

```sh
# changes nothing
tools/slow --all   # for hours
SEEDS=1 build/release/bin/some_test --gtest_filter='*Known*'
cmake --preset release
```

```python
print(1)
```

```cpp
#include "ashlar/engine.h"
int main() { return Answer(); }
```

```cpp
const int answer = Answer();
(void)answer;
```

```cpp client/include/ashlar/engine.h
int Answer();
// …
int Question();
```

```c
int main(void) { return sizeof(int); }
```

```cmake client/CMakeLists.txt
add_library(client)
```

```python tools/ask.py
print("ask")
```

```text
the prompt's tokens
```

```json
{"tokens": 1}
```

```sh
tests/long.py
tests/longer.py --all
```
"""
CLEAN = {
    "README.md": PAGE,
    "docs/other.md": "No blocks here, but `code`.\n",
    "tests/docs/command_checks.txt": RULES,
    "tools/slow": "#!/bin/bash\necho 'slow [--all]'\n",
    "client/include/ashlar/engine.h": "namespace ashlar::engine {}\nint Answer();\n\nint Third();\nint Question();\n",
    "client/CMakeLists.txt": "# The client.\nadd_library(client)\n",
    "tools/ask.py": 'import os\n\nif os:\n    print("ask")\n',
    "tests/long_test.py": "def test_the_same_in_little():\n    pass\n",
    "CMakePresets.json": '{"configurePresets": [{"name": "release"}], "buildPresets": [], "testPresets": []}',
}

BLOCKS = sum(line.startswith("```") and line not in ("```", "```text") for line in PAGE.splitlines())

# Each planted error: the old and the new words, and the beginning of the message.
WRONG = [
    ("up …: 7 objects", "up …: 8 objects", "README.md:10: ashlarctl stats: does not print what the page shows"),
    ("…\n$ test", "$ test", "README.md:10: ashlarctl stats: does not print"),
    ("ashlarctl stats", "ashlarctl --nonsense && false", "README.md:10: ashlarctl --nonsense && false: status 1"),
    ("dram: {", "wrong: {", "README.md:4: ashlard --config ashlard.yaml --check-config >/dev/null: status 2"),
    (
        "$ ashlard --config ashlard.yaml &\ndaemon started\n",
        "$ true\n",
        "README.md:9: ashlarctl stats: status 1: no daemon",
    ),
    ("ashlard.yaml &\n", "wrong.yaml &\n", "README.md:8: ashlard --config wrong.yaml &: status ended"),
    ("slow --all", "slow --none", "README.md:22: tools/slow knows no --none"),
    ("*Known*", "*Unknown*", "README.md:23: build/release/bin/some_test: no such cases"),
    ("--preset release", "--preset debug", "README.md:24: debug: no such preset among configurePresets"),
    ("print(1)", "print(x)", "README.md:28: python3 block"),
    ("return Answer()", "return Anser()", "README.md:32: does not compile"),
    ("answer = Answer", "answer = Anser", "README.md:37: does not compile"),
    ("int Question();", "int Questions();", "README.md:42: client/include/ashlar/engine.h does not have these lines"),
    ("```cpp client/include/ashlar/engine.h", "```cpp client/gone.h", "README.md:42: client/gone.h: no such file"),
    ("sizeof(int)", "sizeof(Int)", "README.md:48: does not compile"),
    ("```cmake client/CMakeLists.txt", "```cmake", "README.md:52: cmake: no such file to be cut out of"),
    ('print("ask")', 'print("asked")', "README.md:56: tools/ask.py does not have these lines"),
    ("```text", "```", "README.md:60: language '' says not"),
    ("```text", "```bsah", "README.md:60: language 'bsah' says not"),
    ("```python", "  ```python", "README.md: a fence is indented, or has no partner"),
    ("```console\n$ ashlard --config", "```console\nashlard --config", "README.md:8: output before the first command"),
    ("the prompt's tokens", "$ false", "README.md:60: a command in a block of text"),
    ("the prompt's tokens", "tokens\nA=1 cmake --build .", "README.md:61: a command in a block of text"),
    ('{"tokens": 1}', "{tokens: 1}", "README.md:64: is no JSON"),
    ("tools/slow --all   # for hours\n", "", "tests/docs/command_checks.txt: no page has a command like tools/slow*"),
]


class RunBlocksTest(unittest.TestCase):
    def check(self, tree, programs=PROGRAMS, compiler="c++"):
        with tempfile.TemporaryDirectory() as folder:
            root, binaries = pathlib.Path(folder, "root"), pathlib.Path(folder, "bin")
            files = {root / path: text for path, text in tree.items()}
            files.update({binaries / name: text for name, text in programs.items()})
            for file, text in files.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
                file.chmod(0o755)
            binaries.mkdir(exist_ok=True)
            self.runner = run_blocks.Runner(root, binaries, compiler)
            return run_blocks.check(root, binaries, compiler, runner=self.runner)

    def counts(self):
        """Numbers of blocks, wrong ones, and those that were not tried completely."""
        return tuple(sum(column) for column in zip(*self.runner.tally))

    def test_correct_blocks_pass(self):
        self.assertEqual(self.check(CLEAN), ([], []))
        self.assertEqual(self.counts(), (BLOCKS, 0, 0))

    def test_each_wrong_block_is_found(self):
        for right, planted, expected in WRONG:
            with self.subTest(expected):
                self.assertIn(right, PAGE)
                compiler = "c++" if "compile" in expected else "true"  # which accepts anything at once
                wrong, _ = self.check({**CLEAN, "README.md": PAGE.replace(right, planted, 1)}, compiler=compiler)
                self.assertTrue(any(line.startswith(expected) for line in wrong), wrong)

    def test_what_is_not_built_is_skipped_with_a_reason(self):
        wrong, skipped = self.check(CLEAN, {})
        self.assertEqual(wrong, [])
        self.assertEqual(skipped, ["README.md:23: some_test is not built", "README.md:4: ashlard is not built"])
        # A page's commands depend on each other: if one cannot be run, none of the page's blocks count as tried.
        self.assertEqual(self.counts(), (BLOCKS, 0, 4))
        self.check({**CLEAN, "README.md": PAGE.replace("print(1)", "print(x)", 1)}, compiler="true")
        self.assertEqual(self.counts(), (BLOCKS, 1, 0))

    def test_a_test_of_engines_is_looked_up_by_file_and_name(self):
        page, rule = (
            "```sh\npython3 ask.py\n```\n",
            "python3 ask.py | engines `vllm/test_ask.py::test_it_asks` | torch\n",
        )
        tree = {"README.md": page, "tests/docs/command_checks.txt": rule}
        file = "client/python/tests/engines/vllm/test_ask.py"
        self.assertEqual(self.check({**tree, file: "def test_it_asks(daemon):\n    pass\n"}), ([], []))
        for other in ({}, {file: "def test_it_asks_not(daemon):\n    pass\n"}):
            wrong, _ = self.check({**tree, **other})
            self.assertEqual(wrong, [f"README.md:2: {file}::test_it_asks: no such test"])

    def test_a_script_is_looked_up_by_file_and_name(self):
        for there, missing in (
            ("def test_another():\n", "tests/long_test.py::test_the_same_in_little"),
            (None, "tests/long_test.py"),
        ):
            tree = {path: text for path, text in CLEAN.items() if path != "tests/long_test.py"}
            wrong, _ = self.check({**tree, **({"tests/long_test.py": there} if there else {})}, compiler="true")
            self.assertTrue(any(line.endswith(f"{missing}: no such test") for line in wrong), wrong)

    def test_a_command_that_does_not_end_is_wrong(self):
        patience, run_blocks.SECONDS = run_blocks.SECONDS, 1
        try:
            wrong, _ = self.check({"README.md": "```sh\ntrue\nsleep 600\ntrue\n```\n"})
        finally:
            run_blocks.SECONDS = patience
        self.assertEqual([line.partition(" ")[0] for line in wrong], ["README.md:3:", "README.md:4:"])

    def test_ellipses_stand_for_text_of_a_line_or_for_lines(self):
        for shown, printed, right in [
            ("a … c", "a b c", True),
            ("a … c", "a\nc", False),
            ("a\n…\nb", "a\n1\n2\nb", True),
            ("a\n…\nb", "a\nb", True),
            ("a", "a\n", True),
            ("a", "b\na\n", False),
            ("(1.5)", "(1x5)", False),
        ]:
            with self.subTest(shown=shown, printed=printed):
                self.assertEqual(page_blocks.shows(shown, printed), right)


if __name__ == "__main__":
    unittest.main()
