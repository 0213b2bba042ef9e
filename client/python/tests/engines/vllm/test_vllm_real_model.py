# SPDX-License-Identifier: Apache-2.0
"""examples/python/real_model.py with a tiny checkpoint instead of the downloaded one."""

import json
import sys

import installed
import pytest
import tiny_checkpoint
import transformers

sys.path.insert(0, str(installed.SOURCE / "examples" / "python"))
import real_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model as the program writes it. The embeddings are tied, like SmolLM2's."""
    folder = tmp_path_factory.mktemp("real") / "tiny"
    model, tokenizer = tiny_checkpoint.parts(tie_word_embeddings=True)
    model.config.quantization_config = {"quant_method": "gguf"}
    real_model.save(model, tokenizer, folder)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(read.config, "quantization_config") and read.config.architectures == ["Qwen3ForCausalLM"]
    assert all(there.equal(here) for here, there in zip(model.parameters(), read.parameters(), strict=True))
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == tiny_checkpoint.TEMPLATE
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name, value in real_model.QUIET.items():
        monkeypatch.setenv(name, value)


def test_a_server_answers_by_http(model, daemon, tmp_path):
    text = real_model.document(model, 600)
    messages = [{"role": "user", "content": f"{text}\n\nWhat is it?"}]
    with real_model.vllm_engine(model, daemon, 4, tmp_path / "log") as ask:
        answer, tokens, reused, seconds = ask(messages)
        assert tokens > 600 and reused == 0 and seconds > 0
        assert ask(messages)[:2] == (answer, tokens) and ask(messages)[2] > 0
        with pytest.raises(OSError, match="400"):  # longer than the model's maximum length
            ask([{"role": "user", "content": text * 20}])


def test_a_conversation_survives_restarts(model, tmp_path, monkeypatch, capsys):
    figures, plot = tmp_path / "real.json", tmp_path / "real.svg"
    arguments = f"--engines transformers --tokens 600 --answer-tokens 4 --model {model} --json {figures} --plot {plot}"
    monkeypatch.setattr(sys, "argv", ["real_model.py", *arguments.split()])
    assert real_model.main() == 0, "equal answers"
    found = json.loads(figures.read_text())
    assert found["equal"] and 0 < found["second_to_first_ttft"]["transformers"]
    by = {way: [run for run in found["runs"] if run["way"] == way] for way in real_model.WAYS}
    assert all(run["reused_tokens"] == 0 for run in by["full prefill"])
    assert [run["restarted"] for run in by["ashlar"]] == [restarted for _, restarted in real_model.TURNS]
    assert by["ashlar"][0]["reused_tokens"] == 0 and all(run["reused_tokens"] >= 600 for run in by["ashlar"][1:])
    assert plot.read_text().startswith("<svg")
    assert "answers with and without the cache are equal" in capsys.readouterr().out


def test_different_answers_are_reported():
    run = dict(engine="vllm", turn=1, way="full prefill", ttft_ms=9.0, answer="a")
    runs = [run | dict(turn=turn, way=way, ttft_ms=6.0 / turn) for turn in (1, 2) for way in real_model.WAYS]
    assert real_model.summary(runs) == {"equal": True, "second_to_first_ttft": {"vllm": 0.5}}
    runs[-1]["answer"] = "b"
    assert real_model.summary(runs)["equal"] is False
