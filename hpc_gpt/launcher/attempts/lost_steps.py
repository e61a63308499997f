"""The steps of this Slurm job that have lost their srun: on other nodes their tasks run on, keep their CPUs and GPUs,
and the next srun waits for these without end."""

import os
import re
import time
from pathlib import Path

from hpc_gpt.core.ends.end_policy import shown_as
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.slurm.clients import ask

_SRUN = re.compile(r"SrunHost:Pid=([^\s:]*):(\d+)")
_CLIENT_S = 20.0
_POLL_S = 0.5


def lost_steps(host: str) -> dict[str, str]:
    """{step: its nodes} of the job's numbered steps whose srun ran on `host`, this one, and has ended: a shell of the
    user's own has its srun. Empty if Slurm does not answer."""
    try:
        answer = ask(
            ["scontrol", "--oneliner", "show", "step", os.environ.get("SLURM_JOB_ID", "")], timeout_s=_CLIENT_S
        )
    except UserError:
        return {}
    steps = {}
    for line in answer.stdout.splitlines():
        step, srun = shown_as(line, "StepId"), _SRUN.search(line)
        is_numbered = step.rpartition(".")[2].isdecimal() and shown_as(line, "State") != "COMPLETED"
        if is_numbered and srun is not None and srun[1] == host.partition(".")[0] and not _is_srun(srun[2]):
            steps[step] = shown_as(line, "NodeList")
    return steps


def _is_srun(pid: str) -> bool:
    try:
        return Path("/proc", pid, "comm").read_text(encoding="utf-8") == "srun\n"
    except OSError:
        return False


def end_lost_steps(limit_s: float) -> str:
    """Kills the `lost_steps`, and waits until they have left their nodes. Returns those that have not within `limit_s`,
    as text; empty if there are none."""
    host, until, killed = os.uname().nodename, time.monotonic() + limit_s, set[str]()
    while steps := lost_steps(host):
        if time.monotonic() > until:
            return "; ".join(f"step {step} on {nodes} runs on after its kill" for step, nodes in steps.items())
        if new := [*steps.keys() - killed]:
            killed.update(new)
            try:
                ask(["scancel", "--signal=KILL", *new], timeout_s=_CLIENT_S)
            except UserError:
                killed.clear()
        time.sleep(_POLL_S)
    return ""
