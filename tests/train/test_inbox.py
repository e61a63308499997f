"""What rank 0 sees of the requests in its attempt's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_gpt.runs.requests import ask, open_requests
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.train import inbox
from hpc_gpt.train.inbox import Inbox
from tests.train.filling import fill


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_LOOK_S", 0.0)


def test_a_save_whose_answer_a_full_disk_refuses_is_not_asked_for_again(small_disk: Path) -> None:
    """Each would be refused as well, and soon the attempt had refused too many."""
    attempt = RunFolder(small_disk).attempt(1)
    attempt.folder.mkdir(parents=True)
    request = ask(attempt, "save")
    own = Inbox(attempt)
    assert own.look() == {"save"}
    filler = fill(small_disk)
    own.answer("save", 5, False, "the disk is full")
    assert open_requests(attempt) == [request]
    assert own.look() == frozenset()
    os.unlink(filler)
    own.answer("save", 9, True)
    assert open_requests(attempt) == []
    assert ask(attempt, "save") != request
    assert own.look() == {"save"}
