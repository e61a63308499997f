"""Text from files of every kind: the same documents however they are packed, and every damage named with its place."""

import gzip
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.errors import ConfigError, DataError
from hpc_gpt.tokens.sources import DOCUMENT_END, file_pieces, text_files

LINES = b'{"text": "one\\n"}\n{"text": "\\u0000"}\n\n{"text": ""}\r\n{"text": "tw\\u00f6", "id": 2}'


def documents(path: Path) -> list[bytes]:
    found, begun = [], b""
    for piece in file_pieces(path):
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
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(packed(b"\xef\xbb\xbf" + text, suffix))
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


def test_a_line_without_text_is_named_by_its_place_in_the_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n\n[1]\n'))
    with pytest.raises(DataError, match=r"x\.jsonl\.gz:3: no object .* at byte 17 of the text: \[1\]"):
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
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        documents(tmp_path / "gone.txt")


def test_zstandard_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"x\.zst needs zstandard, which is not installed") as refused:
        documents(tmp_path / "x.zst")
    assert "hpc-gpt[zstd]" in refused.value.hint
