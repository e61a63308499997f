"""What a waiting job waits for: `--dependency=singleton`, `afterok:7`, …"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpc_gpt.rehearsal.job import PENDING, Job


def waits_for(job: Job, jobs: Iterable[Job]) -> str | None:
    """Slurm's reason for a job that must wait, None for one whose dependency is met.

    A singleton waits for every job of its name and user that came before it and has not ended.
    """
    others = list(jobs)
    for part in re.split(r"[,?]", job.dependency or ""):
        kind, *ids = re.sub(r"\([a-z]+\)", "", part).split(":")
        if kind == "singleton":
            if any(other.id < job.id and other.request.name == job.request.name and not other.is_over
                   for other in others):  # fmt: skip
                return "Dependency"
            continue
        for word in ids:
            for other in others:
                if word.partition("+")[0] not in (other.word, str(other.id)):
                    continue
                if kind == "after":
                    if other.state == PENDING:
                        return "Dependency"
                elif not other.is_over:
                    return "Dependency"
                elif (kind == "afterok" and other.exit != (0, 0)) or (kind == "afternotok" and other.exit == (0, 0)):
                    return "DependencyNeverSatisfied"
    return None
