# SPDX-License-Identifier: Apache-2.0
"""ashlar-eval: figures by way, for a hybrid and for a plain model."""

import io
import json
import os
import pathlib
import re
import shutil
import string
import subprocess
import sys
import tempfile
import weakref

import pytest
import tiny_transformers as tiny
import tokenizers
import torch
import transformers

from ashlar import evaluate as evaluation
from ashlar.transformers import calls
from ashlar.transformers.assembly import Assembler

ROOT = pathlib.Path(__file__).resolve().parents[5]
TEXTS = ["".join(string.ascii_lowercase[(i * j) % 26] for i in range(80)) for j in (3, 5, 7)]
PROMPTS = [
    {"segments": TEXTS, "question": "which letters", "answers": ["abc", "def"]},
    {"segments": TEXTS[::-1], "question": "and now"},
]


def tokenizer():
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(TEXTS, vocab_size=256)  # letters alone
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer)
    found.chat_template = "{% for each in messages %}[{{ each.role }}] {{ each.content }} [assistant] {% endfor %}"
    return found


def written(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("family, stored", [("llama", "float32"), ("qwen3_next", "float16"), ("gemma3", "float16")])
def test_the_program_writes_all_figures_of_all_ways(family, stored, tmp_path, capsys):
    tiny.build(family).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    prompts, file = written(tmp_path, *PROMPTS), tmp_path / "figures.json"
    arguments = (
        f"--model {tmp_path} --prompts {prompts} --json {file} --chat --widths 0,16 --answer-tokens 4 --dram 64MiB"
        f" --segment-dtype {stored}"
    )
    evaluation.main(arguments.split())
    printed, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert (figures["dtype"], figures["segment_dtype"]) == ("float32", stored)
    rows = {row["way"]: row for row in figures["ways"]}
    assert list(rows) == ["full", "composed 0", "composed 16", "naive", "keys", "prefix"]
    assert all(name in printed for name in (*rows, *evaluation.METRICS))
    for row in rows.values():
        for metric in evaluation.METRICS:
            assert row[metric]["low"] <= row[metric]["mean"] <= row[metric]["high"]
    assert rows["full"]["kl"]["mean"] == 0 < rows["prefix"]["kl"]["mean"] < 1e-9, "measured, and exact but for rounding"
    assert rows["full"]["agreement"]["mean"] == rows["prefix"]["agreement"]["mean"] == 1
    assert rows["composed 0"]["kl"]["mean"] > rows["composed 16"]["kl"]["mean"] > 1e-7
    assert (
        rows["full"]["reused"]["mean"] == 0 < rows["prefix"]["reused"]["mean"] < rows["composed 16"]["reused"]["mean"]
    )
    if family != "qwen3_next":
        assert rows["keys"]["kl"] == rows["naive"]["kl"] == rows["composed 0"]["kl"], "equal without linear layers"
    else:
        assert rows["composed 0"]["seam_head"] == 3, "the convolution's inputs are recomputed"
        assert rows["keys"]["kl"]["mean"] > rows["naive"]["kl"]["mean"] > rows["composed 0"]["kl"]["mean"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":2: .*expected a JSON object"),
        ([], ":2: list; expected a JSON object"),
        (b"\xff", ":2: .*can't decode byte 0xff.*expected a JSON object"),
        ("[" * 100000, ":2: .*expected a JSON object"),
        ({"question": "a"}, ":2: segments: missing; expected a list of at least one text"),
        ({"segments": [], "question": "a"}, ":2: segments: empty; expected a list of at least one text"),
        ({"segments": "a", "question": "a"}, ":2: segments: str; expected a list of at least one text"),
        ({"segments": ["a", 7], "question": "a"}, r":2: segments\[1\]: int; expected a text"),
        ({"segments": ["a", ""], "question": "a"}, r":2: segments\[1\]: empty; expected a text"),
        (
            {"segments": ["a", "\ud800"], "question": "a"},
            r":2: segments\[1\]: half of a surrogate pair; expected a text",
        ),
        ({"segments": ["a"]}, ":2: question: missing; expected a text"),
        ({"segments": ["a"], "question": ""}, ":2: question: empty; expected a text"),
        ({"segments": ["a"], "question": None}, ":2: question: NoneType; expected a text"),
        ({"segments": ["a"], "question": "a", "answers": "b"}, ":2: answers: str; expected a list of texts"),
        ({"segments": ["a"], "question": "a", "answers": [[]]}, r":2: answers\[0\]: list; expected a text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = written(tmp_path, PROMPTS[0], "" if isinstance(line, bytes) else line)
    if isinstance(line, bytes):
        path.write_bytes(path.read_bytes() + line)
    with pytest.raises(evaluation.BadInput, match=message):
        evaluation.read_prompts(path, tokenizer(), chat=False, limit=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer, whose model takes at most 600 tokens."""
    path, model = tmp_path_factory.mktemp("checkpoint"), tiny.build("llama")
    model.config.max_position_embeddings = 600
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def evaluated(tmp_path, model, *options):
    """Runs the program with few tokens, and returns its figures and their rows by way."""
    file = tmp_path / "figures.json"
    prompts = written(tmp_path, *PROMPTS)
    arguments = ["--model", model, "--prompts", prompts, "--json", file, "--answer-tokens", 4, "--dram", "64MiB"]
    evaluation.main([str(each) for each in (*arguments, *options)])
    figures = json.loads(file.read_text())
    return figures, {row["way"]: row for row in figures["ways"]}


def test_the_prefix_figures_are_those_of_the_resumed_prompt(folder, tmp_path, monkeypatch):
    own = Assembler.take_rows

    def damaged(self, request, step, table, cache):
        own(self, request, step, table, cache)
        for layer in cache.layers:
            layer.values = layer.values * -4

    _, whole = evaluated(tmp_path, folder, "--widths", 16)
    monkeypatch.setattr(Assembler, "take_rows", damaged)
    _, changed = evaluated(tmp_path, folder, "--widths", 16)
    assert 0 < whole["prefix"]["kl"]["mean"] < 1e-9 < 1e-6 < changed["prefix"]["kl"]["mean"]
    assert whole["prefix"]["loss"] != changed["prefix"]["loss"]
    assert whole["prefix"]["reused"] == changed["prefix"]["reused"]
    assert 0.2 < whole["prefix"]["reused"]["mean"] < 0.35, "one segment of three"


def test_the_default_types_are_those_of_vllm(tmp_path):
    tiny.build("qwen3_next").to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = (pathlib.Path(evaluation.__file__).parent / "vllm" / "options.py").read_text()
    figures, rows = evaluated(tmp_path, tmp_path, "--widths", 8)
    assert figures["dtype"] == "bfloat16"
    assert figures["segment_dtype"] == re.search(r'segment_dtype: str = "(\w+)"', options)[1]
    assert rows["prefix"]["kl"]["mean"] < 0.01, "states of prefixes are not rounded"


def test_code_of_the_checkpoint_runs_only_if_it_is_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import transformers\n\n\n"
        "class MineConfig(transformers.LlamaConfig):\n    model_type = 'mine'\n\n\n"
        "class MineModel(transformers.LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    path = tmp_path / "config.json"
    kinds = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineModel"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mine", "auto_map": kinds}))
    message = refused(capsys, model=tmp_path, prompts=written(tmp_path, *PROMPTS))
    assert message.startswith("--model: ") and "add --trust-remote-code" in message
    _, rows = evaluated(tmp_path, tmp_path, "--widths", 16, "--trust-remote-code")
    assert rows["composed 16"]["reused"]["mean"] > 0.5


def refused(capsys, *options, status=2, **arguments):
    """Runs the program, which must end with one line on stderr. Returns the line without the program's name."""
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        evaluation.main([str(word) for word in (*words, *options)])
    printed = capsys.readouterr()
    assert ended.value.code == status and printed.out == "" and "Traceback" not in printed.err
    last = printed.err.splitlines()[-1]
    print(last)
    assert last.startswith("ashlar-eval: ")
    return last.removeprefix("ashlar-eval: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "argument --limit: '0' was given; expected a whole number from 1"),
        (["--answer-tokens", "-1"], "argument --answer-tokens: '-1' was given; expected a whole number from 1"),
        (
            ["--widths", "8,x"],
            "argument --widths: 'x' was given; expected a whole number from 0 to 1048576, or several",
        ),
        (["--device", "nowhere"], "--device: nowhere: "),
        (["--dram", "5XB"], "--dram: 5XB: "),
        (["--chat"], "--chat: .*; leave the option out"),
        (["--json", "/nowhere/figures.json"], "--json: /nowhere is not a folder; create it"),
        (["--json", "/"], "--json: / is a folder; expected a file"),
        (["--prompts", "/nowhere"], "--prompts: /nowhere: No such file or directory"),
        (["--prompts", "/"], "--prompts: /: Is a directory"),
        (["--prompts", "/dev/null"], "--prompts: /dev/null: no prompts"),
        (["--model", "/nowhere"], "--model: /nowhere: no such folder"),
        (["--model", "a/b/c"], "--model: a/b/c: .*; expected a folder, or a name on Hugging Face, with a model"),
        (["--answer-tokens", "500"], "prompts.jsonl:1: .* tokens with the answer; the model takes at most 600"),
    ],
)
def test_a_wrong_option_is_named(options, message, folder, tmp_path, capsys):
    plain = tokenizer()
    plain.chat_template = None
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").unlink()
    plain.save_pretrained(model)
    found = refused(capsys, *options, model=model, prompts=written(tmp_path, *PROMPTS))
    assert re.search(message, found), found


def test_a_model_that_is_not_supported_is_named(tmp_path, capsys):
    tokenizer().save_pretrained(tmp_path)
    prompts = written(tmp_path, *PROMPTS)
    transformers.T5Config(**tiny.COMMON).save_pretrained(tmp_path)
    message = refused(capsys, model=tmp_path, prompts=prompts)
    assert message.startswith(f"--model: {tmp_path}: ") and "model type: t5; supported: decoders with " in message
    assert len(message) < 500
    config = transformers.Lfm2Config(
        **{**tiny.COMMON, "pad_token_id": 0}, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = refused(capsys, model=tmp_path, prompts=prompts)
    wanted = (
        "--model: Lfm2ForCausalLM is not supported: model.layers[0]: a convolution without a state is not supported"
    )
    assert message.startswith(f"{wanted}; supported: decoders with ")
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    assert "`unheard`" in refused(capsys, model=tmp_path, prompts=prompts)


def test_a_failed_evaluation_leaves_the_file_of_figures_as_it_was(folder, tmp_path, capsys, monkeypatch):
    file, prompts = tmp_path / "figures.json", written(tmp_path, *PROMPTS)
    file.write_text("before")
    monkeypatch.setattr(calls, "of_model", lambda *_: "weights")
    arguments = {"model": folder, "prompts": prompts, "json": file, "dram": "64MiB", "widths": 8}
    message = refused(capsys, "--answer-tokens", 2, **arguments, status=1)
    assert message == f"{prompts}:1: the prompt ran without the cache: weights"
    assert file.read_text() == "before" and sorted(tmp_path.iterdir()) == [file, prompts]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        evaluation._write(file, "after")
    assert file.read_text() == "before" and sorted(tmp_path.iterdir()) == [file, prompts]


def test_logits_of_one_prompt_at_a_time_are_in_memory(folder, tmp_path, monkeypatch):
    before, alive, sizes, own = [], [], [], evaluation.Evaluation._add

    def recorded(self, way, i, found):
        alive.append(sum(each() is not None for each in before))
        before.append(weakref.ref(found.logits))
        sizes.append(os.fstat(self.logits._file.fileno()).st_size)
        own(self, way, i, found)

    monkeypatch.setattr(evaluation.Evaluation, "_add", recorded)
    evaluated(tmp_path, folder, "--widths", 16)
    assert len(alive) > 2 * len(PROMPTS) and set(alive) == {0}
    assert 0 < sizes[0] < sizes[1] and set(sizes[1:]) == {sizes[1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_read_as_they_were_written(dtype, tmp_path):
    rows = [torch.randn(2, count, 5).to(dtype)[1] for count in (3, 1, 4)]
    with open(tmp_path / "logits", "x+b", buffering=0) as file:
        stored = evaluation._Logits(file, len(rows))
        for row in rows:
            stored.append(row)
        for i in (2, 0, 1, 0):
            assert stored[i].dtype == dtype and torch.equal(stored[i], rows[i])


def test_a_full_temporary_folder_is_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: open("/dev/full", "r+b", **options))
    message = refused(
        capsys, "--answer-tokens", 2, model=folder, prompts=written(tmp_path, *PROMPTS), dram="64MiB", status=1
    )
    assert message == (
        f"{tempfile.gettempdir()}: No space left on device, after 0.0 GB of logits, at prompt 1 of 2; set TMPDIR to a "
        "folder with more space"
    )


def test_an_interrupt_leaves_the_figures_of_finished_ways(folder, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation.Evaluation, "prefix", interrupted)
    with pytest.raises(SystemExit) as ended:
        evaluated(tmp_path, folder, "--widths", 16)
    printed = capsys.readouterr()
    assert ended.value.code == 130 and printed.err.endswith("ashlar-eval: interrupted\n")
    ways = ["way", "full", "composed", "naive", "keys"]
    assert [line.split()[0] for line in printed.out.splitlines()] == ways
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError(), 1, "RuntimeError"),
        (RuntimeError("ashlard exited:\n"), 1, "ashlard exited"),
        (RuntimeError("ashlard exited:\none\nlisten: in use\n"), 1, "ashlard exited: listen: in use"),
        (TimeoutError("ashlard did not start:\none\ntwo"), 1, "ashlard did not start: two"),
        (FileNotFoundError("ashlard: not found"), 1, "ashlard: not found"),
        (
            OSError(28, "No space left"),
            1,
            f"{tempfile.gettempdir()}: No space left; set TMPDIR to a folder with more space",
        ),
        (RuntimeError("ashlard exited:\ndram.x: 7"), 2, "--dram: 2GiB: ashlard exited: dram.x: 7"),
    ],
)
def test_a_daemon_that_does_not_start_is_reported_in_one_line(
    error, status, message, folder, tmp_path, capsys, monkeypatch
):
    def start(**_):
        raise error

    monkeypatch.setattr(evaluation.ashlar.daemon, "start", start)
    assert refused(capsys, model=folder, prompts=written(tmp_path, *PROMPTS), status=status) == message


def test_figures_keep_the_mode_and_the_link_of_their_file(tmp_path):
    file, link = tmp_path / "figures.json", tmp_path / "link.json"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    evaluation._write(link, "after")
    assert file.read_text() == "after" and file.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    evaluation._write(pathlib.Path("/dev/null"), "after")
    assert pathlib.Path("/dev/null").is_char_device()


def test_progress_is_shown_on_a_terminal_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = evaluation.Progress(stream)
        progress.show("composed 8: prompt 1 of 2")
        progress.clear()
    assert re.fullmatch(r"\r\x1b\[K\[0:0\d\] composed 8: prompt 1 of 2\r\x1b\[K", terminal.getvalue())
    assert file.getvalue() == ""


def test_lines_end_only_at_line_feeds(tmp_path):
    text = "one\u2028two\x85three"
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"segments": [text], "question": text}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n" + line.encode())
    found = evaluation.read_prompts(path, tokenizer(), chat=False, limit=None)
    assert [each.where for each in found] == [f"{path}:1", f"{path}:3"]
    assert len(evaluation.read_prompts(path, tokenizer(), chat=False, limit=1)) == 1


def test_tokens_that_the_model_lacks_are_named(tmp_path):
    questions = evaluation.read_prompts(written(tmp_path, PROMPTS[0]), tokenizer(), chat=False, limit=None)
    config = tiny.build("llama").config
    evaluation.check_sizes(questions, config, 8)
    config.vocab_size = 8
    with pytest.raises(ValueError, match=r"--model: its tokenizer has token \d+ \(.*:1\); the model has 8 tokens"):
        evaluation.check_sizes(questions, config, 8)


def test_prompts_are_made_from_documentation(tmp_path):
    for package in ("one", "two", "three"):
        (tmp_path / package).mkdir()
        sentences = [
            f"The {package} program reads {word} files and writes what it finds in them to a list." for word in TEXTS
        ]
        (tmp_path / package / "README").write_text("-----\n\n" + "\n".join(sentences * 2))
    script, file = ROOT / "examples/python/quality/debian_questions.py", tmp_path / "prompts.jsonl"
    command = [sys.executable, script, file, "--root", tmp_path, "--passages", "2", "--prompts", "4"]
    subprocess.run(command, check=True)
    questions = evaluation.read_prompts(file, tokenizer(), chat=False, limit=None)
    assert len(questions) == 4 and all(len(each.segments) == 2 for each in questions)
    for line in map(json.loads, file.read_text().splitlines()):
        sentence = f"{line['question'].partition('there: ')[2]} {line['answers'][0]}"
        assert any(sentence in passage for passage in line["segments"])


def test_a_model_is_trained_on_documentation_and_evaluated(tmp_path):
    pages = tmp_path / "packages" / "list-doc" / "usr" / "share"
    pages.mkdir(parents=True)
    words = [f"{first}{second}" for first in ("read", "write", "sort", "count") for second in ("er", "ing", "able")]
    for number in range(40):
        chosen = [words[(number * 7 + place * (number + 1)) % len(words)] for place in range(60)]
        sentences = [
            f"The {a} of the list is in the {b} and reads what the {a} has to say of it."
            for a, b in zip(chosen, chosen[1:])
        ]
        page = "".join(f"<p>{number} {' '.join(sentences[at : at + 4])}</p>" for at in range(0, 56, 4))
        (pages / f"{number}.html").write_text(f"<title>not prose</title>{page}<p>Zu kurz.</p>")
    script, file = ROOT / "examples/python/quality/train_text.py", tmp_path / "figures.json"
    sizes = ["--steps", "2", "--rows", "2", "--tokens", "96", "--passages", "2", "--prompts", "2"]
    printed = subprocess.run(
        [sys.executable, script, tmp_path, *sizes], check=True, capture_output=True, text=True
    ).stdout
    assert "40 documents" not in printed and "38 documents" in printed, "two are held out"
    arguments = f"--model {tmp_path} --prompts {tmp_path / 'prompts.jsonl'} --json {file} --widths 8 --answer-tokens 2"
    evaluation.main([*arguments.split(), "--dram", "64MiB"])
    rows = {row["way"]: row for row in json.loads(file.read_text())["ways"]}
    assert rows["composed 8"]["loss"]["mean"] > 0 and rows["composed 8"]["reused"]["mean"] > 0.5


def test_answers_are_compared_by_their_words():
    assert evaluation.f1("The cat, sat.", "a cat sat") == evaluation.rouge_l("The cat, sat.", "a cat sat") == 1
    assert evaluation.f1("sat cat", "cat sat") == 1 and evaluation.rouge_l("sat cat", "cat sat") == 0.5
    assert evaluation.f1("dog", "cat") == evaluation.rouge_l("", "cat") == 0
    assert evaluation.f1("big cat", "cat") == pytest.approx(2 / 3)


def test_intervals_hold_the_mean():
    found = evaluation.interval([0.0, 1.0] * 50)
    assert found["mean"] == 0.5 and 0.35 < found["low"] < 0.45 < 0.55 < found["high"] < 0.65
    assert evaluation.interval([2.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0}
