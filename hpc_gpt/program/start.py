"""`python -ISs start.py PID RUN ATTEMPT MODE SCRIPT ARGUMENTS…`: becomes the script, as the scheduler would start it.

PID is the job script's shell, whose own environment, as it was given, is the script's. MODE is SLURM_OPEN_MODE as the
script's own options have it, `-` for none. Only the standard library is
imported, and nothing of ours.
"""

import os
import signal
import sys

# What the controller of a run on this machine adds to the environment.
_OF_LOCAL = (b"SUBMITIT_", b"HPC_GPT_PYTHON", b"HPC_GPT_STOP_AT", b"PYTHONSAFEPATH", b"PYTHONDONTWRITEBYTECODE")


def environment_of(pid: str, run: str, attempt: str, mode: str) -> dict[bytes, bytes]:
    """The environment that the shell was given, with the run's three variables."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    found = {name: value for name, _, value in pairs}
    if b"SUBMITIT_EXECUTOR" in found:
        code = os.fsencode(run) + b"/code"
        paths = [path for path in found.pop(b"PYTHONPATH", b"").split(b":") if path not in (b"", code)]
        found = {name: value for name, value in found.items() if not name.startswith(_OF_LOCAL)}
        found |= {b"PYTHONPATH": b":".join(paths)} if paths else {}
    found.pop(b"SLURM_OPEN_MODE", None)
    if mode != "-":
        found[b"SLURM_OPEN_MODE"] = mode.encode()
    if b"SLURM_TASK_PID" in found:
        found[b"SLURM_TASK_PID"] = b"%d" % os.getpid()
    own = {"HPC_GPT_RUN": run, "HPC_GPT_ATTEMPT": attempt, "HPC_GPT_CHECKPOINTS": f"{run}/checkpoints"}
    return found | {name.encode(): os.fsencode(value) for name, value in own.items()}


def main() -> None:
    pid, run, attempt, mode, script, *arguments = sys.argv[1:]
    with open(f"/proc/{pid}/status") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them from its start
        if not ignored >> (number - 1) & 1:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # bash blocks some in a job of its own
    try:
        os.execve(script, [script, *arguments], environment_of(pid, run, attempt, mode))
    except OSError as fault:
        with open(script, "rb") as file:
            line = file.readline().decode(errors="replace").strip()
        sys.stderr.write(f"{line}: {fault.strerror}\n")
        sys.exit(127 if isinstance(fault, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
