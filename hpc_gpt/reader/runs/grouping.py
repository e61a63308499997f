"""Groups logs, and parts of logs, into runs.

Two parts that differ in layout, shape or batch never belong to one run. Otherwise, in this order:

1. Of the parts of one file, where the steps fall back: (a) steps that fall back again and again are of several
   trainings at once (`StepOrder`), one run without a curve. (b) If a program restarts its step count in each epoch, the
   epochs are one attempt (`is_next_epoch`). (c) A part is an attempt of the run before it, unless that had finished, if
   that failed, or the part resumes, or begins above the other's first step (`_is_next_start`). (d) Else it is another
   run, and so is one with another number of parameters, or that begins again with another number of planned steps or
   after a framed line (`=== run 2 ===`).
2. Files whose names differ only in a labelled rank or node (`rank_0`, `node3/`, torchrun's `attempt_0/3/stdout.log`) or
   in the stream (`.out`, `.err`, `.log`) are one run. Without a rank in their names they are one run if at most one of
   them has steps, or both have the same steps.
3. Files whose names differ in one bare number, from 0 or 1 up without a gap (`log.7.out`, `name-4711-3.out`), are ranks
   of one run if only one has steps and at most one other dumped arguments, or if all have the same steps with the same
   losses but different times. A number after `run`, `job`, `exp`, `seed` and the like, or of an array task, belongs to
   a run, not a rank.
4. Files of one folder whose names differ only in numbers (job ids, rotations) are attempts of one run if the later one
   continues the steps of the earlier one, or if the earlier one has no step and both have the same arguments,
   including the checkpoint folder.
5. A log without steps joins the run of its job id, else the only run of its folder, unless it states its own settings
   of a training, or its name differs in numbers only.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpc_gpt.reader.failures.part_failures import last_line
from hpc_gpt.reader.lines.growing_parts import BARS
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.step_order import StepOrder
from hpc_gpt.reader.runs.discovery import LogName, is_rank_number, log_name, without_number
from hpc_gpt.reader.runs.epochs import is_next_epoch, join_epochs, join_parts, settle_epochs
from hpc_gpt.reader.runs.facts import Marks, contradict, marks, united
from hpc_gpt.reader.runs.log_steps import (
    AT_ONCE,
    add_losses_beside,
    drop_other_bars,
    has_steps,
    log_interval,
    main_steps,
    reaches,
    step_span,
)

# Arguments that may differ between attempts of one run: ranks, hosts, checkpoints to load, time limits, reporting.
_OF_AN_ATTEMPT = re.compile(
    r"(?:^|_)(?:rank|port|addr|address|host|hosts|hostname|nodelist|node_list|job|time|date|load|resume|resumed|finetune"
    r"|iteration|consumed|exit|tensorboard|wandb|log_?dir|logging_dir|run_name|profile|verbose|debug)(?:_|$)",
    re.IGNORECASE,
)
_FOLDERS = ("save", "save_dir", "checkpoint_dir", "output_dir", "load")
_PLANS = ("steps_planned", "global_batch", "samples_per_epoch", "params")
_MIN_INTERLEAVED = 4  # parts
_RANKS = ("gpus", "gpus_said", "dp")
_LOOK_BACK = 50  # files with similar names that are searched for an earlier attempt


@dataclass(slots=True)
class RunParts:
    """The parts of one run: per attempt the parts of all ranks, the one with the steps first.

    `marks`: layout, shape and batch, as far as its parts state them. `number`: its place among the runs of its file.
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
        """All parts, the last attempt first."""
        return [part for attempt in reversed(self.attempts) for part in attempt]

    @property
    def has_steps(self) -> bool:
        return any(has_steps(part) for part in self.parts)

    @property
    def job_ids(self) -> set[str]:
        """The ids of its jobs, from file names and logs."""
        logged = {str(fact.value) for part in self.parts for fact in part.facts.get("job_id", ())}
        return logged | {name.job_id for name in self.names if name.job_id}


def group_logs(logs: Sequence[tuple[Path, Sequence[Part]]], silent: Sequence[Path] = ()) -> list[RunParts]:
    """The runs of logs and their parts, in the order of the logs.

    `silent`: files without a known line. They fill gaps in the numbers of ranks.
    """
    names: dict[Hashable, list[LogName]] = defaultdict(list)
    for path in silent:
        name = log_name(path)
        names[name.shape, len(name.numbers)].append(name)
    runs = [run for path, parts in logs for run in _of_one_file(log_name(path), parts)]
    runs = _merged(runs, lambda run: run.names[0].family, _join_family)
    runs = _merged(runs, _numbered, lambda bucket: _join_numbered(bucket, names[_numbered(bucket[0])]))
    runs = _join_wrappers(_merged(runs, lambda run: run.names[0].shape, _join_attempts))
    for run in runs:
        drop_other_bars(run.parts)
    return runs


def _numbered(run: RunParts) -> Hashable:
    return run.names[0].shape, len(run.names[0].numbers)


def _merged(
    runs: Iterable[RunParts], key: Callable[[RunParts], Hashable], join: Callable[[list[RunParts]], list[RunParts]]
) -> list[RunParts]:
    """The runs, after `join` has joined those with the same key; a joined run takes the place of its first."""
    buckets: dict[Hashable, list[RunParts]] = defaultdict(list)
    for run in runs:
        buckets[key(run)].append(run)
    return [run for bucket in buckets.values() for run in (join(bucket) if len(bucket) > 1 else bucket)]


def _of_one_file(name: LogName, parts: Sequence[Part]) -> list[RunParts]:
    runs: list[RunParts] = []
    parts = one_if_interleaved(parts)
    last_span: tuple[float, float] | None = None  # of the part before, alone
    with_steps = [id(part) for part in parts if part.steps or part.progress]
    has_ranks = any(fact.value > 1 for part in parts for name in _RANKS for fact in part.facts.get(name, ()))
    for part in parts:
        settle_epochs(part)
        add_losses_beside(part)
        span = step_span(part)
        is_as_long = _is_as_long(last_span, span, part, id(part) in with_steps[-1:])
        last_span = span
        last, part_marks = runs[-1] if runs else None, marks(part)
        before = last.attempts[-1][0] if last else part
        is_start = part.started or bool(part.arguments)
        is_as_before = last is not None and has_ranks and not is_start and span == step_span(before)
        if last is not None and is_as_before and _has_same_losses(before, part):
            last.attempts[-1].append(part)  # the steps that another rank had printed, in a buffer of its own
            continue
        if last is None or contradict(last.marks, part_marks) or _of_another_training(before, part):
            runs.append(RunParts([name], [[part]], part_marks, len(runs) + 1))
            continue
        if is_next_epoch(before, part, is_as_long):
            last.attempts[-1][0] = join_epochs(before, part)
        elif not _finished(last.attempts[-1]) and _is_next_start(before, part):
            last.attempts.append([part])
        else:
            runs.append(RunParts([name], [[part]], part_marks, len(runs) + 1))
            continue
        last.marks = united(last.marks, part_marks)
    return runs


def _has_same_losses(one: Part, other: Part) -> bool:
    """Whether two parts have the same steps with the same losses."""
    tables = [main[1] for part in (one, other) if (main := main_steps(part)) is not None]
    has_losses = len(tables) == 2 and all(np.isfinite(table["loss"]).any() for table in tables)
    return has_losses and _same_steps(one, other) is not None


def one_if_interleaved(parts: Sequence[Part]) -> Sequence[Part]:
    """The parts of a file; if its steps are those of several trainings at once, one part without them."""
    return [_at_once(parts)] if _are_interleaved(parts) else parts


def _are_interleaved(parts: Sequence[Part]) -> bool:
    """Whether the steps of a file are those of several trainings at once."""
    lines = Counter[str]()
    for part in parts:
        lines.update({name: len(steps) for name, steps in part.steps.items()})
    if len(parts) < _MIN_INTERLEAVED or not lines:
        return False
    dialect, order = max(lines, key=lambda name: (name != BARS, lines[name])), StepOrder()
    for before, part in zip([None, *parts], parts, strict=False):
        if part.started or (before is not None and _has_failed(before)):
            order.begin()
        for step in part.steps[dialect]["step"].tolist() if dialect in part.steps else ():
            if math.isfinite(step):
                order.take(step)
    return order.is_interleaved


def _at_once(parts: Sequence[Part]) -> Part:
    """The parts of trainings that ran at the same time as one, without what cannot be told apart."""
    joined = functools.reduce(join_parts, parts)
    count = sum(steps.count for part in parts for steps in part.steps.values())
    left_out = {**joined.left_out, AT_ONCE: count}
    return replace(
        joined, steps={}, progress=[], evals=[], eval_s=[], totals={}, timers_s={}, left_out=left_out, interleaved=True
    )


def _is_as_long(
    before: tuple[float, float] | None, span: tuple[float, float] | None, part: Part, is_last: bool
) -> bool:
    """Whether the steps of a part end where those of the part before it did; those of the last part may be cut off."""
    if before is None or span is None:
        return True
    main = main_steps(part)
    interval = log_interval(main[1]) if main else 1
    return abs(span[1] - before[1]) < interval or (is_last and span[1] < before[1])


def _is_next_start(one: Part, other: Part) -> bool:
    """Whether a part of a file is another start of the training before it: that one has no steps or failed, or this
    one resumes, has the checkpoint of the other, or begins above its first step. Both must be of one program with the
    same arguments."""
    if not _asked_alike(one, other) or _other_program(one, other):
        return False
    spans, main = (step_span(one), step_span(other)), main_steps(other)
    interval = log_interval(main[1]) if main else 1
    if None in spans:
        spans, interval = (_epoch_span(one), _epoch_span(other)), 0
    before, after = spans
    if before is None or after is None or _has_failed(one) or _same_folder(one, other):
        return True
    resumes = any(name in other.facts for name in ("resumes", "resumed_step"))
    return resumes or after[0] > max(before[0], interval)


def _epoch_span(part: Part) -> tuple[float, float] | None:
    """Returns (first, last) epoch of a part's lines of steps; None without any."""
    main = main_steps(part)
    epochs = main[1]["epoch"][np.isfinite(main[1]["epoch"])] if main else np.zeros(0)
    return (float(epochs[0]), float(epochs[-1])) if len(epochs) else None


def _has_failed(part: Part) -> bool:
    """Whether a failure, or an end before all steps, follows the last step of a part."""
    ends = [failure.place.line for failure in part.failures]
    ends += [place.line for ended, place in part.ends if ended != "done"]
    return max(ends, default=0) > last_line(part, 1)


def _other_program(one: Part, other: Part) -> bool:
    """Whether both have lines of steps, but no program prints lines in both."""
    return bool(one.steps and other.steps) and not one.steps.keys() & other.steps.keys()


def _of_another_training(one: Part, other: Part) -> bool:
    """Whether a program has another number of parameters than before, or begins again with another number of planned
    steps, or after a banner although nothing failed."""
    before, after = step_span(one), step_span(other)
    again = before is not None and after is not None and after[0] <= before[0]
    if again and other.banner and not one.failures and not one.ends:
        return True
    for name in ("params", *(["steps_planned"] if again else [])):
        counts = [{fact.value for fact in part.facts.get(name, ())} for part in (one, other)]
        by = [{fact.dialect for fact in part.facts.get(name, ())} for part in (one, other)]
        if by[0] & by[1] and not counts[0] & counts[1]:
            return True
    return False


def _asked_alike(one: Part, other: Part) -> bool:
    """Whether the dumps agree in all arguments that both have, except those that may differ between attempts."""
    both = one.arguments.keys() & other.arguments.keys()
    return not any(one.arguments[key][0] != other.arguments[key][0] and not _OF_AN_ATTEMPT.search(key) for key in both)


def _finished(attempt: Sequence[Part]) -> bool:
    """Whether the program said that it was done, or trained the last planned step."""
    for part in attempt:
        span, planned = step_span(part), part.fact("steps_planned")
        if part.totals or any(ended == "done" for ended, _ in part.ends):
            return True
        if planned and isinstance(planned.value, int | float) and reaches(span, planned.value):
            return True
    return False


def _join_attempts(bucket: list[RunParts]) -> list[RunParts]:
    """Rule 4: attempts in files of their own."""
    joined: list[RunParts] = []
    # Each of very many similar logs is compared with several before it, so the spans are computed once.
    spans = {id(part): step_span(part) for run in bucket for part in (run.attempts[0][0], run.attempts[-1][0])}
    for run in _in_order(bucket):
        earlier = next(
            (run_before for run_before in reversed(joined[-_LOOK_BACK:]) if _continues(run_before, run, spans)), None
        )
        if earlier is None:
            joined.append(run)
        else:
            earlier.attempts += run.attempts
            earlier.names += run.names
            earlier.marks = united(earlier.marks, run.marks)
    return joined


def _in_order(bucket: Sequence[RunParts]) -> list[RunParts]:
    """The runs by time; the runs of one file keep their order, at the time of the first that has one."""
    files: dict[Path, list[RunParts]] = defaultdict(list)
    for run in bucket:
        files[run.names[0].path].append(run)
    first = {path: next((run for run in runs if _begun(run) is not None), runs[0]) for path, runs in files.items()}
    return [run for path in sorted(files, key=lambda path: _order(first[path])) for run in files[path]]


def _order(run: RunParts) -> tuple[float, float, tuple[int, ...], str]:
    at = _begun(run)
    name = run.names[0]
    # The higher the number of a rotated log, the older it is.
    older = -(name.rotation or 0)
    numbers = tuple(int(number) for number in re.findall(r"\d{1,18}", str(name.path)))
    return at if at is not None else 0.0, older, numbers, str(name.path)


def _begun(run: RunParts) -> float | None:
    """The first time of day of a run."""
    return next((part.first_at for part in run.attempts[0] if part.first_at is not None), None)


def _continues(earlier: RunParts, later: RunParts, spans: Mapping[int, tuple[float, float] | None]) -> bool:
    """Whether `later` is an attempt that continues where `earlier` ended. `spans`: the spans of parts, by id."""
    one, other = earlier.attempts[-1][0], later.attempts[0][0]
    before, after = spans[id(one)], spans[id(other)]
    if before is not None and (after is None or not before[0] < after[0]):
        return False
    if contradict(earlier.marks, later.marks) or not _asked_alike(one, other) or _of_another_training(one, other):
        return False
    places, again = (earlier.names[0].path, later.names[0].path), "#attempt" in later.names[0].shape
    if places[0] == places[1] or (places[0].parent != places[1].parent and not again):
        return False
    if one.first_at is not None and other.first_at is not None and other.first_at < one.first_at:
        return False
    if before is None or after is None:
        return not one.totals and _same_folder(one, other)
    main = main_steps(other)
    interval = log_interval(main[1]) if main else 1
    if after[0] > before[1] + 2 * interval or _finished(earlier.attempts[-1]):
        return False
    named = earlier.names[0].job_id is not None and earlier.names[0].job_id != later.names[0].job_id
    return named or again or _same_folder(one, other) or before[1] < after[0]


def _same_folder(one: Part, other: Part) -> bool:
    """Whether both keep their checkpoints in the same folder."""
    for key in _FOLDERS:
        folders = [part.arguments[key][0] for part in (one, other) if key in part.arguments]
        if len(folders) == 2 and folders[0] == folders[1] and folders[0] not in ("", "None"):
            return True
    return False


def _join_wrappers(runs: list[RunParts]) -> list[RunParts]:
    """Rule 5: logs of a job's script, launcher or scheduler in addition to the program's own log."""
    by_folder: dict[Path, list[RunParts]] = defaultdict(list)
    by_job: dict[str, list[RunParts]] = defaultdict(list)
    silent = []
    for run in runs:
        if not run.has_steps:
            silent.append(run)
            continue
        by_folder[run.names[0].path.parent].append(run)
        for job_id in run.job_ids:
            by_job[job_id].append(run)
    joined: set[int] = set()
    for run in silent:
        ids = run.job_ids
        of_job = [candidate for job_id in ids for candidate in by_job.get(job_id, ())]
        in_folder = by_folder.get(run.names[0].path.parent, [])
        # A run whose logs name no job may belong to any job.
        in_folder = [
            candidate for candidate in in_folder if not (ids and candidate.job_ids) and not _is_another(run, candidate)
        ]
        wanted = of_job if of_job else [] if _begins(run) else in_folder
        if len(wanted) == 1 and not contradict(run.marks, wanted[0].marks):
            _add_rank(wanted[0], run)
            joined.add(id(run))
    return [run for run in runs if id(run) not in joined]


def _join_family(bucket: list[RunParts]) -> list[RunParts]:
    """Rule 2: logs whose names label a rank or a stream."""
    files: dict[Path, list[RunParts]] = defaultdict(list)
    for run in bucket:
        files[run.names[0].path].append(run)
    if len(files) < 2:
        return bucket
    # The main log has the most steps, then the lowest rank, then is not standard error.
    first = min(files, key=lambda path: _main_first(files[path]))
    main_logs, others = list(files[first]), [run for path in files if path != first for run in files[path]]
    for run in others:
        fitting = [main for main in main_logs if _is_rank_of(run, main)]
        if fitting:
            _add_rank(fitting[-1] if len(fitting) == 1 else _nearest(run, fitting), run)
        else:
            main_logs.append(run)
    return main_logs


def _main_first(runs: Sequence[RunParts]) -> tuple[int, float, bool, str]:
    name = runs[0].names[0]
    steps = sum(_step_count(part) for run in runs for part in run.parts)
    rank = name.rank if name.rank is not None else -1
    return -steps, rank, name.is_errors, str(name.path)


def _step_count(part: Part) -> int:
    main = main_steps(part)
    return main[1].count if main else len(part.progress)


def _is_rank_of(run: RunParts, main: RunParts) -> bool:
    if contradict(run.marks, main.marks):
        return False
    if (run.names[0].labelled and main.names[0].labelled) or not run.has_steps:
        return True
    return any(_same_steps(one, other) is not None for one in run.parts for other in main.parts)


def _same_steps(one: Part, other: Part) -> bool | None:
    """True if two parts have the same steps and times, False if only the times differ, or if one has the bars of the
    other's lines; None if the steps differ."""
    first, second = main_steps(one), main_steps(other)
    if first is None or second is None:
        is_beside = (first is None) != (second is None)
        return False if is_beside and step_span(one if first is None else other) else None
    mine, theirs = first[1], second[1]
    _, rows, other_rows = np.intersect1d(mine["step"], theirs["step"], return_indices=True)
    if not len(rows):
        return None
    losses = mine["loss"][rows], theirs["loss"][other_rows]
    finite = np.isfinite(losses[0]) & np.isfinite(losses[1])
    if finite.any() and not np.allclose(losses[0][finite], losses[1][finite], rtol=1e-3):
        return None
    times = mine["step_s"][rows], theirs["step_s"][other_rows]
    timed = np.isfinite(times[0]) & np.isfinite(times[1])
    if not finite.any() and not (timed.any() and np.allclose(times[0][timed], times[1][timed], rtol=0.2)):
        return None
    return bool(timed.any() and np.array_equal(times[0][timed], times[1][timed]))


def _nearest(run: RunParts, main_logs: Sequence[RunParts]) -> RunParts:
    """The last main log that began before the run, else the last main log."""
    at = run.parts[0].first_at
    if at is not None:
        for main in reversed(main_logs):
            begun = main.attempts[0][0].first_at
            if begun is not None and begun <= at:
                return main
    return main_logs[-1]


def _add_rank(main: RunParts, rank: RunParts) -> None:
    """Adds the parts of another rank to the attempts of the main log."""
    main.names += rank.names
    main.marks = united(main.marks, rank.marks)
    alike = len(rank.attempts) == len(main.attempts)
    for index, attempt in enumerate(rank.attempts):
        place = index if alike else _attempt_at(main, attempt)
        main.attempts[place] += attempt


def _attempt_at(main: RunParts, attempt: Sequence[Part]) -> int:
    """The index of the attempt of a main log that other parts belong to: by the time of day, else the last."""
    at = next((part.first_at for part in attempt if part.first_at is not None), None)
    for index in range(len(main.attempts) - 1, 0, -1):
        begun = main.attempts[index][0].first_at
        if at is not None and begun is not None and begun <= at:
            return index
    is_timed = at is not None and len(main.attempts) > 1 and main.attempts[0][0].first_at is not None
    return 0 if is_timed else len(main.attempts) - 1


def _join_numbered(bucket: list[RunParts], silent: Sequence[LogName] = ()) -> list[RunParts]:
    """Rule 3: logs whose names have the rank as a bare number.

    `silent`: names with the same shape, of files without a known line, which may belong to ranks as well.
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
            main = _ranks_of_one(runs)
            if main is not None:
                main.names[0] = without_number(main.names[0], position)
                for index in indices:
                    if bucket[index] is not main:
                        _add_rank(main, bucket[index])
                        joined.add(index)
    return [run for index, run in enumerate(bucket) if index not in joined]


def _differ_at(one: LogName, other: LogName, position: int) -> bool:
    """Whether the numbers of two names of a shape differ at this position only."""
    pairs = zip(one.numbers, other.numbers, strict=True)
    return [place for place, (mine, theirs) in enumerate(pairs) if mine != theirs] == [position]


def _begins(run: RunParts) -> bool:
    """Whether a program printed its start or its arguments."""
    return any(part.arguments or part.started for part in run.parts)


def _is_another(run: RunParts, main: RunParts) -> bool:
    """Whether a log without steps belongs to another run of the same program: their names differ in numbers only, or it
    states settings of a training itself."""
    one, other = run.names[0], main.names[0]
    if one.shape == other.shape and one.numbers != other.numbers:
        return True
    stated = [
        {(name, fact.dialect) for part in parts for name in _PLANS for fact in part.facts.get(name, ())}
        for parts in (run.parts, main.attempts[-1][:1])
    ]
    return any(dialect != BARS for _, dialect in stated[0] & stated[1])


def _ranks_of_one(runs: Sequence[RunParts]) -> RunParts | None:
    """The main run if the contents show that all are ranks of one run; None if they are separate runs."""
    training = [run for run in runs if run.has_steps]
    first = min(runs, key=lambda run: _main_first([run]))
    others = [run for run in runs if run is not first]
    if any(contradict(run.marks, first.marks) for run in others):
        return None
    if len(training) == 1 or not training:
        beginning = [run for run in others if _begins(run)]
        # Megatron's first rank dumps the arguments, and its last rank prints the steps.
        return first if not beginning or (len(beginning) == len(training) == 1 and not _begins(first)) else None
    if len(training) < len(runs):
        return None
    return first if all(_same_steps(run.attempts[-1][0], first.attempts[-1][0]) is False for run in others) else None
