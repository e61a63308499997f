"""Started by job.sh when a user runs it on one machine: an attempt of the run, in the foreground.

python -m hpc_gpt.launch.local.by_hand RUN
"""

import importlib
import os
import sys
from pathlib import Path

from hpc_gpt.ends.run_state import done_by
from hpc_gpt.errors import UserError
from hpc_gpt.runs import lock
from hpc_gpt.runs.run_folder import RunFolder


def main(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except UserError as fault:
        return _refuse(str(fault), fault.hint, fault.exit_code)
    except ModuleNotFoundError as fault:
        hint = "HPC_GPT_PYTHON=PYTHON bash job.sh starts it with the Python in which hpc-gpt is installed"
        return _refuse(f"{sys.executable} lacks {fault.name}, which a run on this machine needs", hint, 1)


def _refuse(words: str, hint: str, code: int) -> int:
    print(f"Error: {words}\n\nhint: {hint}", file=sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    from hpc_gpt.launch.local.controller import (  # needs submitit
        RACE_SUPERVISOR,
        RunController,
        begin_attempt,
        note_start,
    )

    run = RunFolder(Path(arguments[0]))
    with lock.locked(run):
        if (done := done_by(run.attempts())) is not None:
            print(f"not started: attempt {done.number} has finished the training")
            return 0
        attempt = begin_attempt(run)
        note_start(run, attempt, os.getpid(), ["bash", str(run.job_script)], run.resolved().cluster.name)
        print(f"run folder {run.path}, attempt {attempt.number}, output in {attempt.log}", flush=True)
        if run.resolved().race:
            code = int(importlib.import_module(RACE_SUPERVISOR).supervise(run, attempt))
        else:
            controller = RunController(run, attempt)
            controller.run()
            code = controller.exit_code()
        end = attempt.ended()
        print(f"{end.get('ended')} at step {end.get('step')}" + (f": {end['cause']}" if end.get("cause") else ""))
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
