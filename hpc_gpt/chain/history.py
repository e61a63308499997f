"""What a run's attempts were, from the files of its folder alone: how each ended, how far it saved, what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.runs.bad_nodes import NODE
from hpc_gpt.runs.lineage import newest_step
from hpc_gpt.runs.run_folder import Attempt, RunFolder, seconds_of
from hpc_gpt.runs.standing import read_end
from hpc_gpt.runs.state import class_of
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import read_json

# Of an attempt's time: what trains less is mostly starts and saves.
HARDLY = 0.1
_BY_SCHEDULER = ("walltime", "preempted", "requeued")
# Where Megatron-LM keeps its own, and the number of the newest.
_MEGATRON = "megatron/latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Past:
    """One attempt that is over. `saved` is the step of the newest complete checkpoint when it ended, `resumed` that of
    the one it resumed from; 0 without one. `seconds` is how long it had its `gpus`.

    `ended` is a class of state.ENDED; `node` is at fault for it, None without one.
    """

    number: int
    ended: str
    cause: str | None = None
    node: str | None = None
    job_id: str | None = None
    saved: int = 0
    resumed: int = 0
    seconds: float = 0.0
    gpus: int = 0
    over: float = 0.0

    @property
    def progressed(self) -> bool:
        return self.saved > self.resumed

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600


def read_history(run: RunFolder, gpus: int, now: float, over: int | None = None) -> list[Past]:
    """Every attempt of a run that is over, first to last. `gpus` is what an attempt has that does not say it.

    An attempt that has left no word counts as over when a later one of its job has begun, or if its number is `over`.
    """
    attempts = run.attempts()
    starts = [attempt.started() for attempt in attempts]
    resumed = [_step(attempt.folder, "trainer.json", "resumed_step") for attempt in attempts]
    past: list[Past] = []
    saved = 0
    for index, attempt in enumerate(attempts):
        end, verdict = attempt.ended(), attempt.verdict()
        later = [start for start in starts[index + 1 :] if start.get("job_id") == starts[index].get("job_id")]
        if not end and not verdict and not later and attempt.number != over:
            continue
        found = resumed[index]
        base = saved if found is None else found
        saved = _saved_by(run, verdict, resumed[index + 1 :], base)
        began = seconds_of(starts[index].get("started"))
        left = now if attempt.number == over else seconds_of(verdict.get("time")) or seconds_of(end.get("time"))
        left = left or (seconds_of(later[0].get("started")) if later else 0.0) or now
        own = starts[index].get("gpus")
        job_id = _text(starts[index].get("job_id"))
        facts = replace(read_end(attempt).facts, again=bool(later), cancelled=run.is_cancelled(job_id))
        past.append(
            Past(
                number=attempt.number,
                ended=class_of(facts) or "unknown",
                cause=_text(verdict.get("cause") or end.get("cause")),
                node=node if isinstance(node := verdict.get("node"), str) and NODE.fullmatch(node) else None,
                job_id=job_id,
                saved=saved,
                resumed=base,
                seconds=max(0.0, left - began) if began else 0.0,
                gpus=own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else gpus,
                over=left,
            )
        )
    return past


def newest_saved(run: RunFolder) -> int:
    """The step of the run's newest complete checkpoint, 0 without one. Asks only which is marked complete."""
    try:
        megatron = int((run.checkpoints / _MEGATRON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        megatron = 0
    return max(megatron, newest_step(run) or 0)


def gpus_of(resolved: Resolved) -> int:
    """GPUs that a job of the run is given, the spare nodes' too."""
    return resolved.gpus + (resolved.job.spare_nodes or 0) * resolved.ranks_per_node


def gpu_hours(past: Sequence[Past]) -> float:
    """GPU-hours of all attempts, those included that stepped aside."""
    return sum(each.gpu_hours for each in past)


def hardly_trained(attempts: Sequence[Attempt]) -> str | None:
    """In words, of two attempts and more that had to leave: that each trained less than a tenth of its time; else None.

    What an attempt trained is its steps, each taken to be as long as its last. Why others failed is said elsewhere.
    """
    times = []
    over = [attempt for attempt in attempts if attempt.ended().get("ended") in _BY_SCHEDULER]
    for attempt in over:
        began = seconds_of(attempt.started().get("started"))
        seconds = seconds_of(attempt.ended().get("time")) - began
        last = attempt.last_metrics()
        steps = seconds_of(last.get("step")) - (_step(attempt.folder, "trainer.json", "resumed_step") or 0)
        trained = max(0.0, steps * seconds_of(last.get("step_s")))
        if not began or not trained < HARDLY * seconds:
            return None
        times.append((trained / seconds, trained, seconds))
    if len(times) < 2:
        return None
    _, trained, seconds = max(times)
    return (
        f"its {len(over)} attempts each trained less than a tenth of their time, {trained:.0f} s of {seconds:.0f} s at "
        "most: more job.time, or a smaller job.signal_lead_s, leaves them more"
    )


def _saved_by(run: RunFolder, verdict: dict[str, Any], later: Sequence[int | None], base: int) -> int:
    """The newest complete step when an attempt ended: as was noted then, else what the next one found, else what is
    there now."""
    noted = verdict.get("saved_step")
    if isinstance(noted, int) and not isinstance(noted, bool):
        return noted
    found = next((step for step in later if step is not None), None)
    return max(base, newest_saved(run) if found is None else found)


def _step(folder: Path, name: str, key: str) -> int | None:
    found = read_json(folder / name).get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
