"""Which logs, and which stretches of one, are of one run.

The rule. Two parts that differ in layout, shape or batch are never of one run. Otherwise, in this order:

1. Stretches of one file are attempts of one run, unless the earlier one had finished. Steps that are counted anew in
   each pass over the data are no attempts (epochs.py).
2. Files whose names differ only in a rank or node that a word names (`rank_0`, `node3/`, torchrun's
   `attempt_0/3/stdout.log`) or in the stream (`.out`, `.err`, `.log`) are one run: those without a rank in their name
   where at most one tells of steps, or both tell the same ones.
3. Files whose names differ in one bare number from 0 or 1 up without a gap (`log.7.out`, `name-4711-3.out`) are ranks
   of one run where only one tells of steps and the others dumped no arguments, or all tell the same steps with the same
   losses but not the same times. A number behind `run`, `exp`, `seed` and the like, or an array's, counts runs.
4. Files of one folder and of names that differ only in numbers (job ids, rotations) are attempts of one run where the
   later one's steps go on from the earlier one's, or where the earlier came to no step and both were asked for the
   same, checkpoints in the same folder included.
5. A log without steps joins the run of its job id, or the only run of its folder.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc_gpt.readers.epochs import is_next_epoch, joined
from hpc_gpt.readers.log_names import LogName, is_rank_number, log_name
from hpc_gpt.readers.main_steps import has_steps, log_interval, main_steps, step_span
from hpc_gpt.readers.part import Part
from hpc_gpt.readers.stated import Marks, contradict, marks, united

# Arguments that may differ between attempts of one run: who runs it, where from, for how long, what is told of it.
_OF_AN_ATTEMPT = re.compile(
    r"rank|port|addr|host|node_?list|job|time|date|load|resume|finetune|iteration|consumed|exit|tensorboard|wandb|log_?dir"
    r"|logging_dir|run_name|profil|verbose|debug",
    re.IGNORECASE,
)
_FOLDERS = ("save", "save_dir", "checkpoint_dir", "output_dir", "load")
_LOOK_BACK = 50  # files of a name alike among which an earlier attempt is looked for


@dataclass
class RunParts:
    """The parts of one run: of each attempt all ranks', the one with the steps first.

    `number`: which run of its file. `marks`: layout, shape and batch as far as its parts say.
    """

    names: list[LogName]
    attempts: list[list[Part]]
    marks: Marks
    number: int = 1

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(name.path for name in self.names))

    @property
    def parts(self) -> list[Part]:
        """All parts, the last attempt's first."""
        return [part for attempt in reversed(self.attempts) for part in attempt]

    @property
    def has_steps(self) -> bool:
        return any(has_steps(part) for part in self.parts)

    @property
    def job_ids(self) -> set[str]:
        """Ids of the jobs, from the names and from what the logs say."""
        said = {str(fact.value) for part in self.parts for fact in part.facts.get("job_id", ())}
        return said | {name.job_id for name in self.names if name.job_id}


def group_logs(logs: Sequence[tuple[Path, Sequence[Part]]]) -> list[RunParts]:
    """The runs that logs and their parts make up, in the order of the logs."""
    runs = [run for path, parts in logs for run in _of_one_file(log_name(path), parts)]
    runs = _merged(runs, lambda run: run.names[0].family, _join_family)
    runs = _merged(runs, lambda run: (run.names[0].shape, len(run.names[0].numbers)), _join_numbered)
    runs = _merged(runs, lambda run: run.names[0].shape, _join_attempts)
    return _join_wrappers(runs)


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
        if span and planned and isinstance(planned.value, int | float) and span[1] >= planned.value > 0:
            return True
    return False


def _join_family(bucket: list[RunParts]) -> list[RunParts]:
    """Rule 2: ranks and streams that say so in their names."""
    files: dict[Path, list[RunParts]] = defaultdict(list)
    for run in bucket:
        files[run.names[0].path].append(run)
    if len(files) < 2:
        return bucket
    # The log that tells the story: of most steps, then the lowest rank, then not the errors.
    first = min(files, key=lambda path: _rank_of_story(files[path]))
    stories, rest = list(files[first]), [run for path in files if path != first for run in files[path]]
    for run in rest:
        fitting = [story for story in stories if _is_rank_of(run, story)]
        if fitting:
            _add_rank(fitting[-1] if len(fitting) == 1 else _nearest(run, fitting), run)
        else:
            stories.append(run)
    return stories


def _rank_of_story(runs: Sequence[RunParts]) -> tuple[int, float, bool, str]:
    name = runs[0].names[0]
    steps = sum(_step_count(part) for run in runs for part in run.parts)
    rank = name.rank if name.rank is not None else -1
    return -steps, rank, name.is_errors, str(name.path)


def _step_count(part: Part) -> int:
    found = main_steps(part)
    return found[1].count if found else len(part.progress)


def _is_rank_of(run: RunParts, story: RunParts) -> bool:
    if contradict(run.marks, story.marks):
        return False
    if (run.names[0].labelled and story.names[0].labelled) or not run.has_steps:
        return True
    return any(_same_steps(one, other) is not None for one in run.parts for other in story.parts)


def _same_steps(one: Part, other: Part) -> bool | None:
    """Whether two parts that tell the same steps give the same times too; None where they do not tell the same."""
    first, second = main_steps(one), main_steps(other)
    if first is None or second is None:
        spans = step_span(one), step_span(other)
        return False if (first is None) != (second is None) and spans[0] and spans[1] else None
    mine, theirs = first[1], second[1]
    _, here, there = np.intersect1d(mine["step"], theirs["step"], return_indices=True)
    if not len(here):
        return None
    losses = mine["loss"][here], theirs["loss"][there]
    known = np.isfinite(losses[0]) & np.isfinite(losses[1])
    if known.any() and not np.allclose(losses[0][known], losses[1][known], rtol=1e-3):
        return None
    times = mine["step_s"][here], theirs["step_s"][there]
    timed = np.isfinite(times[0]) & np.isfinite(times[1])
    if not known.any() and not (timed.any() and np.allclose(times[0][timed], times[1][timed], rtol=0.2)):
        return None
    return bool(timed.any() and np.array_equal(times[0][timed], times[1][timed]))


def _nearest(run: RunParts, stories: Sequence[RunParts]) -> RunParts:
    """The story whose time the run's is in, else the last."""
    at = run.parts[0].first_at
    if at is not None:
        for story in reversed(stories):
            begun = story.attempts[0][0].first_at
            if begun is not None and begun <= at:
                return story
    return stories[-1]


def _add_rank(story: RunParts, rank: RunParts) -> None:
    """Puts another rank's parts beside those of the attempts they belong to."""
    story.names += rank.names
    story.marks = united(story.marks, rank.marks)
    alike = len(rank.attempts) == len(story.attempts)
    for index, attempt in enumerate(rank.attempts):
        beside = index if alike else _attempt_at(story, attempt)
        story.attempts[beside] += attempt


def _attempt_at(story: RunParts, attempt: Sequence[Part]) -> int:
    """Which attempt of a story other parts are of: by the time of day, else the last."""
    at = next((part.first_at for part in attempt if part.first_at is not None), None)
    for index in range(len(story.attempts) - 1, 0, -1):
        begun = story.attempts[index][0].first_at
        if at is not None and begun is not None and begun <= at:
            return index
    known = at is not None and len(story.attempts) > 1 and story.attempts[0][0].first_at is not None
    return 0 if known else len(story.attempts) - 1


def _join_numbered(bucket: list[RunParts]) -> list[RunParts]:
    """Rule 3: ranks that are a bare number in the file's name."""
    joined: set[int] = set()
    for position in range(len(bucket[0].names[0].numbers) - 1, -1, -1):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, run in enumerate(bucket):
            numbers = run.names[0].numbers
            if index not in joined:
                alike[numbers[:position] + numbers[position + 1 :]].append(index)
        for indices in alike.values():
            runs = [bucket[index] for index in indices]
            if len(runs) < 2 or not is_rank_number([run.names[0] for run in runs], position):
                continue
            story = _ranks_of_one(runs)
            if story is not None:
                for index in indices:
                    if bucket[index] is not story:
                        _add_rank(story, bucket[index])
                        joined.add(index)
    return [run for index, run in enumerate(bucket) if index not in joined]


def _ranks_of_one(runs: Sequence[RunParts]) -> RunParts | None:
    """The story among runs that are ranks of one, by what they tell; None where they are runs of their own."""
    told = [run for run in runs if run.has_steps]
    first = min(runs, key=lambda run: _rank_of_story([run]))
    others = [run for run in runs if run is not first]
    if any(contradict(run.marks, first.marks) for run in others):
        return None
    if len(told) == 1 or not told:
        own = [run for run in others if any(part.arguments or part.started for part in run.parts)]
        return first if not own else None
    if len(told) < len(runs):
        return None
    return first if all(_same_steps(run.attempts[-1][0], first.attempts[-1][0]) is False for run in others) else None


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
            _add_rank(wanted[0], run)
            joined.add(id(run))
    return [run for run in runs if id(run) not in joined]
