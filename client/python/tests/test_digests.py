# SPDX-License-Identifier: Apache-2.0
"""The digest of a checkpoint: it covers all bytes, and is computed once per content of a file."""

import io
import logging
import multiprocessing
import os
import threading
import time

import pytest

from ashlar import checkpoint, digests

MIB = 1 << 20


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Digests are kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    monkeypatch.setattr(digests, "_PART", 2 * MIB)
    monkeypatch.setattr(digests, "_READ", MIB // 2)
    return tmp_path / "cache" / "ashlar" / "digests"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (9 * MIB // 256))
    return folder


@pytest.fixture
def reads(monkeypatch):
    """Bytes that were read of files that are hashed."""
    real, seen = digests._hash, []
    monkeypatch.setattr(digests, "_hash", lambda fd, size, stop: seen.append(size) or real(fd, size, stop))
    return seen


@pytest.mark.parametrize("at", [0, 4097, 3 * MIB + 1, 9 * MIB - 1])
def test_changing_any_byte_changes_the_digest(model, at):
    before = checkpoint.weights(str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" if at % 256 != 255 else b"\x00")
    assert checkpoint.weights(str(model)) != before


def test_an_unchanged_file_is_read_once(model, reads, kept):
    before = checkpoint.weights(str(model))
    assert checkpoint.weights(str(model)) == before and reads.count(9 * MIB) == 1
    assert [oct(path.stat().st_mode & 0o777) for path in (kept, *kept.iterdir())] == ["0o700", "0o600"]
    file = model / "model.safetensors"
    found = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"other")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))  # like a tool that preserves times
    assert checkpoint.weights(str(model)) != before and reads.count(9 * MIB) == 2


def test_a_copy_in_another_folder_has_the_same_digest(model, tmp_path):
    (tmp_path / "copy").mkdir()
    for file in model.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    assert checkpoint.weights(str(model)) == checkpoint.weights(str(tmp_path / "copy"))
    assert checkpoint.weights(str(tmp_path / "nowhere")) is None


def test_the_models_code_is_part_of_the_digest(model):
    before = checkpoint.weights(str(model))
    (model / "modeling.py").write_text("scale = 2")
    assert checkpoint.weights(str(model)) != before


@pytest.mark.parametrize("content", [b"", b"ashlar-digest-1 " + b"0" * 63, os.urandom(200)])
def test_a_damaged_entry_is_recomputed(model, reads, kept, content):
    before = checkpoint.weights(str(model))
    for entry in kept.iterdir():
        entry.write_bytes(content)
    assert checkpoint.weights(str(model)) == before and reads.count(9 * MIB) == 2


def test_a_folder_that_others_can_write_to_is_not_used(model, reads, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(digests.tempfile, "gettempdir", lambda: "/proc/nowhere")
    checkpoint.weights(str(model))
    kept.chmod(0o777)
    checkpoint.weights(str(model))
    assert reads.count(9 * MIB) == 2


def test_a_file_that_has_just_changed_is_not_kept(model, reads, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        checkpoint.weights(str(model))
    assert reads.count(9 * MIB) == 2


def test_a_file_that_changes_while_it_is_read_has_no_digest(model, monkeypatch):
    real, file = digests._hash, model / "model.safetensors"

    def hash_and_write(descriptor, size, stop):
        found = real(descriptor, size, stop)
        with file.open("ab") as opened:
            opened.write(b"more")
        return found

    monkeypatch.setattr(digests, "_hash", hash_and_write)
    with pytest.raises(
        OSError, match="model.safetensors: changed while it was read; expected a checkpoint that does not change"
    ):
        digests.file_digest(file)


def _digest_in_child(model, pipe):
    pipe.send(checkpoint.weights(str(model)))


def test_concurrent_processes_read_a_file_once(model, kept, monkeypatch):
    """Like the ranks of one engine: the others wait for the first one's digest."""
    counted = multiprocessing.get_context("fork").Value("i", 0)
    real = digests._hash

    def slow(descriptor, size, stop):
        if size > MIB:
            counted.value += 1
            time.sleep(0.3)
        return real(descriptor, size, stop)

    monkeypatch.setattr(digests, "_hash", slow)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(4)]
    children = [context.Process(target=_digest_in_child, args=(model, theirs)) for _, theirs in pipes]
    for child in children:
        child.start()
    found = {ours.recv() for ours, _ in pipes}
    for child in children:
        child.join()
    assert len(found) == 1 and counted.value == 1


def test_digests_are_computed_in_the_background_until_closed(model, monkeypatch, caplog):
    going_on, real = threading.Event(), digests._hash

    def waiting(descriptor, size, stop):
        if size > MIB:
            assert going_on.wait(10)
        return real(descriptor, size, stop)

    monkeypatch.setattr(digests, "_hash", waiting)
    caplog.set_level("INFO", "ashlar")
    weights = checkpoint.Weights(str(model))
    assert weights.digest() is None and weights.wait(0.01) is None
    going_on.set()
    assert weights.wait(10) == checkpoint.weights(str(model)) == weights.digest()
    assert f"hashed the weights in {model}: 0.01 GB in" in caplog.text
    going_on.clear()
    (model / "model.safetensors").write_bytes(b"1" * 3 * MIB)
    weights = checkpoint.Weights(str(model))
    weights.close()
    assert weights.wait(1) is None and not weights.failed()
    going_on.set()
    assert checkpoint.Weights("/nowhere", known="given").digest() == "given"


def test_weights_that_cannot_be_read_are_never_known(model, monkeypatch, caplog):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(digests.os, "preadv", fail)
    weights = checkpoint.Weights(str(model))
    assert weights.wait(10) is None and weights.failed()
    assert f"the cache is off: cannot hash the weights in {model}: [Errno 5]" in caplog.text


def _name_in_child(model, change, begin, pipe):
    begin.wait(10)  # the engine loads at the same time
    change()
    said = io.StringIO()
    logging.getLogger("ashlar").addHandler(logging.StreamHandler(said))
    pipe.send((checkpoint.Weights(str(model)).wait(10), said.getvalue()))


@pytest.mark.parametrize("change", ["nothing", "write", "replace", "link", "folder", "entry", "touch above"])
def test_files_changed_after_the_process_started_have_no_digest(model, tmp_path, change):
    """The engine has read the old files, and the digest is computed afterwards."""
    other, link = tmp_path / "other", tmp_path / "link"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b" ")
    link.symlink_to(model)
    file = model / "model.safetensors"

    def relink():
        (tmp_path / "new").symlink_to(other)
        (tmp_path / "new").rename(link)

    def exchange():
        model.rename(tmp_path / "old")
        other.rename(model)

    changes = {
        "nothing": lambda: None,
        "write": lambda: file.write_bytes(b"other"),
        "replace": lambda: (other / "model.safetensors").rename(file),
        "link": relink,
        "folder": exchange,
        "entry": lambda: (model / "lock").write_bytes(b""),
        "touch above": lambda: (tmp_path / "another").mkdir(),
    }
    context = multiprocessing.get_context("fork")
    (ours, theirs), begin = context.Pipe(), context.Event()
    time.sleep(0.05)
    child = context.Process(target=_name_in_child, args=(link, changes[change], begin, theirs))
    child.start()
    time.sleep(0.05)
    begin.set()
    found, said = ours.recv()
    child.join()
    if change in ("nothing", "entry", "touch above"):
        assert found == checkpoint.weights(str(model))
    else:
        assert found is None
        assert "has changed since the engine's process began" in said
