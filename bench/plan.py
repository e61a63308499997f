"""How good `plan` is, as a table: errors on the published rows of ../shared, and how long searches take: `make bench`.

    python bench/plan.py [--rows FOLDER] [--write]
    python bench/plan.py --rows FILE [--calibrate FILE]
    python bench/plan.py --fit | --without

The second prints each row of a file (bench/published/rows.py shows one) predicted beside what was measured. The
third fits the table of constants to all rows, and prints each source's error by constants fitted to the others; or what
taking each trait from the rows costs, in points of the means over sources.
Nothing passes or fails here; tests/planner/test_published.py holds the errors to those that --write commits. Rows are
read from FOLDER (open.json and calibration.json), by default planner in $HPC_GPT_SHARED or ../shared; without it the
searches alone are timed.
Seconds are of one core's CPU.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

# The figures' own module lies among the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.published.fields import TRAITS
from bench.published.figures import (
    CALIBRATED,
    COMMITTED,
    DATA_SHEETS,
    WITHOUT_ROW,
    WITHOUT_SOURCE,
    all_scores,
    as_tables,
    crossed_tables,
    mixture_tables,
    read_files,
    write,
)
from bench.published.fitting import (
    FITTED,
    FITTED_MIXTURES,
    by_release,
    by_source,
    constants_set,
    fit_table,
    fitted_without,
    time_errors,
)
from bench.published.mixtures import FILE as MIXTURES
from bench.published.mixtures import TERMS, errors_without
from bench.published.rows import LeftOut, PublishedRow, Rows, read_rows, rows_of
from bench.published.scores import (
    DATA_SHEET,
    Errors,
    Scores,
    calibrate_clusters,
    choosing,
    predict_rows,
    predicted_only,
    score,
    without_source,
)
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.question import Question
from hpc_gpt.planner.search import search
from hpc_gpt.planner.step_time import predict_step
from tests.planner.machines import machine_named

SHARED = Path(os.environ.get("HPC_GPT_SHARED") or Path(__file__).resolve().parents[2] / "shared")
_GOALS = {DATA_SHEETS: "12 %", CALIBRATED: "8 %", WITHOUT_SOURCE: "none", WITHOUT_ROW: "8 %"}
SEARCHES = {
    "175B on 1,024 GPUs": (ModelShape(12288, 96, 96, vocab=51200, seq=2048), 1024, 1536),
    "1T on 16,384 GPUs": (ModelShape(25600, 128, 160, vocab=51200, seq=2048), 16384, 3072),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=SHARED / "planner")
    parser.add_argument("--write", action="store_true", help="renew bench/published/figures.json")
    parser.add_argument("--calibrate", type=Path, action="append", default=[], help="fit constants to these rows")
    parser.add_argument("--fit", action="store_true", help="fit the table of constants; each source left out in turn")
    parser.add_argument("--without", action="store_true", help="what each trait is worth: rows without it")
    parser.add_argument("--search", choices=list(SEARCHES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.search:
        print(_search(asked.search))
        return
    if not asked.rows.exists() and asked.rows == SHARED / "planner":
        print(f"no published rows at {asked.rows}, as they are not part of the repository: no errors are printed")
        if asked.fit or asked.without or asked.write:
            sys.exit("--fit, --without and --write need them: give --rows FOLDER")
    elif asked.fit or asked.without:
        (_fit if asked.fit else _without)(asked.rows)
        return
    elif not asked.rows.is_dir():
        compare(asked.rows, asked.calibrate)
        return
    elif (asked.rows / "open.json").is_file():
        _figures(asked.rows, asked.write)
    else:
        print(f"no rows at {asked.rows}: no errors are printed")
    if (asked.rows / MIXTURES).is_file():
        _mixtures(read_rows(asked.rows / MIXTURES))
    print("\nall layouts (goals 1 s, 10 s)\n")
    for name in SEARCHES:
        # Each in a process of its own, so that its memory is its own.
        done = subprocess.run([sys.executable, __file__, "--search", name], capture_output=True, text=True, check=True)
        print(f"{name:<24} {done.stdout.strip()}")


def _fit(folder: Path) -> None:
    _fitted([row for read in read_files(folder) for row in read.rows], FITTED)
    if (folder / MIXTURES).is_file():
        _fitted(read_rows(folder / MIXTURES).rows, FITTED_MIXTURES)


def _fitted(rows: list[PublishedRow], held: Mapping[str, float]) -> None:
    """Prints the constants of `held` as fitted to the rows, and the errors with the table's, with these, and with those
    that are fitted without each source, and without each release of a program."""
    found = fit_table(rows, held)
    for name, logarithm in found.items():
        print(f"{name:<32} {VALUES[name]} {math.exp(logarithm):.4g}")
    for part in (by_source, by_release):
        before, crossed = time_errors(rows, part), fitted_without(rows, held, part)
        with constants_set(found):
            after = time_errors(rows, part)
        print(f"\n{'':<28} {'rows':>4} {'table':>7} {'fitted':>7} {'without it':>11}")
        means = [{name: fmean(errors[name]) for name in crossed} for errors in (before, after, crossed)]
        for name, errors in crossed.items():
            print("{:<28} {:>4} {:>7.1%} {:>7.1%} {:>11.1%}".format(name, len(errors), *(each[name] for each in means)))
        if crossed:
            print("{:<33} {:>7.1%} {:>7.1%} {:>11.1%}".format("averaged", *(fmean(each.values()) for each in means)))


def _without(folder: Path) -> None:
    whole = _means(folder, "")
    for name in TRAITS:
        time, memory, wrong = _means(folder, name)
        print(
            f"{name:<20} time {100 * (time - whole[0]):+5.2f} points, memory {100 * (memory - whole[1]):+5.2f}, "
            f"wrong fits {wrong - whole[2]:+d}"
        )


def _means(folder: Path, without: str) -> tuple[float, float, int]:
    """(time, memory, wrong fits) of all rows, as if no row stated the trait."""
    files = (json.loads((folder / f"{name}.json").read_text()) for name in ("open", "calibration", "open2"))
    rows = [
        row
        for file in files
        for row in file.get("rows") or [each for part in file["clusters"].values() for each in part]
    ]
    stated = [{key: value for key, value in row.items() if key != without} for row in rows]
    found = score(predicted_only(predict_rows(rows_of({"rows": stated}, "rows"), choosing(()))))
    return found.time_mean or 0.0, found.memory_mean or 0.0, len(found.said_to_fit) + len(found.said_not_to)


def _figures(folder: Path, renew: bool) -> None:
    files = read_files(folder)
    tables = all_scores(files)
    for title, scores in tables.items():
        _print_times(scores, f"{title} (goal {_GOALS[title]})")
    _print_memory(tables[DATA_SHEETS], "memory (goal 6 %; 90 % within 10 %)")
    held = [
        each for each in without_source([row for rows in files for row in rows.rows]) if each.time_error is not None
    ]
    inside = sum(abs(each.time_error or 0.0) <= each.step.band for each in held)
    print(f"in the printed range, by constants fitted to other sources: {inside} of {len(held)} rows")
    left_out, entries = (sum(len(getattr(rows, part)) for rows in files) for part in ("left_out", "entries"))
    print(f"left out: {left_out} of {entries} rows")
    each_us = _microseconds([row for rows in files for row in rows.rows])
    print(f"one prediction: {each_us:.0f} microseconds, memory and time of one layout")
    if renew:
        mixtures = read_rows(folder / MIXTURES)
        write(as_tables(files, tables) | {"mixtures": mixture_tables(mixtures) | crossed_tables(mixtures)})
        print(f"written: {COMMITTED}")


def _mixtures(rows: Rows) -> None:
    """Errors on mixtures of experts by data sheets, and what each term is worth: the means over sources without it."""
    found = errors_without(rows)
    _print_times(found, "step time of mixtures of experts, data sheets only (goal 10 %)")
    _print_memory(found, "memory of mixtures (goal 6 %)")
    print(f"left out: {len(rows.left_out)} of {len(rows.entries)} rows\n")
    _fitted(rows.rows, FITTED_MIXTURES)
    names = [each.source for each in found.sources]
    print(f"\n{'without':<26} {'time':>6} " + " ".join(f"{name[:14]:>14}" for name in names) + "  memory")
    for term in (None, *TERMS):
        scores = errors_without(rows, term)
        of_sources = " ".join(f"{each.time.mean or 0:>14.1%}" for each in scores.sources)
        print(f"{term or '(nothing)':<26} {scores.time_mean or 0:>6.1%} {of_sources} {scores.memory_mean or 0:>7.1%}")


def _print_times(scores: Scores, title: str) -> None:
    print(f"\n{title}\n")
    for each in scores.sources:
        if each.time.rows:
            print(f"{each.source:<24} {_line(each.time)}")
    print(f"{'all rows':<24} {_line(scores.time)}")
    print(f"{'averaged over sources':<24} {'':>5} {scores.time_mean or 0:>7.1%}")
    good = sum(pick.is_good for pick in scores.picks)
    print(f"the pick within 5 % of the best: {good} of {len(scores.picks)} groups")


def _print_memory(scores: Scores, title: str) -> None:
    print(f"\n{title}\n")
    for each in scores.sources:
        if each.memory.rows:
            print(f"{each.source:<24} {_line(each.memory)}")
    print(f"{'all rows':<24} {_line(scores.memory)}")
    wrong = (*scores.said_to_fit, *scores.said_not_to)
    print(f"fits: {scores.fits_judged - len(wrong)} of {scores.fits_judged} right {' '.join(wrong)}")


def compare(file: Path, calibrate: list[Path]) -> None:
    """Prints every row of a file, predicted beside what was published, and the errors."""
    rows = read_rows(file)
    clusters = calibrate_clusters([row for path in calibrate for row in read_rows(path).rows])
    entries = predict_rows(rows, choosing(clusters))
    print(f"{'':<28} {'layout':<16} {'step':>10} {'published':>10} {'':>7} {'GiB':>7} {'published':>9} {'':>7}  fits")
    for entry in entries:
        if isinstance(entry, LeftOut):
            print(f"{entry.id:<28.28} left out: {entry.reason}")
            continue
        published, fits = entry.row.published, "yes" if entry.fits else "no"
        if published.fits is not None and published.fits != entry.fits:
            fits += f", but {'ran' if published.fits else 'ran out'}"
        print(
            f"{entry.row.id:<28.28} {entry.row.training.layout!s:<16} {_figure(entry.step.step_s, '.4g'):>10} "
            f"{_figure(published.step_s, '.4g'):>10} {_figure(entry.time_error, '+.1%'):>7} {entry.memory_gib:>7.1f} "
            f"{_figure(published.memory_gib, '.1f'):>9} {_figure(entry.memory_error, '+.1%'):>7}  {fits}"
            + ("  (noisy)" if published.noisy else "")
        )
    used = sorted({entry.calibration for entry in predicted_only(entries)})
    scores = score(predicted_only(entries))
    _print_times(scores, f"step time, constants of {', '.join(used) or DATA_SHEET}")
    _print_memory(scores, "memory")
    print(f"left out: {len(rows.left_out)} of {len(entries)} rows")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(errors: Errors) -> str:
    in_10, in_15 = errors.within_10 or 0, errors.within_15 or 0
    return f"{errors.rows:>5} {errors.mean or 0:>7.1%} {in_10:>6.0%} in 10 % {in_15:>6.0%} in 15 %"


def _microseconds(rows: list[PublishedRow], rounds: int = 5) -> float:
    begun = time.process_time()
    for _ in range(rounds):
        for row in rows:
            predict_memory(row.training, row.machine)
            predict_step(row.training, row.machine)
    return (time.process_time() - begun) / (rounds * len(rows)) * 1e6


def _search(name: str) -> str:
    shape, gpus, batch = SEARCHES[name]
    machine = machine_named("a100-80g", 8, "infiniband 8x200G")
    question = Question(shape, gpus, machine.gpus_per_node, "bf16", batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    found = search(question, machine)
    seconds = time.process_time() - begun
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    tried = found.fitting + found.not_fitting
    return f"{seconds:.2f} s, {tried:,} settings, {more:.1f} MiB; first is {found.candidates[0].layout}"


if __name__ == "__main__":
    try:
        main()
    except UserError as fault:
        print(f"Error: {fault}\n\nhint: {fault.hint}", file=sys.stderr)
        sys.exit(fault.exit_code)
