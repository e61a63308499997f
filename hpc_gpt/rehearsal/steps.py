"""Steps: what srun starts. One process for each rank, in a session of its own, as under slurmstepd."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.rehearsal.environment import exported, rank_environment, task_counts
from hpc_gpt.rehearsal.hosts import compress_hosts, expand_hosts
from hpc_gpt.rehearsal.job import Job, Rank, Step
from hpc_gpt.rehearsal.processes import signal_session
from hpc_gpt.rehearsal.request import RequestFault, output_path


@dataclass(frozen=True)
class StepStart:
    """One srun: its options by their long names, its command, where it was called, and its stdout and stderr."""

    options: Mapping[str, str]
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    out: int
    err: int


def start_step(
    job: Job, start: StepStart, always: Mapping[str, str], devices: Callable[[Job, int], Mapping[str, str]]
) -> Step:
    """Starts all ranks of a step. Raises RequestFault, in srun's words, for a step that the job has no room for."""
    nodes, shares = _places(job, start)
    folder = start.options.get("chdir", start.folder)
    step = Step(job.id, job.next_step, [], os.dup(start.err), _kills(start.options))
    job.next_step += 1
    # A GPU that the job has is its ranks' as well: by the node's place in the job.
    rank = 0
    with contextlib.ExitStack() as files:
        for position, node in enumerate(nodes):
            for _ in range(shares[position]):
                environment = {
                    **exported(start.environment, start.options.get("export", "ALL"), list(always)),
                    **always,
                    **rank_environment(job, step.id, nodes, shares, rank, position),
                    **devices(job, job.nodes.index(node)),
                }
                out = _output(files, job, step, start, rank, node, position, "output", start.out)
                err = _output(files, job, step, start, rank, node, position, "error", None)
                process, code = None, None
                try:
                    process = subprocess.Popen(
                        list(start.command),
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err if err is not None else out if "output" in start.options else start.err,
                        start_new_session=True,
                    )
                except OSError as fault:
                    code = fault.errno or 1
                    say(step, f"slurmstepd: error: execve(): {start.command[0]}: {fault.strerror}")
                step.ranks.append(Rank(rank, node, process, code))
                rank += 1
    job.steps.append(step)
    return step


def watch_step(step: Step, kill_wait_s: float, now: float) -> None:
    """One look at a step: ranks that are gone are told, others ended where one that failed takes them along.

    A step that has ended is closed: the number of its stderr may be another file's by now.
    """
    if step.ended.is_set():
        return
    for rank in step.ranks:
        if rank.code is None and rank.process is not None and (code := rank.process.poll()) is not None:
            rank.code, rank.number_of_signal = (code, 0) if code >= 0 else (128 - code, -code)
    failed = [rank for rank in step.ranks if rank.code and rank.number not in step.told]
    left = [rank for rank in step.ranks if rank.code is None]
    # Of ranks that are being ended together one line a node is said, once all are gone.
    if failed and not (step.terminated and left):
        _tell(step, failed)
    if failed and left and step.kill_on_bad_exit and not step.terminated:
        say(step, f"srun: launch/slurm: _step_signal: Terminating StepId={step.name}")
        end_step(step, "", now + kill_wait_s)
    if step.kill_at is not None and now >= step.kill_at:
        for rank in left:
            if rank.session is not None:
                signal_session(rank.session, signal.SIGKILL)
    if not left:
        if any(rank.number_of_signal == signal.SIGTERM for rank in step.ranks):
            say(step, f"srun: Force Terminated StepId={step.name}")
        with contextlib.suppress(OSError):
            os.close(step.errors)
        step.ended.set()


def end_step(step: Step, why: str, kill_at: float | None) -> None:
    """SIGCONT and SIGTERM to all its ranks, and the line that slurmstepd writes. The job may have its own SIGKILL."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
    say(step, f"slurmstepd: error: *** STEP {step.name} ON {step.ranks[0].node} CANCELLED AT {stamp}{why} ***")
    step.terminated = True
    if kill_at is not None:
        step.kill_at = kill_at
    for rank in step.ranks:
        if rank.code is None and rank.session is not None:
            signal_session(rank.session, signal.SIGTERM)
            signal_session(rank.session, signal.SIGCONT)


def say(step: Step, line: str) -> None:
    """A line on srun's stderr."""
    with contextlib.suppress(OSError):
        os.write(step.errors, (line + "\n").encode())


def _tell(step: Step, failed: Sequence[Rank]) -> None:
    """How ranks ended, in srun's words: those of one node that ended alike on one line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in failed:
        step.told.add(rank.number)
        words = (
            signal.strsignal(rank.number_of_signal) if rank.number_of_signal else f"Exited with exit code {rank.code}"
        )
        groups.setdefault((rank.node, str(words)), []).append(rank.number)
    for (node, words), ranks in groups.items():
        named = re.sub(r"[\[\]]", "", compress_hosts([str(number) for number in ranks]))
        say(step, f"srun: error: {node}: task{'s' if len(ranks) > 1 else ''} {named}: {words}")


def _places(job: Job, start: StepStart) -> tuple[list[str], list[int]]:
    """(the step's nodes, the ranks on each) by srun's options, else the job's."""
    options = start.options
    nodes = list(job.nodes)
    if "exclude" in options:
        nodes = [node for node in nodes if node not in expand_hosts(options["exclude"])]
    wanted = expand_hosts(options["nodelist"]) if "nodelist" in options else []
    for node in wanted:
        if node not in nodes:
            raise RequestFault(f"Unable to create step for job {job.id}: Requested node configuration is not available")
    asked = int(options["nodes"].partition("-")[0]) if "nodes" in options else None
    per_node = int(options["ntasks-per-node"]) if "ntasks-per-node" in options else None
    ntasks = int(options["ntasks"]) if "ntasks" in options else None
    if wanted and (asked is None or asked <= len(wanted)):
        nodes = wanted
    if asked is None and ntasks is not None:
        asked = min(len(nodes), -(-ntasks // per_node) if per_node else ntasks)
    count = asked or len(nodes)
    if count > len(nodes):
        raise RequestFault(f"Unable to create step for job {job.id}: Requested node configuration is not available")
    nodes = sorted([*wanted, *(node for node in nodes if node not in wanted)][:count], key=job.nodes.index)
    if ntasks is None:
        per_node = per_node or job.request.ntasks_per_node
        ntasks = per_node * count if per_node else max(count, job.request.ntasks if count == len(job.nodes) else count)
    room = max(job.request.ntasks, len(job.nodes) * (job.request.ntasks_per_node or 1))
    if ntasks > room and "overcommit" not in options:
        raise RequestFault(f"Unable to create step for job {job.id}: More processors requested than permitted")
    return nodes, task_counts(ntasks, count, per_node)


def _kills(options: Mapping[str, str]) -> bool:
    return options.get("kill-on-bad-exit", "0") in ("", "1")


def _output(
    files: contextlib.ExitStack,
    job: Job,
    step: Step,
    start: StepStart,
    rank: int,
    node: str,
    position: int,
    option: str,
    otherwise: int | None,
) -> int | None:
    """A rank's stdout or stderr: the file that srun's option names, else as srun has it."""
    pattern = start.options.get(option)
    if pattern is None:
        return otherwise
    if pattern == "none":
        pattern = os.devnull
    fields = {"j": str(job.id), "J": step.name, "s": str(step.id), "t": str(rank), "n": str(position), "N": node,
              "x": job.request.name, "u": job.user}  # fmt: skip
    path = Path(start.folder) / output_path(pattern, fields)
    return files.enter_context(open(path, "ab")).fileno()
