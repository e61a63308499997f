"""What stands beside a file until it is finished never stays, and a damaged text is one kind of fault."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.files import aside, json_in, read_start


def _fail_beside(path: Path, kind: str, kept: Path) -> None:
    with aside(path) as own:
        if kind == "file":
            own.touch()
        elif kind == "folder":
            (own / "inner").mkdir(parents=True)
        elif kind == "link":
            own.symlink_to(kept)
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nothing"])
def test_what_was_begun_beside_a_file_is_removed_if_it_fails(tmp_path: Path, kind: str) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "mine").touch()
    with pytest.raises(ZeroDivisionError):
        _fail_beside(tmp_path / "name", kind, kept)
    assert list(tmp_path.rglob("*")) == [kept, kept / "mine"]


@pytest.mark.parametrize(("text", "words"), [("", "Expecting"), ("{", "Expecting"), ("[" * 100_000, "recursion")])
def test_no_json_is_a_value_error_however_it_is_damaged(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        json_in(tmp_path / "a.json")


def test_what_is_no_file_is_refused_and_left_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is no regular file"):
        read_start(tmp_path, 9)
    assert len(os.listdir("/proc/self/fd")) == before
