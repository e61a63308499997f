"""How long an attempt took to start, from the start of its job to the end of its first step, and which part took it."""

import json
import os
import time
from collections.abc import Mapping

from hpc_gpt.files import write_once
from hpc_gpt.process import stat_of
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.supervision.full_disk import when_there_is_space

_FILE = "start.json"
# In the order in which they follow each other. `script`: from the job's start to the start of this rank's process, with
# a preflight. `imports`: until its modules are loaded. `rendezvous`: until all ranks have met. `build`: data, model,
# engine and checkpoint, until the first step begins.
START_PARTS = ("script", "staging", "imports", "rendezvous", "build", "first_step")


class StartClock:
    """Rank 0's clock. `end(part)` is called where a part ends; the last one writes the attempt's start.json.

    A part that does not end takes 0 s, and its time is the next one's.
    """

    def __init__(self, attempt: Attempt, environment: Mapping[str, str] = os.environ) -> None:
        self._attempt = attempt
        self._process_start = process_start()
        self._job_start = min(_job_start(attempt.started(), environment) or self._process_start, self._process_start)
        self._ends = {"script": self._process_start}

    def end(self, part: str) -> None:
        """Notes that a part of START_PARTS ends now; a second end of it changes nothing."""
        if part in self._ends:
            return
        self._ends[part] = time.time()
        if part == START_PARTS[-1]:
            when_there_is_space(
                lambda: write_once(self._attempt.folder / _FILE, json.dumps(self.figures()) + "\n"), _FILE
            )

    def figures(self) -> dict[str, object]:
        """`start_s` and `start_parts`, seconds by part, which add up to it but for their rounding."""
        parts, began = {}, self._job_start
        for part in START_PARTS:
            ended = max(self._ends.get(part, began), began)
            parts[part] = round(ended - began, 3)
            began = ended
        return {"start_s": round(began - self._job_start, 3), "start_parts": parts}


def process_start() -> float:
    """When this process started, in epoch seconds."""
    since_boot = float(stat_of("self")[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _job_start(started: Mapping[str, object], environment: Mapping[str, str]) -> float | None:
    """When the attempt's job started, in epoch seconds: as Slurm says if the attempt is a job of its own, and else when
    its script made attempt.json."""
    noted = started.get("started")
    job = str(started.get("job_id", "")).partition("_")[0]
    slurm = environment.get("SLURM_JOB_START_TIME", "")
    if slurm.isdigit() and job and job in (environment.get("SLURM_JOB_ID"), environment.get("SLURM_ARRAY_JOB_ID")):
        return float(slurm)
    return float(noted) if isinstance(noted, int | float) else None
