"""Slurm's messages about how a job, a step or a task ended: srun, slurmstepd, sbatch, sacct and scontrol."""

from hpc_gpt.reader.lines.pattern import Dialect, Pattern, echo, failure

_TASK = r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<rank>\d{1,7})[\d,-]{0,400}: "
# A row of sacct, with bars (`-P`) or in columns.
_ROW = r"^(?P<words>\d{1,12}(?:_\d{1,7})?(?:\||\s).{0,300}?\b"
_ROW_END = r"(?!\w)(?: by \d{1,10})?(?:\||\s|$).{0,200})"


def _cancelled(what: str, why: str, ended: str, echo: bool = False) -> Pattern:
    # The node that writes this line is alive: if a node failed, it was another one. Nor is it to blame for a cancel.
    node = "(?:" if ended in ("node_failure", "cancelled") else "(?P<node>"
    message = rf"\*\*\* (?:{what}) \d{{1,12}}\S{{0,20}} ON {node}[\w.-]{{1,80}}) CANCELLED AT \S{{1,40}} {why}.{{0,80}}"
    return failure(ended, "CANCELLED", f"(?P<words>{message})", echo)


def _task(how: str, ended: str, echo: bool = False) -> Pattern:
    return failure(ended, "srun: error: ", rf"(?P<words>{_TASK}(?:{how}).{{0,120}})", echo)


def _row(literal: str, state: str, ended: str) -> Pattern:
    return failure(ended, literal, _ROW + state + _ROW_END)


def _state(state: str, ended: str) -> Pattern:
    return failure(ended, "JobState=", rf"(?P<words>JobState=(?:{state})\b.{{0,200}})")


DIALECT = Dialect(
    name="slurm_words",
    patterns=(
        Pattern("fact", r"\*\*\* (?:JOB|STEP) (?P<job_id>\d{1,12})\S{0,20} ON ", literal="CANCELLED"),
        _cancelled("JOB|STEP", "DUE TO TIME LIMIT", "walltime"),
        _cancelled("JOB|STEP", "DUE TO PREEMPTION", "preempted"),
        _cancelled("JOB|STEP", "DUE TO NODE FAILURE", "node_failure"),
        _cancelled("JOB|STEP", "DUE TO JOB REQUEUE", "requeued"),
        _cancelled("JOB", "(?!DUE TO [TPNJ])", "cancelled"),
        # srun also cancels a step if one of its tasks failed.
        _cancelled("STEP", "(?!DUE TO [TPNJ])", "cancelled", echo=True),
        failure("host_memory", "rror",
            r"(?:slurmstepd-(?P<node>[\w.-]{1,80}): error: )?(?P<words>[Dd]etected \d{1,9} oom[-_]kill event(?:s|\(s\))? in"
            r" \S{1,60}.{0,120})"),
        failure("host_memory", "memory limit",
            r"slurmstepd\S{0,80}: error: (?P<words>(?:Job|Step) \S{1,40} exceeded (?:job |step )?memory limit.{0,200})"),
        failure("node_failure", "rror", r"\*\*\* (?:JOB|STEP) \S{1,40} STEPD TERMINATED ON (?P<node>[\w.-]{1,80})"),
        _task("Out Of Memory", "host_memory"),
        _task("Segmentation fault|Illegal instruction|Floating point exception|Bus error", "error"),
        _task("Exited with exit code|Killed|Aborted|Hangup|Unknown", "error", echo=True),
        _task("Terminated|Interrupt|User defined signal|Trace", "cancelled", echo=True),
        failure("node_failure", "Node failure", r"srun: error: Node failure on (?P<node>[\w.-]{1,80})"),
        failure("node_failure", "srun: error: ",
            r"(?P<words>srun: error: (?:\S{0,60} ?step_launch_notify_io_failure|Aborting, .{0,60}io error"
            r"|\S{1,60}: Zero Bytes were transmitted|.{0,60}Communication connection failure).{0,200})"),
        failure("error", " launch failed: ", r"(?P<words>srun: error: tasks? [\d,-]{1,400} launch failed: .{0,200})"),
        echo("node_failure", "pplication launch failed", r"srun: error: Application launch failed: "),
        echo("node_failure", "job step", r"(?P<words>srun: error: Timed out waiting for job step to complete.{0,100})"),
        failure("user_error", "srun: error: ", r"(?P<words>srun: error: (?:Unable to (?:create step|allocate resources"
            r"|confirm allocation)|Invalid |[Nn]o partition|Requested node|\S{1,200}: execve|Job request"
            r"|.{0,80}execve\(\)|.{0,40}[Mm]emory specification|Batch job).{0,200})"),
        failure("user_error", "srun: fatal: ", r"(?P<words>srun: fatal: .{0,300})"),
        failure("user_error", "sbatch: error: ", r"(?P<words>sbatch: error: .{0,300})"),
        failure("user_error", ": error: execve(): ", r"(?P<words>slurmstepd\S{0,80}: error: execve\(\): .{0,300})"),
        echo("cancelled", "srun: Job step aborted", r"(?P<words>srun: Job step aborted.{0,100})"),
        echo("cancelled", "srun: ", r"(?P<words>srun: (?:forcing job termination|Force Terminated|launch/slurm: "
            r"_step_signal|Terminating|interrupt|got SIGCONT).{0,100})"),
        _row("TIMEOUT", "(?:TIMEOUT|DEADLINE)", "walltime"),
        _row("NODE_FAIL", "NODE_FAIL", "node_failure"),
        _row("BOOT_FAIL", "BOOT_FAIL", "node_failure"),
        _row("PREEMPTED", "PREEMPTED", "preempted"),
        _row("OUT_OF_ME", r"OUT_OF_ME(?:MORY|\+)?", "host_memory"),
        _row("CANCELLED", r"CANCELLED\+?", "cancelled"),
        echo("error", "FAILED", _ROW + "FAILED" + _ROW_END),
        Pattern("end", _ROW.replace("words", "value") + "COMPLETED" + _ROW_END, literal="COMPLETED", ended="done"),
        _state("TIMEOUT|DEADLINE", "walltime"),
        _state("NODE_FAIL|BOOT_FAIL", "node_failure"),
        _state("PREEMPTED", "preempted"),
        _state("OUT_OF_MEMORY", "host_memory"),
        _state("CANCELLED", "cancelled"),
        echo("error", "JobState=FAILED", r"(?P<words>JobState=FAILED\b.{0,200})"),
        Pattern("end", r"JobState=COMPLETED\b", ended="done"),
        Pattern("fact", r"^JobId=(?P<job_id>\d{1,12}) "),
    ),
)  # fmt: skip
