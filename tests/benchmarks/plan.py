"""How good `plan` is, as a table: errors on the published rows of ../shared, and how long searches take: `make bench`.

    python tests/benchmarks/plan.py [--rows FOLDER]

Nothing passes or fails here; tests/plan/test_published.py holds the errors. Rows are read from FOLDER (open.json and
calibration.json), by default planner in $HPC_GPT_SHARED or ../shared; without it the searches alone are timed.
Seconds are of one core's CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from hpc_gpt.plan.calibrate import calibrate_clusters
from hpc_gpt.plan.crossing import without_row, without_source
from hpc_gpt.plan.machines import machine_named
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.question import Question
from hpc_gpt.plan.rows import Row, read_rows
from hpc_gpt.plan.scores import Errors, Scores, score
from hpc_gpt.plan.search import search
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.plan.training import Shape
from hpc_gpt.plan.validate import choosing, predict_rows, predicted_only

SHARED = Path(os.environ.get("HPC_GPT_SHARED") or Path(__file__).resolve().parents[3] / "shared")
SEARCHES = {
    "175B on 1,024 GPUs": (Shape(12288, 96, 96, vocab=51200, seq=2048), 1024, 1536),
    "1T on 16,384 GPUs": (Shape(25600, 128, 160, vocab=51200, seq=2048), 16384, 3072),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=SHARED / "planner")
    parser.add_argument("--search", choices=list(SEARCHES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.search:
        print(_search(asked.search))
        return
    if (asked.rows / "open.json").is_file():
        _figures(asked.rows)
    else:
        print(f"no rows at {asked.rows}: errors are not told")
    print("\nall layouts (goals 1 s, 10 s)\n")
    for name in SEARCHES:
        # Each in a process of its own, so that its memory is its own.
        done = subprocess.run([sys.executable, __file__, "--search", name], capture_output=True, text=True, check=True)
        print(f"{name:<24} {done.stdout.strip()}")


def _figures(folder: Path) -> None:
    open_rows, calibration = read_rows(folder / "open.json"), read_rows(folder / "calibration.json")
    every = [*open_rows.rows, *calibration.rows]
    clusters = calibrate_clusters(calibration.rows)
    sheets = [predicted_only(predict_rows(rows, choosing(()))) for rows in (open_rows, calibration)]
    fitted = [predicted_only(predict_rows(rows, choosing(clusters))) for rows in (open_rows, calibration)]
    tables: dict[str, Scores] = {
        "data sheets only (goal 12 %)": score([*sheets[0], *sheets[1]]),
        "constants of calibration.json (goal 8 %)": score([*fitted[0], *fitted[1]]),
        "fitted without the source": score(without_source(every)),
        "fitted without the row, within its cluster (goal 8 %)": score(without_row(every)),
    }
    for title, scores in tables.items():
        print(f"\n{title}\n")
        for each in scores.sources:
            if each.time.rows:
                print(f"{each.source:<24} {_line(each.time)}")
        print(f"{'all rows':<24} {_line(scores.time)}")
        print(f"{'averaged over sources':<24} {'':>5} {scores.time_mean or 0:>7.1%}")
        good = sum(pick.is_good for pick in scores.picks)
        print(f"the pick within 5 % of the best: {good} of {len(scores.picks)} groups")
    scores = tables["data sheets only (goal 12 %)"]
    print("\nmemory (goal 6 %; 90 % within 10 %)\n")
    for each in scores.sources:
        if each.memory.rows:
            print(f"{each.source:<24} {_line(each.memory)}")
    print(f"{'all rows':<24} {_line(scores.memory)}")
    wrong = (*scores.said_to_fit, *scores.said_not_to)
    print(f"fits: {scores.fits_judged - len(wrong)} of {scores.fits_judged} right {' '.join(wrong)}")
    count = len(open_rows.left_out) + len(calibration.left_out)
    print(f"left out: {count} of {len(open_rows.entries) + len(calibration.entries)} rows")
    print(f"one prediction: {_microseconds(every):.0f} microseconds, memory and time of one layout")


def _line(errors: Errors) -> str:
    in_10, in_15 = errors.within_10 or 0, errors.within_15 or 0
    return f"{errors.rows:>5} {errors.mean or 0:>7.1%} {in_10:>6.0%} in 10 % {in_15:>6.0%} in 15 %"


def _microseconds(rows: list[Row], rounds: int = 5) -> float:
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
    return f"{seconds:.2f} s, {tried:,} settings, {more:.1f} MiB; first is {found.candidates[0].split}"


if __name__ == "__main__":
    main()
