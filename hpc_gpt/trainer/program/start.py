"""Becomes the script, as the scheduler would start it.

    python -ISs RUN/code.zip hpc_gpt.trainer.program.start PID RUN ATTEMPT MODE SCRIPT ARGUMENTS…

PID is the shell of job.sh. The script gets the environment with which that shell was started; on this machine the
environment of the submitter. MODE is SLURM_OPEN_MODE by the script's own options, `-` for none. First makes the files
of --output and --error, and looks for the checkpoint to resume from; if that fails, the fault is printed, and the
script starts all the same.
"""

import contextlib
import json
import os
import pwd
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # -I does not read the variable
sys.path.insert(0, next(str(folder.parent) for folder in Path(__file__).parents if folder.name == "hpc_gpt"))

from hpc_gpt.core.slurm.environment import GIVEN, as_given  # noqa: E402
from hpc_gpt.trainer.program.output_files import make_outputs  # noqa: E402


def environment_of(pid: str, run: str, attempt: str, mode: str) -> dict[bytes, bytes]:
    """The environment with which the shell was started, the run's variables, those of the checkpoint to resume from,
    and those of an array's element."""
    variables = as_given(Path(f"/proc/{pid}/environ").read_bytes())
    variables.pop(b"SLURM_OPEN_MODE", None)
    if mode != "-":
        variables[b"SLURM_OPEN_MODE"] = mode.encode()
    if b"SLURM_TASK_PID" in variables:
        variables[b"SLURM_TASK_PID"] = b"%d" % os.getpid()
    run_variables = {"HPC_GPT_RUN": run, "HPC_GPT_ATTEMPT": attempt, "HPC_GPT_CHECKPOINTS": f"{run}/checkpoints"}
    try:
        run_variables |= _resume_variables(run, attempt)
    except Exception as fault:
        print(f"note: HPC_GPT_RESUME_FROM is not set: {fault!r}", flush=True)
    run_variables |= _array(run) if GIVEN in os.environ else {}
    starts = [_tables(str(path)) for path in Path(run, "attempts").glob("*/attempt.json")]
    own = _tables(f"{run}/attempts/{attempt}/attempt.json")
    of_job = [start for start in starts if start.get("job_id") == own.get("job_id")]
    if in_job := sum(bool(start.get("in_job")) for start in of_job):  # a script that looks has started before
        run_variables["SLURM_RESTART_COUNT"] = str(int(own.get("restart") or 0) + in_job)
    return variables | {name.encode(): os.fsencode(value) for name, value in run_variables.items()}


def _resume_variables(run: str, attempt: str) -> dict[str, str]:
    """The variables of the checkpoint that the script is given, and resume.json with it; empty if its checkpoints are
    not known."""
    if not (_tables(f"{run}/resolved.json").get("command") or {}).get("checkpoints"):
        return {}
    from hpc_gpt.core.checkpoints.find_checkpoints import (  # loads more than other starts need
        checkpoint_for_start,
        command_of,
    )
    from hpc_gpt.core.runs.run_folder import RunFolder

    folder = RunFolder(Path(run))
    command = command_of(folder)
    checkpoint = None if command is None else checkpoint_for_start(folder, command)
    if checkpoint is None:
        return {}
    path, step = checkpoint
    with contextlib.suppress(OSError):
        folder.attempt(int(attempt)).resume.write_text(json.dumps({"path": path, "step": step}) + "\n")
    return {"HPC_GPT_RESUME_FROM": path, "HPC_GPT_RESUME_STEP": str(step) if path else ""}


def _tables(path: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _array(run: str) -> dict[str, str]:
    """The variables of an array's element on this machine; empty for other runs."""
    return dict(_tables(f"{run}/sweep.json").get("array") or {})


def _job(resolved: Mapping[str, Any], run: str, environment: Mapping[bytes, bytes]) -> dict[str, str]:
    """The variables that name output files; on this machine, where a job has none, they describe its process."""
    if GIVEN not in os.environ:
        return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    name = resolved["job"].get("name") or Path(resolved["command"]["script"]).name
    variables = {"SLURM_JOB_ID": os.environ.get("SUBMITIT_LOCAL_JOB_ID", ""), "SLURM_JOB_NAME": name}
    return {**variables, "SLURMD_NODENAME": os.uname().nodename, **_array(run)}


def _make_files(run: str, attempt: str, mode: str, environment: Mapping[bytes, bytes]) -> None:
    resolved = _tables(f"{run}/resolved.json")
    facts, job, is_local = resolved["script"], _job(resolved, run, environment), GIVEN in os.environ
    default = None if is_local else "slurm-%A_%a.out" if "SLURM_ARRAY_TASK_ID" in job else "slurm-%j.out"
    appends = mode == "a" or (mode == "-" and os.environ.get("JOB_FILE_APPEND") == "1")
    user = job.get("SLURM_JOB_USER") or pwd.getpwuid(os.getuid()).pw_name
    output, error = facts["output"] or default, facts["error"]
    made = make_outputs(Path(run, "attempts", attempt), output, error, appends, job, user)
    # The job's own output file, StdOut= of scontrol, names them.
    of_element = "{}_{}".format(*(job.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK")))
    for name in (job.get("SLURM_JOB_ID"), of_element):
        path = Path(run, f"slurm-{name}.out")
        if made and path.is_file():
            with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"the script's output is in {' and '.join(map(str, made))}\n")


def main() -> None:
    pid, run, attempt, mode, script, *arguments = sys.argv[1:]
    environment = environment_of(pid, run, attempt, mode)
    try:
        _make_files(run, attempt, mode, environment)
    except Exception as fault:
        with contextlib.suppress(OSError):
            print(f"note: no files of --output and --error: {fault!r}", flush=True)
    with open(f"/proc/{pid}/status") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them from its start
        if not ignored >> (number - 1) & 1:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # bash blocks some signals in a background job
    with contextlib.suppress(OSError):  # its own seconds count from here
        Path(run, "attempts", attempt, ".signals/began").write_text(Path("/proc/uptime").read_text().split()[0] + "\n")
    with open(script, "rb") as file:
        line = file.readline().removeprefix(b"#!").strip()
    try:
        try:
            os.execve(script, [script, *arguments], environment)
        except PermissionError:  # a disk that is mounted noexec: its interpreter runs it, as in slurmd's spool
            program, *argument = map(os.fsdecode, line.split(maxsplit=1))
            os.execve(program, [program, *argument, script, *arguments], environment)
    except OSError as fault:
        sys.stderr.write(f"#!{line.decode(errors='replace')}: {fault.strerror}\n")
        sys.exit(127 if isinstance(fault, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
