"""Runs attempts of a run in the foreground. job.sh starts it when a user runs the script on one machine.

python -m hpc_gpt.launcher.local.by_hand RUN
"""

import os
import sys
from pathlib import Path

from hpc_gpt.core.ends.run_state import done_by
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.processes import lock
from hpc_gpt.core.runs.run_folder import RunFolder


def main(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except UserError as fault:
        return _refuse(str(fault), fault.hint, fault.exit_code)
    except ModuleNotFoundError as fault:
        hint = "HPC_GPT_PYTHON=PYTHON bash job.sh starts it with the Python in which hpc-gpt is installed"
        return _refuse(f"{sys.executable} lacks {fault.name}, which a run on this machine needs", hint, 1)


def _refuse(message: str, hint: str, code: int) -> int:
    print(f"Error: {message}\n\nhint: {hint}", file=sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    from hpc_gpt.launcher.local.controller import judge_and_note, run_attempt, wait_for_retry  # needs submitit
    from hpc_gpt.launcher.local.queue import begin_attempt, note_start, show_free_gpus

    run = RunFolder(Path(arguments[0]))
    resolved = run.resolved()
    with lock.locked(run):
        if (done := done_by(run.attempts())) is not None:
            print(f"not started: attempt {done.number} has finished the training")
            return 0
        held = show_free_gpus(run, resolved)
        while True:
            attempt = begin_attempt(run)
            note_start(run, attempt, os.getpid(), ["bash", str(run.job_script)], resolved.cluster.name)
            print(f"run folder {run.path}, attempt {attempt.number}, output in {attempt.log}", flush=True)
            code = run_attempt(run, attempt)
            end = attempt.ended()
            print(f"{end.get('ended')} at step {end.get('step')}" + (f": {end['cause']}" if end.get("cause") else ""))
            if not judge_and_note(run, attempt, resolved) or not wait_for_retry(run, attempt, resolved):
                held.free()
                return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
