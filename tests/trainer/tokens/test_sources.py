"""Text from files of every kind: the same documents however they are packed, and every damage named with its place."""

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens import content
from hpc_gpt.trainer.tokens.sources import (
    DOCUMENT_END,
    DocumentCount,
    UnreadableFile,
    check_forms,
    check_text,
    file_pieces,
    listed_files,
    pieces,
    text_files,
)

LINES = b'{"text": "one\\n"}\n{"text": "\\u0000"}\n\n{"text": ""}\r\n{"text": "tw\\u00f6", "id": 2}'


def documents(path: Path, count: DocumentCount | None = None, key: str = "text") -> list[bytes]:
    found, begun = [], b""
    for piece in file_pieces(path, count, key):
        if piece is DOCUMENT_END:
            found.append(begun)
            begun = b""
        else:
            begun += piece
    assert not begun, "a document without its end"
    return found


def packed(content: bytes, suffix: str, members: int = 1) -> bytes:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    size = -(-len(content) // members)
    return b"".join(pack(content[start : start + size]) for start in range(0, len(content), size))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("members", [1, 3])
def test_a_file_holds_the_same_documents_however_it_is_packed(tmp_path: Path, suffix: str, members: int) -> None:
    text, lines = tmp_path / f"a.txt{suffix}", tmp_path / f"b.jsonl{suffix}"
    long = bytes(range(1, 256)) * 12_000
    text.write_bytes(packed(long, suffix, members))
    lines.write_bytes(packed(LINES, suffix, members))
    assert documents(text) == [long]
    assert documents(lines) == [b"one\n", b"\0", "twö".encode()]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("text", [b"", b"a", b"a" * (1 << 21) + b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, suffix: str, text: bytes) -> None:
    (path := tmp_path / f"a.txt{suffix}").write_bytes(packed(b"\xef\xbb\xbf" + text, suffix))
    assert documents(path) == ([text] if text else [])


@settings(max_examples=20)
@given(line=st.integers(1, 3_000_000))
def test_lines_of_any_length(tmp_path_factory: pytest.TempPathFactory, line: int) -> None:
    path = tmp_path_factory.getbasetemp() / "long.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + b"b" * line + b'"}\n{"text": "c"}\n')
    assert documents(path) == [b"a", b"b" * line, b"c"]


@given(cut=st.integers(1, 4000), suffix=st.sampled_from([".gz", ".zst"]))
def test_any_cut_is_named_with_its_place(tmp_path_factory: pytest.TempPathFactory, cut: int, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"cut.txt{suffix}"
    whole = packed(bytes(index * index % 251 for index in range(9000)) + path.name.encode() * 200, suffix)
    size = max(0, len(whole) - cut)
    path.write_bytes(whole[:size])
    with pytest.raises(DataError, match=rf"{path} is truncated: it ends at byte {size}"):
        documents(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_changed_byte_is_found(tmp_path: Path, suffix: str) -> None:
    noise = bytes(pow(3, index, 65537) % 256 for index in range(100_000))
    pack = packed(noise, suffix) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(noise)
    for place in (0, len(pack) // 2, len(pack) - 3):
        path = tmp_path / f"{place}.txt{suffix}"
        changed = bytearray(pack)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"damaged at byte \d+ or up to") as fault:
            documents(path)
        found = re.search(r"at byte (\d+) or up to (\d+) after", str(fault.value))
        assert found is not None
        assert int(found[1]) <= len(pack)
        if place == 0:
            assert int(found[1]) == 0
    path.write_text("this is no archive")
    with pytest.raises(DataError, match="damaged at byte 0"):
        documents(path)


def test_a_folder_lists_what_is_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.jsonl.gz", "a/1.zst", ".git/x.txt", "a.tar.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    assert [path.relative_to(tmp_path).as_posix() for path in text_files(tmp_path)] == [
        "a/1.zst",
        "a/2.jsonl.gz",
        "b.txt",
    ]


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.ndjson.zst", "a.data.jsonl.gz"])
def test_jsonl_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    texts = ["eins", "", "zwei {}\n", "d" * 70_000]
    objects = [{"id": number, "meta": {"of": [{}]}, "text": text} for number, text in enumerate(texts)]
    path = tmp_path / name
    lines = "\r\n\n".join(json.dumps(each) for each in objects).encode()
    path.write_bytes(packed(b"\xef\xbb\xbf" + lines, path.suffix if path.suffix in (".gz", ".zst") else ""))
    count = DocumentCount()
    assert documents(path, count) == [text.encode() for text in texts if text]
    assert (count.documents, count.empty) == (4, 1)


def test_a_line_that_is_no_object_is_refused_with_its_number(tmp_path: Path) -> None:
    one = '{"text": "one"}\n'
    for number, damage in ((1, '{"text": "cut\n' + one), (1, '{"text": "cut"\n' + one), (2, one + '{"text":\n')):
        (tmp_path / "d.jsonl").write_text(damage)
        with pytest.raises(DataError, match=rf"d\.jsonl:{number}: no object with a string"):
            documents(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text('{"content": "one", "id": 2}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:1: .* its keys are content, id"):
        documents(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.JSON", '{"text": "one"}'),
        ("a.json", '[\n {"text":' + '"word", ' * 300_000),
        ("a.txt", '\n{ "content": "one"}\n\n{"text": "two"}\n'),
    ],
    ids=["JSON", "long", "text"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_by_another_name_is_refused(tmp_path, name, text, suffix):
    (path := tmp_path / f"{name}{suffix}").write_bytes(packed(text.encode(), suffix))
    for read in (documents, check_text, lambda path: check_forms([tmp_path / "b.jsonl", path])):
        with pytest.raises(DataError, match=rf"^{re.escape(str(path))} begins like JSON, but a name without \.jsonl"):
            read(path)


@pytest.mark.parametrize("text", ["{}\nint main() {}\n", "[1, 2]\n", "{text: no}\n", "{{ text }}", "{"])
def test_text_with_braces_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert documents(tmp_path / "a.txt") == [text.encode()]


def test_a_read_that_fails_is_tried_again_from_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What /proc has at the begin of a process's memory cannot be read: EIO.
    text, path, pauses = b"x" * 3_000_000, tmp_path / "a.txt", []
    (tmp_path / "sound.txt").write_bytes(text)
    path.symlink_to("/proc/self/mem")

    def mend(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            path.unlink()
            path.symlink_to(tmp_path / "sound.txt")

    monkeypatch.setattr(content.time, "sleep", mend)
    assert documents(path) == [text]
    assert len(pauses) == 2
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UnreadableFile, match=r"cannot read .*a\.txt: Input/output error"):
        documents(path)
    assert len(pauses) == 5
    with pytest.raises(UnreadableFile, match="No such file"):
        documents(tmp_path / "gone.txt")
    assert len(pauses) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_text_may_have_another_key(tmp_path: Path, name: str) -> None:
    texts = ["one", "", "zwei\n" * 30_000, "three"]
    path, count = tmp_path / name, DocumentCount()
    if name == "a.parquet":
        column = [text or None for text in texts]
        parquet.write_table(pyarrow.table({"id": range(4), "content": column}), path, row_group_size=2)
    else:
        lines = "\n".join(json.dumps({"id": number, "content": text}) for number, text in enumerate(texts))
        path.write_bytes(packed(lines.encode(), path.suffix if path.suffix == ".gz" else ""))
    assert b"".join(pieces(tmp_path, count, "content")) == b"".join(f"{text}\0".encode() for text in texts if text)
    assert (count.documents, count.empty) == (4, 1)
    for key in ("text", "id"):
        with pytest.raises(DataError, match=rf"\"{key}\""):
            documents(path, key=key)


def test_a_stream_leaves_parquet_out_and_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is all there is")
    assert listed_files(tmp_path) == [(tmp_path / "a.parquet", "Parquet, which hpc-gpt data reads")]
    with pytest.raises(DataError, match=r"a\.parquet is damaged: "):
        documents(tmp_path / "a.parquet")
