"""Token files from text, jsonl, folders and the standard library."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens.build import build_stdlib, build_tokens
from hpc_gpt.trainer.tokens.token_file import open_tokens, stdlib_path


def text_of(path: Path) -> bytes:
    return bytes(open_tokens(path).tokens.tolist())


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (source := tmp_path / "a b'.txt").write_text("héllo\n")
    file = build_tokens(source, tmp_path / "x.tokens")
    assert text_of(file.path) == "héllo\n".encode() + b"\0"
    assert (file.vocab, file.tokenizer) == (256, "byte")


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    (source := tmp_path / "x.jsonl").write_text('{"text": "one"}\n\n{"id": 2, "text": "tw\\u00f6"}\n{"text": ""}\n')
    assert text_of(build_tokens(source, tmp_path / "x.tokens").path) == "one\0twö\0".encode()


@pytest.mark.parametrize("line", ['{"text": 3}', '{"body": "x"}', "[1]", "{", '"text"'])
def test_a_jsonl_line_without_text_is_named(tmp_path: Path, line: str) -> None:
    (source := tmp_path / "x.jsonl").write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: no object with a string"):
        build_tokens(source, tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()


def test_a_folder_in_the_order_of_its_paths(tmp_path: Path) -> None:
    source = tmp_path / "corpus"
    for name, text in {"b/2.txt": "two", "b/1.md": "one", "a.txt": "zero", ".hidden/x.txt": "no"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "c.jsonl").write_text(json.dumps({"text": "three"}) + "\n")
    (source / "image.png").write_bytes(b"\x89PNG\0\0")
    (source / "empty.txt").write_text("")
    first = build_tokens(source, tmp_path / "1.tokens")
    assert text_of(first.path) == b"zero\0one\0two\0three\0"
    assert build_tokens(source, tmp_path / "2.tokens").path.read_bytes() == first.path.read_bytes()


def test_a_refused_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size refuses like a full disk; a process of its own takes it."""
    (source := tmp_path / "t.txt").write_bytes(b"x" * 300_000)
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from hpc_gpt.trainer.tokens.build import build_tokens; build_tokens(sys.argv[1], sys.argv[2])"
    )
    out = tmp_path / "x.tokens"
    done = subprocess.run([sys.executable, "-c", program, source, out], capture_output=True, text=True, check=False)
    assert f"DataError: cannot write {out}: File too large" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("build", "suffixes"),
    [
        ("build_stdlib().sha", [".tokens"]),
        ("build_stdlib_shards()", ["-shards"]),
        ("build_stdlib_megatron()", ["-megatron.bin", "-megatron.bytes", "-megatron.idx"]),
    ],
)
def test_two_builders_of_the_standard_library_at_once(tmp_path: Path, build: str, suffixes: list[str]) -> None:
    environment = {**os.environ, "HPC_GPT_DATA": str(tmp_path / "data")}
    program = f"from hpc_gpt.trainer.tokens import build; print(build.{build})"
    builders = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        shas = {builder.communicate()[0] for builder in builders}
    finally:
        for builder in builders:
            builder.kill()
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(shas) == 1
    names = sorted(entry.name for entry in (tmp_path / "data").iterdir())
    assert names == [stdlib_path(suffix).name for suffix in suffixes]


def test_the_standard_library_is_real_text() -> None:
    file = build_stdlib()
    assert len(file.tokens) > 2_000_000
    assert file.sha == hashlib.sha256(file.tokens.tobytes()).hexdigest()
    assert b"import os" in bytes(file.tokens.astype("u1"))
