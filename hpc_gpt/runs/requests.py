"""Requests to a running job, as files in the run folder: only the shared disk has to reach the nodes.

    attempts/<n>/asked/save-1.json        the request: from which process, and when
    attempts/<n>/asked/save-1.done.json   the answer: the step, and whether it is saved
    stop.<job id>                         the job is to end as stopped when it starts, or starts again; removed when it
                                          has ended so, because a later requeue by hand is a newer wish

Each file is written whole, by one process. Rank 0 looks for requests between two steps, and all ranks act on them
between the same two steps.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.small_files import give_name, read_json, write_once

VERBS = ("stop", "save", "requeue")
_ASKED = re.compile(r"(stop|save|requeue)-([1-9][0-9]{0,5})\.json")


@dataclass(frozen=True, order=True)
class Request:
    """The `number`-th request of its kind in an attempt."""

    verb: str
    number: int

    def path(self, attempt: Attempt) -> Path:
        return attempt.asked / f"{self.verb}-{self.number}.json"

    def answer_path(self, attempt: Attempt) -> Path:
        return attempt.asked / f"{self.verb}-{self.number}.done.json"


def ask(attempt: Attempt, verb: str) -> Request:
    """Write a request into an attempt's folder; simultaneous ones get different numbers. Raises RunFolderError."""
    assert verb in VERBS, verb
    text = json.dumps({"time": time.time(), "host": platform.node(), "pid": os.getpid()}) + "\n"
    aside = attempt.asked / f".{verb}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        attempt.asked.mkdir(exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        number = 1
        while True:
            request = Request(verb, number)
            try:
                give_name(aside, request.path(attempt))
                return request
            except FileExistsError:
                number += 1
    except OSError as fault:
        raise RunFolderError(
            f"cannot write in {attempt.asked}: {fault.strerror}", "is the disk full or read-only?"
        ) from None
    finally:
        aside.unlink(missing_ok=True)


def open_requests(attempt: Attempt) -> list[Request]:
    """The requests without an answer, sorted; none if the folder cannot be read."""
    try:
        names = set(os.listdir(attempt.asked))
    except OSError:
        return []
    found = [Request(match[1], int(match[2])) for name in names if (match := _ASKED.fullmatch(name))]
    return sorted(request for request in found if f"{request.verb}-{request.number}.done.json" not in names)


def answer(attempt: Attempt, request: Request, step: int, done: bool, words: str = "") -> None:
    """Write rank 0's answer to a request. RunFolderError if the disk refuses."""
    what = {"step": step, "done": done, "words": words, "time": time.time()}
    write_once(request.answer_path(attempt), json.dumps(what) + "\n")


def answer_of(attempt: Attempt, request: Request) -> dict[str, Any]:
    """`step, done, words, time` of the answer; empty if there is none yet."""
    return read_json(request.answer_path(attempt))
