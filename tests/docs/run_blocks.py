#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the code blocks of docs/, CONTRIBUTING.md and every README.md. Prints every block that is wrong.

The first word after a block's fence selects the check. A block of another language, or of none, is an error.

  console        lines that begin with `$ ` are run; the lines after them must be the output
  sh             every line is run
  yaml           `ashlard --check-config` accepts it; missing `listen` and `dram` are added
  python         it is run
  cpp, c         it compiles; C++ without an #include is a function's body after ashlar/engine.h
  cmake, proto   it is part of the file named after the fence
  json           it is JSON
  text, mermaid  none; a line of text must not be a command

- A second word is a file. A block in cpp, c, python, cmake or proto must be lines of that file, in order; a lone `…`
  (`// …`, `# …`) stands for omitted lines. A configuration, or a Python program outside the tree, is saved under that
  name.
- A page's commands run in one shell, in order, with their own /run/ashlar, /var/lib/ashlar and ports.
- In output, `…` stands for any text of its line or, alone on a line, for any lines.
- command_checks.txt lists the commands that are checked in a cheaper way. A line of it without a command is wrong.

usage: run_blocks.py --root ROOT --bin FOLDER [--compiler CXX] [PAGE...]

FOLDER has the programs that were built: the build's bin. Exits with 77 if something could not be run, and nothing was
wrong.
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import page_blocks
from page_blocks import Command

SKIPPED = 77
SECONDS = 240  # limit for all commands of a page, and for any other program; a quiet machine needs a tenth
RULES = "tests/docs/command_checks.txt"
OTHERS = {"curl", "etcd"}  # programs that need not be installed
STARTED = "daemon started|ready to serve client requests"  # log line of a daemon, or of etcd, that is ready
PORTS = (9464, 9465, 2379, 2380, 7461, 7462, 7471, 7472)  # ports on pages; each run replaces them
# For a configuration of which a page shows only a part.
LISTEN = "listen: {rpc_socket: /run/ashlar/rpc.sock, session_socket: /run/ashlar/session.sock}\n"
DRAM = "dram: {capacity_bytes: 16GiB}\n"


class Skip(Exception):
    """A requirement that is missing on this machine."""


class Wrong(Exception):
    """An error of a block."""


def rules(text):
    """Returns the commands that are not run: [(pattern, [(how, of what)])]."""
    found = []
    for row in re.findall(r"^([^|#\n][^|\n]*) \| ([^|\n]*) \| [^|\n]+$", text, re.M):
        checks = [tuple(check) for check in re.findall(r"(\w+)(?: of)? `([^`]+)`|(presets|cases)", row[1])]
        found.append((row[0], [(how or alone, what) for how, what, alone in checks]))
    return found


class Sandbox:
    """A folder that looks like the root of a built checkout, with its own paths for a daemon."""

    def __init__(self, root, programs):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="docs"))
        for entry in root.iterdir():
            if entry.name not in {"build", ".git"}:
                (self.path / entry.name).symlink_to(entry)
        (self.path / "build/release").mkdir(parents=True)
        (self.path / "build/release/bin").symlink_to(programs)
        log = programs.parent / ".ninja_log"
        (self.path / "build/release/.ninja_log").write_bytes(log.read_bytes() if log.exists() else b"")
        for name in ("run", "disk"):
            (self.path / name).mkdir(mode=0o700)
        self.places = {"/run/ashlar": str(self.path / "run"), "/var/lib/ashlar": str(self.path / "disk")}
        with contextlib.ExitStack() as until_all_are_chosen:
            for port in PORTS:
                free = until_all_are_chosen.enter_context(socket.socket())
                free.bind(("127.0.0.1", 0))
                self.places[f":{port}"] = f":{free.getsockname()[1]}"
        self.environment = {
            **os.environ,
            "HOME": str(self.path),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ASHLAR_ADMIN_SOCKET": str(self.path / "run/admin.sock"),
        }

    def inside(self, text):
        for outer, inner in self.places.items():
            text = text.replace(outer, inner)
        return text

    def outside(self, text):
        for outer, inner in self.places.items():
            text = text.replace(inner, outer)
        return text

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)


class Runner:
    def __init__(self, root, programs, compiler="c++"):
        self.root, self.programs, self.compiler = root.resolve(), programs.resolve(), compiler
        table = self.root / RULES
        self.rules = rules(table.read_text(encoding="utf-8")) if table.exists() else []
        self.used = set()
        self.tests = None
        self.tally = []  # per page: its blocks, the wrong ones, and those that were not tried completely

    def page(self, page):
        """Returns (wrong, skipped), lines "page:line: what"."""
        wrong, skipped = [], []
        owners, not_tried = {}, set()  # blocks by the lines that they contain

        def judge(place, check, *arguments):
            try:
                check(*arguments)
            except Wrong as error:
                wrong.append(f"{place.page}:{place.line}: {error}")
            except subprocess.TimeoutExpired as error:
                wrong.append(f"{place.page}:{place.line}: {error}")
            except Skip as reason:
                skipped.append(f"{place.page}:{place.line}: {reason}")

        session = []
        try:
            found = page_blocks.blocks(page, (self.root / page).read_text(encoding="utf-8"))
            commands = {
                block.line: page_blocks.commands(block) for block in found if block.language in page_blocks.SHELL
            }
        except ValueError as error:
            return [str(error)], []
        for block in found:
            if block.language in page_blocks.PLAIN:
                command = page_blocks.COMMAND.search(block.text) if block.language == "text" else None
                if command is not None:
                    line = block.line + block.text.count("\n", 0, command.start())
                    wrong.append(f"{block.page}:{line}: a command in a block of text, which nothing runs")
                    owners[line] = block.line
                continue
            owners[block.line] = block.line
            owners.update({command.line: block.line for command in commands.get(block.line, ())})
            if block.language in page_blocks.SHELL:
                for command in commands[block.line]:
                    rule = self.rule(command)
                    if rule is None:
                        session.append(command)
                    else:
                        judge(command, self.check_instead, command, rule)
            elif self.is_cut_out(block):
                judge(block, self.check_cut, block)
            elif block.language in {"cpp", "c"}:
                judge(block, self.compile, block)
            elif block.language == "json":
                judge(block, self.parse, block)
            elif block.language in {"yaml", "python"}:
                session.append(self.file_of(block, len(session)))
            else:
                wrong.append(f"{block.page}:{block.line}: language '{block.language}' says not what to do")
        # A page's commands build on each other: all of them are run, or none.
        for command in session:
            judge(command, self.look_for_programs, command)
            if skipped and skipped[-1].startswith(f"{command.page}:{command.line}:"):
                not_tried = {owners[each.line] for each in session}
                session = []
                break
        if session:
            for command, status, printed in self.run(session):
                judge(command, self.check_run, command, status, printed)
        bad, not_run = ({owners[int(line.split(":")[1])] for line in lines} for lines in (wrong, skipped))
        self.tally.append((len(set(owners.values())), len(bad), len((not_run | not_tried) - bad)))
        return wrong, skipped

    # --- commands ---

    def rule(self, command):
        for pattern, checks in self.rules:
            if fnmatch.fnmatchcase(page_blocks.bare(command.text), pattern):
                self.used.add(pattern)
                return checks
        return None

    def look_for_programs(self, command):
        for word in re.findall(r"[\w./-]+", command.text):
            name = pathlib.PurePath(word).name
            ours = word.startswith("build/release/bin/") or name in {"ashlard", "ashlarctl"}
            if ours and not (self.programs / name).exists():
                raise Skip(f"{name} is not built")
            if word in OTHERS and shutil.which(word) is None:
                raise Skip(f"{word} is not installed")

    def file_of(self, block, number):
        """Returns the command that checks a configuration or a program."""
        suffix = {"yaml": "yaml", "python": "py"}[block.language]
        name = pathlib.Path(block.name or f"block{number}.{suffix}")
        content = block.text
        if block.language == "yaml":
            for field, default in (("listen", LISTEN), ("dram", DRAM)):
                if not re.search(rf"^{field}:", content, re.M):
                    content = default + content
            run = f"ashlard --config {name} --check-config >/dev/null"
        else:
            run = f"python3 {name} >/dev/null"
        return Command(block.page, block.line, run, file=name, content=content)

    def run(self, session):
        """Runs a page's commands in one shell, in order. Yields (command, exit status or None, output)."""
        sandbox = Sandbox(self.root, self.programs)
        try:
            script = []
            for i, command in enumerate(session):
                text = sandbox.inside(command.text)
                if command.file is not None:
                    (sandbox.path / command.file).write_text(sandbox.inside(command.content), encoding="utf-8")
                    text = f"(cd {sandbox.path}; {text})"
                printed, status = sandbox.path / f".printed{i}", sandbox.path / f".status{i}"
                script.append(f"{{ {text}\n}} >{printed} 2>&1 </dev/null; echo $? >{status}")
                if page_blocks.bare(command.text).endswith("&"):
                    script.append(
                        f"for _ in $(seq 200); do grep -qE '{STARTED}' {printed} && break; "
                        f"kill -0 $! 2>/dev/null || {{ echo ended >{status}; break; }}; sleep 0.05; done"
                    )
            shell = subprocess.Popen(
                ["bash", "-c", "\n".join(script)], cwd=sandbox.path, env=sandbox.environment, start_new_session=True
            )
            try:
                shell.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(shell.pid, signal.SIGKILL)  # also background processes
            except ProcessLookupError:
                pass
            shell.wait()
            for i, command in enumerate(session):
                status, printed = (sandbox.path / f".{name}{i}" for name in ("status", "printed"))
                yield (
                    command,
                    status.read_text().strip() if status.exists() else None,
                    sandbox.outside(printed.read_text(errors="replace")) if printed.exists() else "",
                )
        finally:
            sandbox.remove()

    def check_run(self, command, status, printed):
        if status is None:
            raise Wrong(f"{command.text}: did not end, or a command before it did not, in {SECONDS} s")
        if status != "0":
            raise Wrong(f"{command.text}: status {status}: {printed.strip()}")
        if command.output and not page_blocks.shows(command.output, printed):
            raise Wrong(f"{command.text}: does not print what the page shows, but:\n{printed}")

    # --- commands that are checked in another way ---

    def check_instead(self, command, checks):
        words = shlex.split(page_blocks.bare(command.text))
        for how, what in checks:
            {
                "options": self.check_options,
                "cases": self.check_cases,
                "presets": self.check_presets,
                "test": self.check_test,
                "engines": self.check_engines,
                "script": self.check_script,
            }[how](words, what)

    def program(self, path):
        built = path.startswith("build/release/bin/")
        found = self.programs / pathlib.PurePath(path).name if built else self.root / path
        if not found.exists():
            if built:
                raise Skip(f"{found.name} is not built")
            raise Wrong(f"{path}: no such program")
        return found

    def check_options(self, words, path):
        """Checks that the help of a program lists the options of a command, and its first word if that is not an
        option."""
        asked = subprocess.run([self.program(path), "--help"], capture_output=True, text=True, timeout=SECONDS)
        if asked.returncode != 0:
            raise Wrong(f"{path} --help: status {asked.returncode}")
        at = next(i for i, word in enumerate(words) if "=" not in word)
        wanted = [word.partition("=")[0] for word in words[at + 1 :] if word.startswith("--")]
        help_text = asked.stdout

        def names(word):
            return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", help_text)

        if at + 1 < len(words) and re.fullmatch(r"[a-z]+", words[at + 1]):
            wanted.append(words[at + 1])
            if not all(names(word) for word in wanted) and names(words[at + 1]):  # a subcommand has its own help
                asked = subprocess.run(
                    [self.program(path), words[at + 1], "--help"], capture_output=True, text=True, timeout=SECONDS
                )
                help_text += asked.stdout if asked.returncode == 0 else ""
        for word in wanted:
            if not names(word):
                raise Wrong(f"{path} knows no {word}")

    def check_cases(self, words, _):
        """Checks that a test program has cases for the filter that a command gives it."""
        program = next(word for word in words if "=" not in word)
        listed = subprocess.run(
            [self.program(program), "--gtest_list_tests", *words[words.index(program) + 1 :]],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if listed.returncode != 0 or not re.search(r"^  \w", listed.stdout, re.M):
            raise Wrong(f"{program}: no such cases")

    def check_presets(self, words, _):
        presets = json.loads((self.root / "CMakePresets.json").read_text(encoding="utf-8"))
        program = next(word for word in words if "=" not in word)
        kind = {"cmake": "configurePresets", "ctest": "testPresets"}[program]
        kind = "buildPresets" if "--build" in words else kind
        name = words[words.index("--preset") + 1]
        if name not in {preset["name"] for preset in presets[kind]}:
            raise Wrong(f"{name}: no such preset among {kind}")

    def check_test(self, _, name):
        if self.tests is None:
            if not (self.programs.parent / "CTestTestfile.cmake").exists():
                raise Skip(f"{name} is looked up where tests are configured")
            listed = subprocess.run(["ctest", "--test-dir", self.programs.parent, "-N"], capture_output=True, text=True)
            self.tests = set(re.findall(r"Test +#\d+: (\S+)", listed.stdout))
        if name not in self.tests:
            raise Wrong(f"{name}: no such test")

    def check_engines(self, _, name):
        """A test of `tools/test --engines`, FILE::FUNCTION."""
        self.check_script(_, f"client/python/tests/engines/{name}")

    def check_script(self, _, name):
        """Checks a test in Python: FILE::FUNCTION, or FILE alone if the file is one test."""
        file, _, function = name.partition("::")
        found = self.root / file
        if not found.is_file() or not re.search(
            rf"^ *def {re.escape(function)}\(" if function else "", found.read_text(encoding="utf-8"), re.M
        ):
            raise Wrong(f"{name}: no such test")

    # --- programs ---

    def is_cut_out(self, block):
        """Returns whether a block shows a part of a source file, which is built or run with the rest."""
        if block.language == "python":
            return bool(block.name) and (self.root / block.name).is_file()
        return block.language in page_blocks.CUT and (bool(block.name) or block.language in {"cmake", "proto"})

    def check_cut(self, block):
        source = self.root / block.name
        if not block.name or not source.is_file():
            raise Wrong(f"{block.name or block.language}: no such file to be cut out of")
        if not page_blocks.is_cut_out_of(block.text, source.read_text(encoding="utf-8")):
            raise Wrong(f"{block.name} does not have these lines")

    def parse(self, block):
        try:
            json.loads(block.text)
        except ValueError as error:
            raise Wrong(f"is no JSON: {error}") from error

    def compile(self, block):
        text, language, standard = block.text, "c++", "-std=c++20"
        if block.language == "c":
            language, standard = "c", "-std=c11"
        elif "#include" not in text:
            text = '#include "ashlar/engine.h"\nusing namespace ashlar::engine;\nvoid Fragment() {\n' + text + "}\n"
        includes = [f"-I{self.root}", f"-I{self.root}/client/include"]
        compiled = subprocess.run(
            [self.compiler, "-x", language, standard, "-fsyntax-only", *includes, "-"],
            input=text,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if compiled.returncode != 0:
            raise Wrong(f"does not compile: {compiled.stderr.strip()}")


def check(root, programs, compiler="c++", only=(), runner=None):
    """Returns (wrong, skipped) of all pages."""
    runner = runner or Runner(root, programs, compiler)
    pages = [page for page in page_blocks.pages(root) if not only or str(page) in only]
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as workers:
        results = list(workers.map(runner.page, pages))
    wrong = [line for page, _ in results for line in page]
    if not only:
        wrong += [
            f"{RULES}: no page has a command like {pattern}"
            for pattern, _ in runner.rules
            if pattern not in runner.used
        ]
    return wrong, [line for _, page in results for line in page]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--compiler", default="c++")
    parser.add_argument(
        "--count", action="store_true", help="also print how many blocks there are, are wrong, were not tried whole"
    )
    parser.add_argument("pages", nargs="*")
    arguments = parser.parse_args()
    runner = Runner(arguments.root, arguments.bin, arguments.compiler)
    wrong, skipped = check(arguments.root, arguments.bin, arguments.compiler, arguments.pages, runner)
    for line in wrong:
        print(line)
    for line in skipped:
        print("skipped:", line)
    if arguments.count:
        print("blocks: {}, wrong: {}, not tried whole: {}".format(*(sum(column) for column in zip(*runner.tally))))
    if not wrong and not skipped:
        print("every block does what its page says")
    return 1 if wrong else SKIPPED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
