"""What is read from lines as programs print them: every figure, fact and failure, and no other.

A block of `printed/*.txt` has comments (`# why`), the lines of a log (`> `; `>> NAME` begins another file) and below
them all that is read from them, to be read in review. `>1..20 ` is a line for each n, with `{n*16:12d}` for figures
that grow with it, and `\\n` between several lines. `>- ` is a log of its own, and what is below several of them is said
of each. `>dump ` is Megatron's dump of arguments with some changed, `>steps 1..9 ` its lines of those steps
(made_logs.py), `mllog SECOND KEY VALUE` an event of MLPerf's. In `causes.txt` and `threads.txt` it is the first cause
over the files of a block, `>>>` if all planned steps were trained; in `records.txt`, `one_run.txt`, `fields.txt` and
`mlperf.txt` the record of each run; in `grouping.txt` which files and attempts are one run.

pytest tests/reader/test_printed.py --force-regen       after a change that is meant of causes, records and grouping
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from hpc_gpt.core.runs.record import ABSENT
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.reader.failures.causes import Cause, first_cause
from hpc_gpt.reader.failures.part_failures import one_a_line
from hpc_gpt.reader.lines.part import Fact, Failure, Part
from hpc_gpt.reader.runs.facts import asked_at
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.gather import gather_paths
from tests.reader.made_logs import dump, iterations, write_log
from tests.reader.reading import read_lines

# Control characters, as the files have them.
ESCAPED = {r"\e": "\x1b", r"\r": "\r", r"\a": "\a", r"\x85": "\x85"}
# A line for each n, and a figure in it that grows with n.
MANY = re.compile(r">(\d+)\.\.(\d+) .*")
GROWING = re.compile(r"\{([\d.*(+-]*n\b[^{}:]*)(?::([^{}]*))?\}")
CONTROL = re.compile("|".join(map(re.escape, ESCAPED)))
# A place in a log: `a.out:21 to 40`.
PLACE = re.compile(r"[\w./-]+:\d+(?: to \d+)?")
# Of a record: what is shown on lines of its own, or is another module's.
APART = ("schema", "run", "name", "settings", "sources", "flags", "flag_kinds", "versions", "attempts")
# Of an attempt among several.
TOLD = ("job_id", "first_step", "last_step", "ended")
# What files hold that is made of the figures by rules of ours, in words of ours; the others have the figures alone.
MADE = {
    **dict.fromkeys(("causes", "threads"), "causes"),
    **dict.fromkeys(("records", "mlperf", "one_run", "fields"), "records"),
    "grouping": "grouping",
}
FILES = sorted((Path(__file__).parent / "printed").glob("*.txt"))


@pytest.mark.parametrize("file", [file for file in FILES if file.stem not in MADE], ids=lambda file: file.stem)
def test_all_that_is_read(file: Path) -> None:
    """Changed by hand: what a line says is the same in every version."""
    assert read_anew(file, facts_and_figures).split("\n\n") == file.read_text(encoding="utf-8").split("\n\n")


@pytest.mark.parametrize("file", [file for file in FILES if file.stem in MADE], ids=lambda file: file.stem)
def test_what_is_made_of_it(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    of_kind = {"causes": causes, "records": partial(records, set()), "grouping": partial(grouped, tmp_path)}
    said = of_kind[MADE[file.stem]]
    text = read_anew(file, said)
    if request.config.getoption("force_regen"):
        file.write_text(text, encoding="utf-8")
    # Block by block, so that each that differs is shown.
    assert text.split("\n\n") == file.read_text(encoding="utf-8").split("\n\n")


def read_anew(file: Path, said: Callable[[list[str]], list[str]]) -> str:
    found = []
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        given = [line for line in block.split("\n") if line.startswith(("#", ">"))]
        alone = [[f"> {line[3:]}"] for line in given if line.startswith(">- ")]
        logs = alone or [given] * any(line[0] == ">" for line in given)
        answers = dict.fromkeys("\n".join(said(log)) for log in logs)
        found.append("\n".join([*given, *answers]))
    return "\n\n".join(found) + "\n"


def logs_of(given: list[str]) -> dict[str, list[str]]:
    """The lines of each file of a block."""
    logs: dict[str, list[str]] = {}
    name = "a.out"
    for line in given:
        if line.startswith(">> "):
            name = line.removeprefix(">> ")
        elif line.startswith(">") and line != ">>>":
            logs.setdefault(name, []).extend(lines_of(line))
    return logs


def lines_of(line: str) -> Iterator[str]:
    """The lines of a log that a line of a block is for."""
    macro, *words = line.split()
    if macro in (">dump", ">steps"):
        changed = dict(word.split("=") for word in words if "=" in word)
        if macro == ">dump":
            yield from dump(**{key: None if text == "None" else text for key, text in changed.items()})
        else:
            first, last = words[0].split("..")
            yield from iterations(int(first), int(last), **{key: int(text) for key, text in changed.items()})
        return
    repeated, text = MANY.fullmatch(line), CONTROL.sub(lambda each: ESCAPED[each[0]], line.partition(" ")[2])
    for n in range(int(repeated[1]), int(repeated[2]) + 1) if repeated else [0]:
        said = GROWING.sub(lambda each, n=n: format(eval(each[1], {"n": n}), each[2] or ""), text) if repeated else text
        for each in said.split(r"\n"):
            yield event(each) if each.startswith("mllog ") else each


def event(text: str) -> str:
    """MLPerf's line of `mllog SECOND KEY VALUE WORD=VALUE …`; a `tracked_stats` has a table for its value."""
    _, at_s, key, *words = text.split()
    values = {name: plainly(value) for name, _, value in (word.partition("=") for word in words if "=" in word)}
    value: Any = plainly(" ".join(word for word in words if "=" not in word))
    if key == "tracked_stats":
        name = next(iter(values))
        value = {name.replace("_in_s", " in s"): values.pop(name)}
    said = {"namespace": "", "time_ms": round(1.7e12 + 1000 * float(at_s)), "event_type": "POINT_IN_TIME", "key": key}
    return f":::MLLOG {json.dumps({**said, 'value': value, 'metadata': {'file': '/w/c.py', 'lineno': 1, **values}})}"


def plainly(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def grouped(folder: Path, given: list[str]) -> list[str]:
    """Each run by its name: files, lines of steps and which count, attempts and how it ended."""
    with TemporaryDirectory(dir=folder) as place:
        lab = Path(place) / "lab"
        for name, lines in logs_of(given).items():
            write_log(lab / name, lines)
        said = []
        for run in gather_paths([str(lab)], Path(place) / "logs").runs:
            files = ", ".join(sorted(str(path.relative_to(lab)) for path in run.files))
            cause = f": {run.record.cause}" if run.record.cause else ""
            said.append(
                f"{run.record.run}: {files}; {run.record.ended}{cause}".replace(f"{lab}/", "").replace(
                    f"{place}/"[1:], ""
                )
            )
            counts = run.steps.counts
            others = int((~counts).sum())
            said.append(f"  steps {spans(run.steps['step'][counts])}" + f"; {others} lines do not count" * bool(others))
            said += [
                "  attempt "
                + pairs({key: value for key, value in attempt.items() if value is not None and key in TOLD})
                for attempt in run.record.attempts
                if len(run.record.attempts) > 1
            ]
    return said


def spans(steps: Any) -> str:
    """1..10, 21..40"""
    if not len(steps):
        return "none"
    every = int(steps[1] - steps[0]) if len(steps) > 1 else 1
    parts = np.split(steps, np.flatnonzero(np.diff(steps) != every) + 1)
    return ", ".join(f"{part[0]:.0f}..{part[-1]:.0f}" for part in parts) + f" by {every}" * (every > 1)


def causes(given: list[str]) -> list[str]:
    parts = [part for name, lines in logs_of(given).items() for part in read_lines(name, lines)]
    return said_cause(first_cause(parts, ">>>" in given))


def facts_and_figures(given: list[str]) -> list[str]:
    said = [list(said_part(part)) for name, lines in logs_of(given).items() for part in read_lines(name, lines)]
    if said == [[]]:
        return ["nothing"]
    return [line for at, lines in enumerate(said) for line in ([f"part {at + 1}:"] if len(said) > 1 else []) + lines]


def records(said: set[str], given: list[str]) -> list[str]:
    runs = group_logs([(Path(name), read_lines(name, lines)) for name, lines in logs_of(given).items()])
    return [line for at, run in enumerate(runs) for line in said_record(read_foreign(run, f"run {at + 1}"), said)]


def said_record(read: RunRead, said: set[str]) -> Iterator[str]:
    """What a record has, and where it is from; of the settings and the places in the log, what no record before `said`
    of its file has in these words."""
    tables = read.record.to_tables()
    known = {key: value for key, value in tables.items() if value not in (None, [], {}) and key not in APART}
    steady, counted = int(read.steps.steady.sum()), int(read.steps.counts.sum())
    reached = (
        f" to step {last}" if (last := read.record.attempts[-1:] and read.record.attempts[-1]["last_step"]) else ""
    )
    of_lines = f"; {len(read.steps)} lines of steps{reached}, of which {counted} count and {steady} are steady"
    yield f"{read.record.run}: {pairs(known)}" + of_lines * bool(len(read.steps))
    for attempt in read.record.attempts[:-1]:
        yield "an attempt before: " + pairs({key: value for key, value in attempt.items() if value is not None})
    settings = [pairs({key: value}) for key, value in flat({**read.record.settings, **read.record.versions})]
    if unsaid := [each for each in settings if each not in said]:
        yield "settings: " + " ".join(unsaid)
    sources = read.record.sources
    inferred = {key: source for key, source in sources.items() if source.startswith("inferred")}
    stated = (f"{key} {part}" for key, of in sources.items() if key not in inferred for part in of.split("; "))
    words = {each: PLACE.sub("", each) for each in stated}
    if unsaid := [each for each in words if words[each] not in said]:
        yield "from: " + "; ".join(unsaid)
    said |= {*settings, *words.values()}
    how = [f"{key}: {each[len('inferred: ') :]}" for key, each in inferred.items() if key not in ("name", "gpu_hours")]
    if how:
        yield "inferred: " + "; ".join(how)
    for flag, kind in (each for each in read.record.all_flags if each[1] != ABSENT):
        yield f"flag: {flag}" if kind in ("", "program") else f"flag, {kind}: {flag}"


def said_cause(cause: Cause) -> list[str]:
    where = f" rank {cause.rank}" * (cause.rank is not None) + f" on {cause.node}" * (cause.node is not None)
    lines = [f"{cause.ended}{where}: {cause.text}" if cause.text else f"{cause.ended}{where}"]
    if cause.failed_node:
        lines.append(f"left out next time: {cause.failed_node}")
    if cause.sure:
        lines.append(f"inferred: {cause.sure}")
    if cause.failure:
        lines.append(f"said at {cause.failure.place}")
        lines += [f"to do: {cause.failure.to_do}"] if cause.failure.to_do else []
    others = [failure for failure in cause.ordered if failure != cause.failure]
    for kind, failures in (
        ("also", [each for each in others if not each.echo and each not in cause.survived]),
        ("survived", [each for each in others if each in cause.survived]),
        ("consequences", [each for each in others if each.echo and each not in cause.survived]),
    ):
        if failures:
            lines.append(f"{kind}: " + ", ".join(f"{each.ended} at {each.place}" for each in failures))
    return lines


def said_part(part: Part) -> Iterator[str]:
    """Everything that a part says, but where; what it does not say is missing."""
    if part.dialects:
        yield "of " + ", ".join(part.dialects)
    for name, steps in part.steps.items():
        for row in range(len(steps)):
            # A figure that the program prints as nan is one; a line of several without it has none.
            figures = {key: float(column[row]) for key, column in steps.columns.items()}
            shown = {key: value for key, value in figures.items() if value == value or len(steps) == 1}
            yield f"{name}: " + pairs(shown)
        totals = {key: value for key, value in steps.totals.items() if value}
        if totals:
            yield f"{name} in all: " + pairs(totals)
    if part.facts:
        yield "states " + pairs({name: ",".join(map(named, facts)) for name, facts in part.facts.items()})
    if asked := asked_at(part):
        yield "asks for " + pairs({name: each.value for name, each in asked.items()})
    if part.arguments:
        yield "dumps " + pairs({key: text for key, (text, _) in part.arguments.items()})
    if part.totals:
        yield "in all " + pairs({name: fact.value for name, fact in part.totals.items()})
    yield from (f"at the bar's {plain(step)} after {plain(elapsed)} s" for step, elapsed, _ in part.progress)
    yield from (f"loss {plain(loss)} of the evaluation at step {plain(step)}" for step, loss, _ in part.evals)
    yield from (f"saved at step {plain(step)}, in {plain(took)} s" for step, took, _ in part.saves)
    for rank, memory in part.memory.items():
        yield f"memory of rank {rank}: {plain(memory.allocated_gib)} GiB, reserved {plain(memory.reserved_gib)} GiB"
    yield from (f"parameters of {name}: {plain(count)}" for name, (count, _) in part.rank_params.items())
    yield from (f"timer {name}: {plain(total)} s" for name, (total, _) in part.timers_s.items())
    yield from map(said_failure, one_a_line(part.failures))
    yield from (f"ended: {ended}" for ended, _ in part.ends)
    yield from (f"left out: {count} {what}" for what, count in part.left_out.items())
    if part.step_rank is not None:
        yield f"rank {part.step_rank}'s steps are read"
    if part.last_at is not None:
        yield f"until {datetime.fromtimestamp(part.last_at, UTC):%Y-%m-%d %H:%M:%S}"
    if part.started:
        yield "starts"


def said_failure(failure: Failure) -> str:
    about = [f"rank {failure.rank}"] * (failure.rank is not None) + [f"on {failure.node}"] * bool(failure.node)
    return f"failure: {' '.join([failure.ended, *['echo'] * failure.echo, *about])}: {failure.message}"


def named(fact: Fact) -> str:
    """A fact's value, and the device that it names."""
    device = device_named(fact.value) if isinstance(fact.value, str) else None
    return plain(fact.value) + (f" ({device})" if device else "")


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a table and of the tables in it, by its path."""
    for key, value in values.items():
        yield from flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]


def pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={plain(value)}" for name, value in flat(values))


def plain(value: Any) -> str:
    """A figure to nine digits, a whole one without its point."""
    if isinstance(value, str):
        return repr(value) if " " in value else value
    if isinstance(value, list):
        return ",".join(map(plain, value))
    if value is None or isinstance(value, bool):
        return str(value)
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return str(int(value)) if whole else f"{value:.9g}"
