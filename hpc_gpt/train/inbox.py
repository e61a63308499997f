"""What is asked of the attempt through its folder, as rank 0 sees it at a step's edge. Needs no torch."""

from __future__ import annotations

import time

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.requests import Request, answer, open_requests
from hpc_gpt.runs.run_folder import Attempt

_LOOK_S = 1.0


class Inbox:
    """The requests of one attempt. None: nobody asks for anything."""

    def __init__(self, attempt: Attempt | None) -> None:
        self._attempt = attempt
        self._seen: set[Request] = set()
        self._looked: float | None = None

    def look(self, at_once: bool = False) -> frozenset[str]:
        """The verbs that are asked for: a save once, a stop or a requeue again and again. Lists a folder at most once
        a second, but `at_once`."""
        now = time.monotonic()
        new: set[Request] = set()
        if self._attempt is not None and (at_once or self._looked is None or now >= self._looked + _LOOK_S):
            self._looked = now
            new = set(open_requests(self._attempt)) - self._seen
            self._seen |= new
        return frozenset(request.verb for request in self._seen if request.verb != "save" or request in new)

    def answer(self, verb: str, step: int, done: bool, words: str = "") -> None:
        """Says what came of all that was asked for by that verb; a disk that refuses keeps nobody from training."""
        for request in sorted(self._seen):
            if request.verb == verb and self._attempt is not None:
                try:
                    answer(self._attempt, request, step, done, words)
                except RunFolderError as fault:
                    # It stays seen: taken for a new one, it would ask the full disk for save after save.
                    print(f"the answer to {verb} was not written: {fault}", flush=True)
                else:
                    self._seen.discard(request)
