"""Logs of several ranks of one run: by a word in their names, or by a bare number and what they tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpc_gpt.readers.foreign_runs.log_names import LogName, is_rank_number, without_number
from hpc_gpt.readers.foreign_runs.main_steps import main_steps, step_span
from hpc_gpt.readers.foreign_runs.run_parts import RunParts
from hpc_gpt.readers.foreign_runs.stated import contradict, united
from hpc_gpt.readers.part import Part


def join_family(bucket: list[RunParts]) -> list[RunParts]:
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
            add_rank(fitting[-1] if len(fitting) == 1 else _nearest(run, fitting), run)
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


def add_rank(story: RunParts, rank: RunParts) -> None:
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


def join_numbered(bucket: list[RunParts], silent: Sequence[LogName] = ()) -> list[RunParts]:
    """Rule 3: ranks that are a bare number in the file's name.

    `silent`: names of the same shape, of files in which nothing is known; ranks they may be all the same.
    """
    joined: set[int] = set()
    for position in range(len(bucket[0].names[0].numbers) - 1, -1, -1):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, run in enumerate(bucket):
            numbers = run.names[0].numbers
            if index not in joined:
                alike[numbers[:position] + numbers[position + 1 :]].append(index)
        for indices in alike.values():
            runs = [bucket[index] for index in indices]
            names = [run.names[0] for run in runs]
            names += [name for name in silent if _differ_at(name, names[0], position)]
            if len(runs) < 2 or not is_rank_number(names, position):
                continue
            story = _ranks_of_one(runs)
            if story is not None:
                story.names[0] = without_number(story.names[0], position)
                for index in indices:
                    if bucket[index] is not story:
                        add_rank(story, bucket[index])
                        joined.add(index)
    return [run for index, run in enumerate(bucket) if index not in joined]


def _differ_at(one: LogName, other: LogName, position: int) -> bool:
    """Whether the numbers of two names of a shape differ in one place alone."""
    return [place for place, pair in enumerate(zip(one.numbers, other.numbers, strict=True)) if len({*pair}) > 1] == [
        position
    ]


def _begins(run: RunParts) -> bool:
    """Whether a program says in it how it was started."""
    return any(part.arguments or part.started for part in run.parts)


def _ranks_of_one(runs: Sequence[RunParts]) -> RunParts | None:
    """The story among runs that are ranks of one, by what they tell; None where they are runs of their own."""
    told = [run for run in runs if run.has_steps]
    first = min(runs, key=lambda run: _rank_of_story([run]))
    others = [run for run in runs if run is not first]
    if any(contradict(run.marks, first.marks) for run in others):
        return None
    if len(told) == 1 or not told:
        own = [run for run in others if _begins(run)]
        # Megatron's first rank dumps the arguments, and its last one tells the steps.
        return first if not own or (len(own) == len(told) == 1 and not _begins(first)) else None
    if len(told) < len(runs):
        return None
    return first if all(_same_steps(run.attempts[-1][0], first.attempts[-1][0]) is False for run in others) else None
