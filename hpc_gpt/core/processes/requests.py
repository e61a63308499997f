"""Requests to a running job: stop, save, requeue. They need only the shared disk to reach the nodes.

    attempts/<n>/asked/save-1.json        the request: from which process, and when
    attempts/<n>/asked/save-1.done.json   the answer: the step, and whether it is saved
    stop.<job>                            the job is to end as stopped when it starts, or starts again; removed after
                                          that end, as it must not stop a later requeue by hand

Each file is written whole, by one process. Rank 0 looks for requests between two steps, and all ranks act on them
between the same two steps.
"""

import contextlib
import itertools
import json
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import OsErrorAs, RunFolderError
from hpc_gpt.core.files import aside, give_name, hint_on, read_json, write_once
from hpc_gpt.core.runs.run_folder import Attempt

VERBS = ("stop", "save", "requeue")
_ASKED = re.compile(r"(stop|save|requeue)-([1-9][0-9]{0,5})\.json")


@dataclass(frozen=True, order=True)
class RunRequest:
    """The `number`-th request of its kind in an attempt."""

    verb: str
    number: int

    def path(self, attempt: Attempt) -> Path:
        return attempt.asked / f"{self.verb}-{self.number}.json"

    def answer_path(self, attempt: Attempt) -> Path:
        return attempt.asked / f"{self.verb}-{self.number}.done.json"


def write_request(attempt: Attempt, verb: str) -> RunRequest:
    """Writes a request to an attempt's folder; simultaneous requests get different numbers. Raises RunFolderError."""
    assert verb in VERBS, verb
    text = json.dumps({"time": time.time(), "host": platform.node(), "pid": os.getpid()}) + "\n"
    with OsErrorAs(RunFolderError, f"cannot write in {attempt.asked}", hint_on):
        attempt.asked.mkdir(exist_ok=True)
        with aside(attempt.asked / verb) as temporary:
            temporary.write_text(text, encoding="utf-8")
            for number in itertools.count(1):
                request = RunRequest(verb, number)
                with contextlib.suppress(FileExistsError):
                    give_name(temporary, request.path(attempt))
                    break
    return request


def open_requests(attempt: Attempt) -> list[RunRequest]:
    """The requests without an answer, sorted; none if the folder cannot be read."""
    try:
        names = set(os.listdir(attempt.asked))
    except OSError:
        return []
    requests = [RunRequest(match[1], int(match[2])) for name in names if (match := _ASKED.fullmatch(name))]
    return sorted(request for request in requests if f"{request.verb}-{request.number}.done.json" not in names)


def is_asked(attempt: Attempt, verb: str) -> bool:
    """Whether an attempt has a request of that verb without an answer."""
    return any(request.verb == verb for request in open_requests(attempt))


def answer(attempt: Attempt, request: RunRequest, step: int, done: bool, message: str = "") -> None:
    """Writes rank 0's answer to a request. RunFolderError if the disk refuses."""
    what = {"step": step, "done": done, "words": message, "time": time.time()}
    write_once(request.answer_path(attempt), json.dumps(what) + "\n")


def answer_of(attempt: Attempt, request: RunRequest) -> dict[str, Any]:
    """`step, done, words, time` of the answer; empty if there is none yet."""
    return read_json(request.answer_path(attempt))
