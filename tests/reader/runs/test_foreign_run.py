"""From the lines of a log to a record: step time, batch, memory, ends, and the flags of each."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from hpc_gpt.report.gather import gather_paths
from tests.reader.made_logs import dump, iteration, iterations, run_of, write_log
from tests.reader.reading import read_lines


def flags_with(run, words):
    return [flag for flag in run.record.flags if words in flag]


def test_the_output_log_of_wandb_is_named_by_its_run(tmp_path):
    for run in ("run-20240305_101112-ab12cd34", "offline-run-20240306_091112-ef56ab78"):
        (folder := tmp_path / "wandb" / run / "files").mkdir(parents=True)
        folder.joinpath("output.log").write_text("".join(f"{line}\n" for line in iterations(1, 8)))
    records = gather_paths([str(tmp_path)], tmp_path).records
    assert [(record.run, record.name, record.job_id) for record in records] == [
        ("offline-run-20240306_091112-ef56ab78", "offline-run-20240306_091112-ef56ab78", None),
        ("run-20240305_101112-ab12cd34", "run-20240305_101112-ab12cd34", None),
    ]


VALIDATION = " validation loss at iteration 10 | lm loss value: 3.5E+00 | lm loss PPL: 3.3E+01 | "
SAVED = "  successfully saved checkpoint at iteration      20 to /ckpt"


def test_no_secret_is_in_a_record():
    secrets = {"wandb_api_key": "0123456789abcdef0123456789abcdef01234567", "hub_token": "hf_" + "a" * 30}
    run = run_of(dump(**secrets, password="hunter2hunter2", tokenizer_type="GPT2BPETokenizer"), iterations(1, 5))
    text = run.record.to_json()
    for secret in (*secrets.values(), "hunter2"):
        assert secret not in text
    assert "GPT2BPETokenizer" in text


@pytest.mark.parametrize(("vocab", "flags"), [(-4, 1), (-1, 0)])
def test_a_size_below_0_is_left_out(vocab, flags):
    run = run_of(dump(padded_vocab_size=vocab), iterations(1, 5))
    assert run.record.vocab is None
    assert len(flags_with(run, f"vocab cannot be {vocab} (")) == flags


TITAN = (
    "[rank0]:[titan] 2025-07-21 15:57:{0:02d},242 - root - INFO - step: {1:2d}  loss:  4.6671  grad_norm:  2.5457  "
    "memory:  0.50GiB(0.00%)  tps: {2}  tflops: 3.59  mfu: 0.36%"
)


WORDS = st.sampled_from(
    [
        *(*dump(), iteration(1), iteration(2, 0.0), iteration(3, float("inf")), iteration(10**15), VALIDATION, SAVED),
        *(iteration(step).replace("consumed samples: ", "consumed samples: 9e299 x") for step in (4, 5)),
        *(iteration(step).replace(f"{16 * step:12d}", "1e300") for step in (6, 7)),
        *("time (ms) | forward: nan", "{'train_runtime': 1e400}", " iteration 5/ 7 | elapsed", "Model size: 0B"),
        *("100%|██| 3/3 [00:00<", "100%|██| 3/3 [00:03<00:00,  1.00it/s]"),
        *(f"  {key} ........................ {'9' * 400}" for key in ("hidden_size", "world_size", "train_iters")),
        *("[titan] step: 1  loss: 4.0  grad_norm: 1.0  memory: 0.5GiB(0.0%)  tps: 1e-320  tflops: 3  mfu: 0.4%",),
        "using world size: 999999999999999999, data-parallel-size: 0, tensor-model-parallel size: 3",
    ]
)


@settings(max_examples=60)
@given(st.lists(st.one_of(WORDS, st.text(max_size=80)), max_size=40))
def test_whatever_the_lines_a_record_comes_of_it(lines):
    parts = read_lines("a.log", [line for each in lines for line in (each.splitlines() or [""])])
    for run in group_logs([(Path("a.log"), parts)]):
        found = read_foreign(run, "a")
        record = found.record
        assert record.ended in ENDED
        assert Record.from_tables(json.loads(record.to_json())).to_tables() == record.to_tables()
        assert record.step_s is None or (np.isfinite(record.step_s) and record.step_s > 0)
        assert record.step_s is None or record.sources["step_s"]
        lengths = {
            *(len(getattr(found.steps, name)) for name in ("line", "steady", "counts", "attempt")),
            *(len(found.steps[name]) for name in ("step", "step_s", "loss")),
        }
        assert len(lengths) == 1


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 2.0), min_size=8, max_size=40), st.integers(1, 4))
def test_the_median_is_of_the_steady_lines_whatever_their_order(seconds, every):
    lines = [iteration(index * every, 1000 * each) for index, each in enumerate(seconds, 1)]
    run = run_of(dump(log_interval=every), lines)
    steady = run.steps["step_s"][run.steps.steady]
    assert (run.record.step_s, run.record.steps_used) == (pytest.approx(np.median(steady)), len(steady))


def test_report_writes_nothing_beside_a_foreign_log(tmp_path):
    write_log(tmp_path / "lab" / "a.log", dump(), iterations(1, 5))
    before = sorted(path.name for path in (tmp_path / "lab").rglob("*"))
    assert len(gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs) == 1
    assert sorted(path.name for path in (tmp_path / "lab").rglob("*")) == before


@pytest.mark.parametrize(("every", "each_s"), [(1, 20.0), (1, 0.25), (10, 0.5)])
def test_times_of_day_give_a_step_time_where_nothing_else_does(every, each_s):
    lines = []
    for step in range(every, 400 * every, every):
        at = datetime.fromtimestamp(1.7e9 + int(step * each_s), UTC).strftime("%Y-%m-%d %H:%M:%S")
        line = TITAN.replace("2025-07-21 15:57:{0:02d},242", f"{at},000")
        lines.append(line.format(0, step, "1,000"))
    run = run_of(lines)
    assert run.record.step_s == pytest.approx(each_s, rel=0.03)
    assert flags_with(run, "prints no step time: step_s is from differences of the lines' times of day")


def test_a_preempted_log_that_resumes_has_two_attempts(tmp_path):
    """The counted lines of the second go on from the first's; a loss that jumps has a flag, with the line beside it."""

    def trained(first, loss, clock):
        for number in range(4):
            yield f"{{'loss': '{loss - number / 100:.4f}', 'grad_norm': '0.7', 'learning_rate': '3e-7', 'epoch': '1'}}"
            yield f" 7%|7   | {first + 10 * number}/900 [{clock + number}:04<2:31:10,  3.11s/it]"

    ended = "slurmstepd: error: *** JOB 77 ON gn3 CANCELLED AT 2026-04-11T08:12:40 DUE TO PREEMPTION ***"
    resumed = "Resuming training from out/checkpoint-90"
    for lacking, jump, loss in (
        (["There were missing keys in the checkpoint model loaded: ['x']."], True, 3.1),
        ([], True, 3.1),
        ([], False, 0.79),
    ):
        log = [*trained(60, 0.8, 20), ended, resumed, *lacking, *trained(100, loss, 1)]
        write_log(tmp_path / "fit.out", log)
        run = gather_paths([str(tmp_path / "fit.out")], tmp_path).runs[0]
        assert [attempt["ended"] for attempt in run.record.attempts] == ["preempted", "unknown"]
        assert (run.record.loss_first, run.record.loss_last) == (0.8, pytest.approx(loss - 0.03))
        flags = flags_with(run, "the loss jumps from 0.77 to 3.1 where attempt 2 resumes")
        assert len(flags) == jump
        assert [flag for flag in flags if "fit.out:11" in flag] == flags * bool(lacking)
