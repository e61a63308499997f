"""Which logs, and which stretches of one, are of one run.

The rule. Two parts that differ in layout, shape or batch are never of one run. Otherwise, in this order:

1. Stretches of one file are attempts of one run, unless the earlier one had finished. Steps that are counted anew in
   each pass over the data are no attempts (epochs.py).
2. Files whose names differ only in a rank or node that a word names (`rank_0`, `node3/`, torchrun's
   `attempt_0/3/stdout.log`) or in the stream (`.out`, `.err`, `.log`) are one run: those without a rank in their name
   where at most one tells of steps, or both tell the same ones.
3. Files whose names differ in one bare number from 0 or 1 up without a gap (`log.7.out`, `name-4711-3.out`) are ranks
   of one run where only one tells of steps and no other dumped arguments, or one other alone did; or all tell the same
   steps with the same losses but not the same times. A number behind `run`, `exp`, `seed` and the like, or an array's,
   counts runs.
4. Files of one folder and of names that differ only in numbers (job ids, rotations) are attempts of one run where the
   later one's steps go on from the earlier one's, or where the earlier came to no step and both were asked for the
   same, checkpoints in the same folder included.
5. A log without steps joins the run of its job id, or the only run of its folder.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from hpc_gpt.readers.foreign_runs.epochs import is_next_epoch, joined
from hpc_gpt.readers.foreign_runs.log_names import LogName, log_name
from hpc_gpt.readers.foreign_runs.main_steps import log_interval, main_steps, reaches, step_span
from hpc_gpt.readers.foreign_runs.rank_logs import add_rank, join_family, join_numbered
from hpc_gpt.readers.foreign_runs.run_parts import RunParts
from hpc_gpt.readers.foreign_runs.stated import Marks, contradict, marks, united
from hpc_gpt.readers.part import Part

# Arguments that may differ between attempts of one run: who runs it, where from, for how long, what is told of it.
_OF_AN_ATTEMPT = re.compile(
    r"(?:^|_)(?:rank|port|addr|address|host|hosts|hostname|nodelist|node_list|job|time|date|load|resume|resumed|finetune"
    r"|iteration|consumed|exit|tensorboard|wandb|log_?dir|logging_dir|run_name|profile|verbose|debug)(?:_|$)",
    re.IGNORECASE,
)
_FOLDERS = ("save", "save_dir", "checkpoint_dir", "output_dir", "load")
_LOOK_BACK = 50  # files of a name alike among which an earlier attempt is looked for


def group_logs(logs: Sequence[tuple[Path, Sequence[Part]]], silent: Sequence[Path] = ()) -> list[RunParts]:
    """The runs that logs and their parts make up, in the order of the logs.

    `silent`: files in which nothing is known. They fill the gaps between the numbers of ranks.
    """
    names: dict[Hashable, list[LogName]] = defaultdict(list)
    for path in silent:
        name = log_name(path)
        names[name.shape, len(name.numbers)].append(name)
    runs = [run for path, parts in logs for run in _of_one_file(log_name(path), parts)]
    runs = _merged(runs, lambda run: run.names[0].family, join_family)
    runs = _merged(runs, _numbered, lambda bucket: join_numbered(bucket, names[_numbered(bucket[0])]))
    runs = _merged(runs, lambda run: run.names[0].shape, _join_attempts)
    return _join_wrappers(runs)


def _numbered(run: RunParts) -> Hashable:
    return run.names[0].shape, len(run.names[0].numbers)


def _merged(
    runs: Iterable[RunParts], key: Callable[[RunParts], Hashable], join: Callable[[list[RunParts]], list[RunParts]]
) -> list[RunParts]:
    """The runs, those of one key put together as `join` decides, each where its first stood."""
    buckets: dict[Hashable, list[RunParts]] = defaultdict(list)
    for run in runs:
        buckets[key(run)].append(run)
    return [run for bucket in buckets.values() for run in (join(bucket) if len(bucket) > 1 else bucket)]


def _of_one_file(name: LogName, parts: Sequence[Part]) -> list[RunParts]:
    runs: list[RunParts] = []
    for part in parts:
        last, own = runs[-1] if runs else None, marks(part)
        if last is not None and not contradict(last.marks, own) and is_next_epoch(last.attempts[-1][0], part):
            last.attempts[-1][0] = joined(last.attempts[-1][0], part)
            last.marks = united(last.marks, own)
            continue
        if last is not None and not _finished(last.attempts[-1]) and _same_run(last, part, own):
            last.attempts.append([part])
            last.marks = united(last.marks, own)
        else:
            runs.append(RunParts([name], [[part]], own, len(runs) + 1))
    return runs


def _same_run(run: RunParts, part: Part, own: Marks) -> bool:
    before = run.attempts[-1][0]
    return not contradict(run.marks, own) and not (
        before.arguments and part.arguments and not _asked_alike(before, part)
    )


def _asked_alike(one: Part, other: Part) -> bool:
    """Whether the dumps agree in every argument both have, but for those of an attempt."""
    both = one.arguments.keys() & other.arguments.keys()
    return not any(one.arguments[key][0] != other.arguments[key][0] and not _OF_AN_ATTEMPT.search(key) for key in both)


def _finished(attempt: Sequence[Part]) -> bool:
    """Whether the program said that it was done, or trained the last step it was to train."""
    for part in attempt:
        span, planned = step_span(part), part.fact("steps_planned")
        if part.totals or any(ended == "done" for ended, _ in part.ends):
            return True
        if planned and isinstance(planned.value, int | float) and reaches(span, planned.value):
            return True
    return False


def _join_attempts(bucket: list[RunParts]) -> list[RunParts]:
    """Rule 4: attempts in files of their own."""
    kept: list[RunParts] = []
    # Of very many logs with names alike each is held against some before it: what takes long is done once.
    spans = {id(part): step_span(part) for run in bucket for part in (run.attempts[0][0], run.attempts[-1][0])}
    for run in sorted(bucket, key=_order):
        near = [each for each in reversed(kept[-_LOOK_BACK:]) if _may_go_on(each, run, spans)]
        earlier = next((each for each in near if _goes_on(each, run)), None)
        if earlier is None:
            kept.append(run)
        else:
            earlier.attempts += run.attempts
            earlier.names += run.names
            earlier.marks = united(earlier.marks, run.marks)
    return kept


def _order(run: RunParts) -> tuple[float, float, tuple[int, ...], str]:
    at = next((part.first_at for part in run.attempts[0] if part.first_at is not None), None)
    name = run.names[0]
    # A rotated log is older the higher its number.
    older = -(name.rotation or 0)
    numbers = tuple(int(number) for number in re.findall(r"\d{1,18}", str(name.path)))
    return at if at is not None else 0.0, older, numbers, str(name.path)


def _may_go_on(earlier: RunParts, later: RunParts, spans: Mapping[int, tuple[float, float] | None]) -> bool:
    """Whether the steps of one do not rule out that it goes on from the other."""
    before, after = spans[id(earlier.attempts[-1][0])], spans[id(later.attempts[0][0])]
    return before is None or (after is not None and before[0] < after[0])


def _goes_on(earlier: RunParts, later: RunParts) -> bool:
    """Whether one goes on where the other ended."""
    one, other = earlier.attempts[-1][0], later.attempts[0][0]
    if earlier.names[0].path.parent != later.names[0].path.parent and "#attempt" not in later.names[0].shape:
        return False
    if earlier.names[0].path == later.names[0].path or contradict(earlier.marks, later.marks):
        return False
    if one.arguments and other.arguments and not _asked_alike(one, other):
        return False
    if one.first_at is not None and other.first_at is not None and other.first_at < one.first_at:
        return False
    before, after = step_span(one), step_span(other)
    if before is None or after is None:
        return before is None and not one.totals and _same_folder(one, other)
    found = main_steps(other)
    interval = log_interval(found[1]) if found else 1
    if not before[0] < after[0] <= before[1] + 2 * interval or _finished(earlier.attempts[-1]):
        return False
    named = earlier.names[0].job_id is not None and earlier.names[0].job_id != later.names[0].job_id
    named = named or "#attempt" in later.names[0].shape
    return named or _same_folder(one, other) or before[1] < after[0]


def _same_folder(one: Part, other: Part) -> bool:
    """Whether both were asked for the same, and to keep their checkpoints in the same folder."""
    for key in _FOLDERS:
        folders = [part.arguments[key][0] for part in (one, other) if key in part.arguments]
        if len(folders) == 2 and folders[0] == folders[1] and folders[0] not in ("", "None"):
            return True
    return False


def _join_wrappers(runs: list[RunParts]) -> list[RunParts]:
    """Rule 5: what a job's script, launcher or scheduler wrote beside the program's own log."""
    told = [run for run in runs if run.has_steps]
    silent = [run for run in runs if not run.has_steps]
    by_folder: dict[Path, list[RunParts]] = defaultdict(list)
    by_job: dict[str, list[RunParts]] = defaultdict(list)
    for run in told:
        by_folder[run.names[0].path.parent].append(run)
        for job_id in run.job_ids:
            by_job[job_id].append(run)
    joined: set[int] = set()
    for run in silent:
        ids = run.job_ids
        of_job = [each for job_id in ids for each in by_job.get(job_id, ())]
        beside = by_folder.get(run.names[0].path.parent, [])
        own = any(part.arguments or part.started for part in run.parts)
        # A run whose logs name no job may be that of any.
        wanted = of_job if of_job else [] if own else [each for each in beside if not (ids and each.job_ids)]
        if len(wanted) == 1 and not contradict(run.marks, wanted[0].marks):
            add_rank(wanted[0], run)
            joined.add(id(run))
    return [run for run in runs if id(run) not in joined]
