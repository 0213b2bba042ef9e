# SPDX-License-Identifier: Apache-2.0
"""ashlar-eval: figures by way, for a hybrid and for a plain model."""

import json
import pathlib
import string
import subprocess
import sys

import pytest
import tiny_transformers as tiny
import tokenizers
import transformers

from ashlar import evaluate as evaluation

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


@pytest.mark.parametrize("family, stored", [("llama", "float32"), ("qwen3_next", "float16")])
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
    for way in ("full", "prefix"):
        assert rows[way]["kl"]["mean"] < 1e-5 and rows[way]["agreement"]["mean"] == 1
    assert rows["composed 0"]["kl"]["mean"] > rows["composed 16"]["kl"]["mean"] > 1e-7
    assert (
        rows["full"]["reused"]["mean"] == 0 < rows["prefix"]["reused"]["mean"] < rows["composed 16"]["reused"]["mean"]
    )
    if family == "llama":
        assert rows["keys"]["kl"] == rows["naive"]["kl"] == rows["composed 0"]["kl"], "equal without linear layers"
    else:
        assert rows["composed 0"]["seam_head"] == 3, "the convolution's inputs are recomputed"
        assert rows["keys"]["kl"]["mean"] > rows["naive"]["kl"]["mean"] > rows["composed 0"]["kl"]["mean"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":2: .*expected a JSON object"),
        ([], ":2: list; expected a JSON object"),
        ({"segments": [], "question": "a"}, ":2: segments: expected a list of at least one text"),
        ({"segments": ["a"], "question": ""}, ":2: question: expected a text"),
        ({"segments": ["a"], "question": "a", "answers": "b"}, ":2: answers: expected a list of texts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        evaluation.read_prompts(written(tmp_path, PROMPTS[0], line), tokenizer(), chat=False, limit=None)


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
