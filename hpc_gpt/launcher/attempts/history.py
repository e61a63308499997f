"""The attempts of a run that have ended, by the run folder alone: how each ended, its last saved step, its cost."""

from collections.abc import Sequence
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import MEGATRON, command_of, newest_checkpoint, newest_step
from hpc_gpt.core.ends.began_again import describe_begin_again
from hpc_gpt.core.ends.failures import QUICK_S
from hpc_gpt.core.ends.program_end import last_logged, last_planned_step
from hpc_gpt.core.ends.run_state import facts_before, is_lost_here
from hpc_gpt.core.ends.state import class_of
from hpc_gpt.core.files import read_text
from hpc_gpt.core.processes.heartbeats import end_time_of, gpu_seconds
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.launcher.attempts.judge import EndedAttempt


def read_history(
    run: RunFolder, gpus: int, now: float, over: int | None = None, elapsed_s: float | None = None
) -> list[EndedAttempt]:
    """Reads the attempts of a run that have ended, first to last. `gpus`: for an attempt that does not state its own.

    An attempt without a written end has ended if a later attempt of its job has begun, if its process on this machine
    is gone, or if its number is `over`; `elapsed_s`: how long that last one has had its job, if that is known.
    """
    attempts = run.attempts()
    resumed = [attempt.trainer().get("resumed_step") for attempt in attempts]
    past: list[EndedAttempt] = []
    saved = 0
    command = command_of(run)
    # If a script names no checkpoints and logs no steps, its exit code is all that is known.
    logged = command is not None and command.checkpoints is None
    is_script = command is not None and command.script is not None and logged
    planned = (command and run.resolved().train.steps) or 0
    blind = is_script and not any(attempt.last_metrics() for attempt in attempts)
    for index, attempt in enumerate(attempts):
        end, verdict = attempt.ended(), attempt.verdict()
        following = attempt.next_of_job(attempts[index + 1 :])
        if not (end or verdict or following or attempt.number == over or is_lost_here(run, attempt)):
            continue
        if logged:
            base, saved = last_logged(attempts[:index]), last_logged(attempts[: index + 1])
        else:
            from_step = resumed[index]
            base = saved if from_step is None else from_step
            saved = _saved_by(run, verdict, resumed[index + 1 :], base)
        left = now if attempt.number == over else end_time_of(attempt)
        left = left or (following.started().get("started") if following else None) or now
        ended = class_of(facts_before(run, attempt, attempts[index + 1 :])) or "unknown"
        complete = last_planned_step(attempt, planned) if command is not None else 0
        if not logged and saved < complete:
            complete = 0
        past.append(
            EndedAttempt(
                number=attempt.number,
                ended=ended,
                cause=verdict.get("cause") or end.get("cause"),
                node=verdict.get("node"),
                job_id=attempt.job_id or None,
                saved=saved,
                resumed=base,
                gpu_seconds=gpu_seconds(attempt, gpus, left, elapsed_s if attempt.number == over else None, following),
                over=left,
                unseen=blind and ended == "walltime" and not saved,
                quick=_is_quick(attempt),
                complete=complete,
                stopped=verdict.get("go_on") is False and ended != "refused",
                logged=logged,
                began_again=describe_begin_again(run, attempt) if command is not None else None,
                start=attempt.job_start if attempt.job_id else None,
            )
        )
    return past


def _is_quick(attempt: Attempt) -> bool:
    """Whether the attempt's job script exited with an error, not by a signal, within seconds and before a step."""
    end = attempt.script_exit()
    return 0 < end.get("code", 0) <= 128 and end.get("seconds", QUICK_S) < QUICK_S and not attempt.last_metrics()


def newest_saved(run: RunFolder) -> int | None:
    """The step of the newest checkpoint that is marked complete, 0 without one, None if only the program knows its
    checkpoints; its files are not checked."""
    if (command := command_of(run)) is not None:
        return newest_checkpoint(run, command)[1]
    try:
        megatron = int(read_text(run.checkpoints / MEGATRON))
    except (OSError, ValueError):
        megatron = 0
    return max(megatron, newest_step(run) or 0)


def _saved_by(run: RunFolder, verdict: dict[str, Any], later: Sequence[int | None], base: int) -> int:
    """The step of the newest complete checkpoint when an attempt ended: as its verdict notes, else as the next attempt
    found it, else the newest one now."""
    if (noted := verdict.get("saved_step")) is not None:
        return int(noted)
    resumed = next((step for step in later if step is not None), None)
    return max(base, (newest_saved(run) or 0) if resumed is None else resumed)
