"""The verb data, and what submit says of a token file that will not do."""

import gzip
import os
import shlex
from pathlib import Path

import pytest

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.token_file import open_tokens
from tests.cli.command import error_of, in_process, without_slurm

TEXT = "a line of text, the same again and again\n" * 200


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    in_process("data", "text.txt", "-o", "my text.tokens", cwd=tmp_path, code=0)
    return tmp_path / "my text.tokens"


def test_a_text_becomes_tokens_and_the_next_command_is_named(tmp_path, tokens):
    assert bytes(open_tokens(tokens).tokens[: len(TEXT)].astype("u1")).decode() == TEXT
    done = in_process("data", "text.txt", cwd=tmp_path)
    assert done.stdout == f"text.tokens: {len(open_tokens(tokens).tokens)} tokens, vocabulary 256, tokenizer byte\n"
    note, line = done.stderr.splitlines()
    assert note == "note: each byte is a token, 256 in all; --tokenizer takes a model's tokenizer.json"
    assert line.startswith("next: hpc-gpt submit demo ")
    done = in_process("data", "text.txt", "-o", "a $(text).tokens", cwd=tmp_path)
    assert "--set 'data.path=a $(text).tokens'\n" in done.stderr


@pytest.mark.parametrize(("text", "vocab"), [(TEXT, 256), ("".join(map(chr, range(300, 700))) * 20, 401)])
def test_the_next_command_takes_the_data(tmp_path, monkeypatch, text, vocab):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(text)
    done = in_process("data", "text.txt", "--tokenizer", "char" if vocab > 256 else "byte")
    words = shlex.split(done.stderr.splitlines()[-1].removeprefix("next: hpc-gpt "))
    dry = in_process(*words, "--dry-run", "--script", environment=without_slurm(tmp_path))
    assert f"data: text.tokens by tokenizer {'char' if vocab > 256 else 'byte'}, " in dry.stderr
    script = dry.stdout
    text_of_resolved = script.split("<<'HPC_GPT_RESOLVED'", 1)[1].split("\n", 1)[1].split("HPC_GPT_RESOLVED\n", 1)[0]
    resolved = Resolved.from_json(text_of_resolved)
    assert (resolved.data.path, resolved.model.vocab) == ("text.tokens", vocab)
    ensure_data(resolved)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "no token file"),
        (lambda path: path.write_bytes(b""), "is empty: 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
        (lambda path: path.write_text("text, not tokens" * 10), "is not a token file"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
    ids=["missing", "empty", "truncated", "text", "folder"],
)
def test_a_bad_token_file_is_refused_before_anything_is_written(tmp_path, tokens, harm, message):
    harm(tokens)
    settings = ("--set", "data.source=tokens", "--set", f"data.path={tokens}")
    assert message in error_of(in_process("submit", "demo", "--cluster", "local", *settings, cwd=tmp_path, code=2))[0]
    assert not Path(os.environ["HPC_GPT_LOGS"]).exists()


def test_characters_and_megatrons_files_have_a_next_command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    bare = without_slurm(tmp_path)
    done = in_process("data", "text.txt", "--tokenizer", "char", cwd=tmp_path, environment=bare)
    assert (done.code, done.stdout.split(":")[0]) == (0, "text.tokens")
    settings = "--set data.source=tokens --set data.path=text.tokens --set data.tokenizer=char"
    assert done.stderr == f"next: hpc-gpt submit demo --cluster local {settings}\n"
    done = in_process("data", "text.txt", "--format", "megatron", "-o", "pair", cwd=tmp_path, environment=bare)
    assert done.stdout == f"pair.bin, pair.idx: {len(TEXT) + 1} tokens, tokenizer byte\n"
    settings = "--set data.source=megatron --set data.path=pair"
    assert done.stderr.endswith(f"\nnext: hpc-gpt submit demo --cluster local {settings}\n")
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"text.txt", "text.tokens", "text.tokens.vocab.json", "pair.bin", "pair.idx", "pair.bytes"}
    theirs = (tmp_path / "pair.bytes").read_bytes()
    (tmp_path / "pair.bytes").unlink()
    done = in_process("data", "--bytes", "pair", "byte", cwd=tmp_path, environment=bare)
    assert done.stdout == "pair.bytes: the bytes of text of each token, for bits per byte (bpb)\n"
    assert (tmp_path / "pair.bytes").read_bytes() == theirs


def test_a_folder_s_files_are_named_read_or_left_out(tmp_path):
    (folder := tmp_path / "corpus").mkdir()
    for name, content in (("a.txt", b"text\n"), ("b.toml", b"x = 1\n"), ("c.bin", b"\0\1"), (".d", b"x")):
        (folder / name).write_bytes(content)
    (folder / "empty.txt").touch()
    for number in range(30):
        (folder / f"many{number:02}.txt").write_text("more\n")
    read, left, *_ = in_process("data", "corpus", cwd=tmp_path).stderr.splitlines()
    assert read.startswith("read: 32 files: a.txt, b.toml, many00.txt, ")
    assert read.endswith(", many17.txt, and 12 more")
    assert left == "left out: 3 files: .d (hidden), c.bin (binary), empty.txt (empty)"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_is_no_text_is_refused(tmp_path, suffix):
    content = b"text \xff\0" * 20
    (tmp_path / f"b.bin{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    done = in_process("data", f"b.bin{suffix}", cwd=tmp_path, code=2)
    assert error_of(done)[0] == f"b.bin{suffix} is not text: it has a NUL byte at 6"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_utf_8_is_made_with_a_warning(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    done = in_process("data", "latin.txt", cwd=tmp_path, code=0)
    assert "warning: latin.txt is not UTF-8 at byte 3: is it text?\n" in done.stderr


def test_what_is_left_out_of_a_data_set_is_said(tmp_path):
    (folder := tmp_path / "corpus").mkdir()
    (folder / ".README.md").write_text("# corpus\n")
    (folder / "part.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    done = in_process("data", "corpus", cwd=tmp_path)
    assert done.stdout == "corpus.tokens: 4 tokens, vocabulary 256, tokenizer byte\n"
    assert done.stderr.splitlines()[:3] == [
        "read: 1 file: part.jsonl",
        "left out: 1 file: .README.md (hidden)",
        "2 documents, 1 of them without text",
    ]
    settings = (
        "data.source=stream",
        "data.path=corpus",
        "data.eval_fraction=0",
        "data.workers=0",
        "model.seq=2",
        "train.eval_every=0",
        "layout.tp=1",
        "layout.pp=1",
    )
    flags = [word for setting in settings for word in ("--set", setting)]
    done = in_process("submit", "demo", "--cluster", "local", "-G", "1", "--dry-run", *flags, cwd=tmp_path)
    assert "(left out: 1 file: .README.md (hidden))" in done.stdout
    (folder / "part.json").write_text('[{"text": "one"}]\n')
    done = in_process("submit", "demo", "--cluster", "local", "-G", "1", "--dry-run", *flags, cwd=tmp_path, code=2)
    assert "part.json begins like JSON" in error_of(done)[0]
