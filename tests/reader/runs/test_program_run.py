"""The record of a script's run: from its logs, as `report` reads any log, and its own where they state nothing."""

from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from tests.made_runs import add_attempt, metrics_line, read_run

HEAD = "using world size: 4, data-parallel size: 2, tensor-model-parallel size: 2, pipeline-model-parallel size: 1\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of a job script that asks for no GPU, on a cluster whose profile names one."""
    (script := tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\npython fit.py\n")
    prepared = prepare(Request(str(script), "generic-slurm", None, {}, script=ScriptRequest(script, (), ())))
    return write_run(prepared, tmp_path / "logs", {})


def printed(first: int, last: int, begins: float = 10.0) -> str:
    """Lines of Megatron-LM for these steps, half a second each; the loss begins at `begins`."""
    return "".join(
        f" [2026-05-11 10:00:{step:02d}] iteration {step:8d}/{40:8d} | consumed samples: {64 * step:12d} | elapsed time"
        f" per iteration (ms): 500.0 | learning rate: 1.5E-04 | global batch size:    64 | lm loss:"
        f" {begins - step / 10:.6E} | loss scale: 1.0 | grad norm: 1.2 | number of skipped iterations:   0 |\n"
        for step in range(first, last + 1)
    )


def noted(first: int, last: int) -> list[dict]:
    """Lines of metrics.jsonl with figures that no log states."""
    return [metrics_line(step, loss=1.0, step_s=0.9) for step in range(first, last + 1)]


def test_a_log_states_the_figures_of_all_attempts(run: RunFolder) -> None:
    for first, last in ((1, 20), (16, 40)):
        add_attempt(run, noted(first, last)).log.write_text(HEAD + printed(first, last))
    record = read_run(run)
    assert (record.tp, record.dp, record.global_batch) == (2, 2, 64)
    assert (record.loss_first, record.loss_last, record.step_s) == (9.9, 6.0, 0.5)
    assert record.sources["loss_first"] == "attempts/1/log:2"
    assert record.sources["loss_last"] == "attempts/2/log:26"
    assert record.settings["program"] == "megatron"
    assert record.config_hash


def test_without_a_log_the_lines_of_the_run_serve(run: RunFolder) -> None:
    add_attempt(run, noted(1, 20))
    record = read_run(run)
    assert (record.loss_last, record.step_s) == (1.0, 0.9)
    assert "metrics.jsonl" in record.sources["step_s"]


def test_a_cut_log_gives_no_figures_of_steps(run: RunFolder) -> None:
    add_attempt(run, noted(1, 30)).log.write_text(HEAD + printed(1, 12))
    record = read_run(run)
    assert (record.loss_last, record.step_s, record.global_batch) == (1.0, 0.9, 64)
    assert any("lack steps that metrics.jsonl has" in flag for flag in record.flags)


def test_of_several_trainings_the_last_one_is_the_runs(run: RunFolder) -> None:
    banner = "=" * 20 + " run 2 " + "=" * 20 + "\n"
    text = HEAD + printed(1, 40) + banner + HEAD + printed(1, 40, begins=20.0)
    add_attempt(run, noted(1, 40)).log.write_text(text)
    record = read_run(run)
    assert (record.loss_first, record.loss_last) == (19.9, 16.0)
    assert any(flag.startswith("training 2 of 2 in its log") for flag in record.flags)


def test_a_job_that_asked_for_no_gpu_has_no_device(run: RunFolder) -> None:
    add_attempt(run, noted(1, 20)).log.write_text(HEAD + printed(1, 20))
    assert run.resolved().asked_gpus is None
    assert read_run(run).device is None
