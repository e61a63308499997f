"""Where the GPU-hours of a run went: by hand-made attempts whose parts are known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.reader.runs.goodput import PARTS
from hpc_gpt.report.tables import show_goodput
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, read_run

H100 = "NVIDIA H100 80GB HBM3"
GPUS = 4


def line(step: int, at: float, step_s: float = 1.0, **values: Any) -> dict[str, Any]:
    return metrics_line(step, step_s=step_s, time=STARTED + at, **values)


def hours(record: Record, gpus: int = GPUS) -> dict[str, float]:
    """Seconds of each part that is not 0, of one GPU."""
    parts = record.gpu_hours_by or {}
    assert tuple(parts) == PARTS
    assert math.fsum(parts.values()) == pytest.approx(record.gpu_hours, rel=1e-12)
    return {name: round(part * 3600 / gpus, 6) for name, part in parts.items() if part}


def attempt(run: RunFolder, lines: list[dict[str, Any]], ended: str | None, end_s: float, **files: Any) -> Attempt:
    made = add_attempt(run, lines, ended, device=H100, time=STARTED + end_s, **files.pop("more", {}))
    for name, table in files.items():
        write_once(made.folder / f"{name}.json", json.dumps(table))
    return made


def test_each_second_of_an_attempt_is_in_one_part(logs: Path) -> None:
    run = make_run(logs, "jean-zay-v100-32g")
    lines = [
        line(1, 40, 12.0),  # 1 s of a step and 11 s of warm-up, of which 8 s compile
        line(2, 41, loss_eval=2.0, eval_s=3.0),
        line(3, 45),  # after the evaluation
        line(4, 46),
        line(5, 49),  # after a save of 2 s in which the steps waited
        line(6, 50, save_s=5.0),
    ]
    attempt(run, lines, "done", 58, preflight={"took_s": 10.0}, measured={"compile_s": 8.0})
    record = read_run(run)
    expected = {"steps": 6.0, "start": 21.0, "compile": 8.0, "preflight": 10.0, "saves": 7.0, "evaluation": 3.0}
    assert hours(record) == {**expected, "other": 3.0}
    assert record.goodput == pytest.approx(6 / 58, abs=1e-6)
    assert show_goodput(record).startswith("10.3% of the time went into steps that count (start 36%, preflight 17%, ")


def test_steps_made_again_and_a_failed_end_are_lost(logs: Path) -> None:
    run = make_run(logs, "jean-zay-v100-32g")
    attempt(run, [line(step, 20 + step) for step in range(1, 11)], "hang", 130)
    attempt(run, [line(step, 10 + step) for step in range(7, 13)], "done", 22.5, more={"resumed_step": 6})
    record = read_run(run)
    assert hours(record) == {"steps": 12.0, "start": 36.0, "lost": 104.0, "other": 0.5}
    first, second = record.attempts or []
    assert (first["goodput"], second["goodput"]) == (round(6 / 130, 6), round(6 / 22.5, 6))
    assert second["gpu_hours_by"]["lost"] == 0


def test_spare_nodes_are_a_part_of_their_own(logs: Path) -> None:
    run = make_run(logs, "jean-zay-v100-32g", job__spare_nodes=1, job__preflight=True)
    attempt(run, [line(step, 10 + step) for step in range(1, 6)], "done", 15)
    record = read_run(run)
    assert hours(record) == {"steps": 5.0, "start": 10.0, "spares": 15.0}
    assert record.goodput == pytest.approx(5 / 30, abs=1e-6)


def test_clocks_that_disagree_leave_no_part_negative(logs: Path) -> None:
    run = make_run(logs, "jean-zay-v100-32g")
    attempt(run, [line(step, 500 + step) for step in range(1, 6)], "done", 20)
    assert hours(read_run(run)) == {"steps": 5.0, "start": 15.0}


def test_a_clock_that_jumps_moves_the_gap_it_jumped_in_alone(logs: Path) -> None:
    run = make_run(logs, "jean-zay-v100-32g")
    lines = [line(step, 20 + step + 3600 * (step > 50)) for step in range(1, 101)]
    attempt(run, lines, "done", 3600 + 124, next={"elapsed_s": 124.0})
    assert hours(read_run(run)) == {"steps": 100.0, "start": 20.0, "other": 4.0}
