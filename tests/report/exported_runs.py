"""Runs to be exported: one of ours that was started again, and one read from a log."""

from pathlib import Path

import numpy as np

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.reader.runs.run_read import RunRead
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line
from tests.report.step_tables import step_table


def restarted_run(logs: Path, by_source: dict[str, float] | None = None, **overrides) -> RunRead:
    """Steps 1 to 6, then from the checkpoint of step 4 again 5 to 8; evaluated at 8, of a mixture also `by_source`."""
    run = make_run(logs, **overrides)
    add_attempt(run, [metrics_line(step, time=STARTED + step) for step in range(1, 7)], ended="walltime")
    again = [metrics_line(step, loss=9.0 - step, time=STARTED + 100 + step) for step in range(5, 8)]
    again.append(metrics_line(8, loss=1.0, loss_eval=1.5, time=STARTED + 108))
    if by_source is not None:
        again = [{**line, "loss_eval_by": None} for line in again[:-1]] + [{**again[-1], "loss_eval_by": by_source}]
    add_attempt(run, again, resumed_step=4, started=STARTED + 100)
    return read_own(run)


def log_run(folder: Path, **record) -> RunRead:
    """A run of a log without times of day, of four steps; one loss is no number."""
    step = np.arange(1.0, 5)
    curve = step_table(step=step, step_s=[4.0, 2.0, 2.0, 2.0], loss=[3.0, np.nan, 2.0, 1.0],
                       attempt=np.ones(4, np.int64), steady=step > 1, skipped=step == 2)  # fmt: skip
    settings = {"arguments": {"lr": 1e-4, "hub_token": "hf_secret", "eos_token": "</s>"}}
    given = {"run": "job", "name": "job", "settings": settings, "step_s": 2.0, "tflops_seed": 40.0, "gpus": 64}
    return RunRead(Record(**given | record), curve, files=[folder / "job.out"])
