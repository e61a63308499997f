"""From the lines of a log to a record: step time, batch, memory, ends, and the flags of each."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.ends.failures import ENDED
from hpc_gpt.readers.runs import foreign_run as runs_module
from hpc_gpt.readers.runs.foreign_run import read_foreign
from hpc_gpt.readers.runs.grouping import group_logs
from hpc_gpt.readers.runs.log_steps import run_steps
from hpc_gpt.report.gather import gather_paths
from hpc_gpt.runs.record import Record
from tests.readers.made_logs import dump, iteration, iterations, run_of, write_log
from tests.readers.reading import read_lines


def flags_with(run, words):
    return [flag for flag in run.record.flags if words in flag]


def test_layout_and_batch_follow_from_what_is_stated():
    record = run_of(dump(), iterations(1, 20)).record
    assert (record.gpus, record.tp, record.pp, record.dp) == (8, 2, 2, 2)
    assert (record.micro_batch, record.micro_batches, record.global_batch) == (4, 2, 16)
    assert record.sources["micro_batches"] == "inferred: global_batch 16 / (micro_batch 4 x dp 2)"
    assert record.sources["gpus"] == "a.log:1"
    assert record.sources["hidden"] == "a.log:6 (argument hidden_size)"
    assert (record.step_s, record.steps_used, record.warmup_steps) == (1.0, 19, 1)
    assert record.tokens_per_s == 16 * 128
    assert record.tokens_total == 20 * 16 * 128
    assert (record.loss_first, record.loss_last) == (9.999, 9.98)
    assert record.params == 4 * (12 * 256**2 + 13 * 256) + 50432 * 256 + 128 * 256 + 2 * 256


def test_the_vocabulary_is_padded_as_the_arguments_say_where_the_log_does_not():
    record = run_of(dump(padded_vocab_size=None, vocab_size=50257), iterations(1, 5)).record
    assert record.vocab == 50432
    assert record.sources["vocab"] == "inferred: vocabulary 50257 padded to a multiple of 128 x tp 2"


def test_the_output_log_of_wandb_is_named_by_its_run(tmp_path):
    for run in ("run-20240305_101112-ab12cd34", "offline-run-20240306_091112-ef56ab78"):
        folder = tmp_path / "wandb" / run / "files"
        folder.mkdir(parents=True)
        folder.joinpath("output.log").write_text("".join(f"{line}\n" for line in iterations(1, 8)))
    records = gather_paths([str(tmp_path)], tmp_path).records
    assert [(record.run, record.name, record.job_id) for record in records] == [
        ("offline-run-20240306_091112-ef56ab78", "offline-run-20240306_091112-ef56ab78", None),
        ("run-20240305_101112-ab12cd34", "run-20240305_101112-ab12cd34", None),
    ]


def test_nothing_is_assumed_where_nothing_is_said():
    record = run_of(iterations(1, 20)).record
    unknown = ("gpus", "tp", "pp", "dp", "micro_batch", "seq", "hidden", "params", "device", "recompute", "mfu")
    assert [getattr(record, name) for name in unknown] == [None] * len(unknown)
    assert not {*unknown} & ({*record.sources} - {"mfu"})
    assert (record.step_s, record.global_batch) == (1.0, 16)


def test_what_the_program_did_goes_before_what_it_was_asked_and_both_are_told():
    run = run_of(dump(), iterations(1, 20, batch=32))
    assert run.record.global_batch == 32
    assert flags_with(run, "the log says the global batch 32 (a.log:21), but the arguments ask for 16 (a.log:5")


def test_a_layout_that_cannot_be_is_told():
    run = run_of(dump(world_size=8, data_parallel_size=4), iterations(1, 5))
    assert flags_with(run, "needs 16 GPUs, but 8 are stated")


def test_a_batch_that_is_ramped_up():
    run = run_of(
        dump(global_batch_size=64, data_parallel_size=2), iterations(1, 5, batch=16), iterations(6, 20, batch=64)
    )
    assert run.record.global_batch == 64
    assert flags_with(run, "grew during the run, from 16 to 64")


def test_a_line_that_is_the_mean_of_ten():
    lines = [iteration(10, 5800.0), *(iteration(step, 2740.0) for step in range(20, 101, 10))]
    run = run_of(dump(log_interval=10), lines)
    record = run.record
    assert (record.step_s, record.steps_used, record.warmup_steps) == (2.74, 9, 1)
    assert "9 of 10 lines, 10 steps apart" in record.sources["step_s"]
    assert record.tokens_total == 100 * 16 * 128


VALIDATION = " validation loss at iteration 10 | lm loss value: 3.5E+00 | lm loss PPL: 3.3E+01 | "
SAVED = "  successfully saved checkpoint at iteration      20 to /ckpt"


def test_the_line_after_an_evaluation_or_a_save_is_set_apart():
    lines = iterations(1, 40)
    lines[10], lines[20] = iteration(11, 4000.0), iteration(21, 4000.0)
    run = run_of(dump(), lines[:10], VALIDATION, lines[10:20], SAVED, lines[20:])
    record = run.record
    assert (record.step_s_p90, record.steps_used) == (1.0, 37)
    assert "1 warm-up, 2 set apart" in record.sources["step_s"]
    assert not run.steps.steady[[10, 20]].any()
    assert record.loss_eval == 3.5
    assert not flags_with(run, "took over")


def test_an_evaluation_that_was_asked_for_and_is_not_in_the_log_is_set_apart_and_told():
    lines = iterations(1, 40)
    lines[10], lines[20] = iteration(11, 4000.0), iteration(21, 4000.0)
    run = run_of(dump(eval_interval=10), lines)
    assert not run.steps.steady[[10, 20]].any()
    assert run.steps.steady[30]
    assert flags_with(run, "slow lines after an evaluation every 10 steps")


def test_a_slow_line_of_no_known_cause_stays_in_the_median_and_is_told():
    lines = iterations(1, 40)
    lines[17] = iteration(18, 9000.0)
    run = run_of(dump(), lines)
    assert run.record.steps_used == 39
    assert run.steps.steady[17]
    assert flags_with(run, "1 of 39 steady lines took over 1.5 x the median, the slowest 9 s (a.log:38)")


def test_skipped_and_nan_steps_are_counted_and_set_apart():
    lines = [
        *(iteration(1, 5000.0), iteration(2, 500.0, skipped=1, loss=None), iteration(3, 500.0, skipped=1, loss=None)),
        *(iteration(step) for step in range(4, 20)),
        *(iteration(20, 900.0, loss="nan", nan=1), iteration(21)),
    ]
    run = run_of(dump(), lines)
    record = run.record
    assert (record.skipped_steps, record.nan_steps, record.step_s) == (2, 1, 1.0)
    assert run.steps.is_skipped.tolist() == [False, True, True] + [False] * 18
    assert not run.steps.steady[[1, 2, 19]].any()
    assert flags_with(run, "1 line with a loss that is no number")


def test_a_log_of_nothing_but_skips_gives_its_median_and_says_what_that_is():
    run = run_of(dump(), [iteration(step, 1000.0, skipped=1, loss=None) for step in range(1, 8)])
    assert (run.record.step_s, run.record.steps_used) == (1.0, 6)
    assert flags_with(run, "every step was skipped")
    # Half of them skipped is not every one.
    some = run_of(dump(), [iteration(step, 1000.0, skipped=step % 2) for step in range(1, 8)])
    assert not flags_with(some, "every step was skipped")


def test_memory_of_each_stage_is_the_highest_of_its_ranks():
    # tp2 pp2 dp2: ranks 0 to 3 are the first stage, 4 to 7 the second.
    lines = [
        f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {1024 * (rank + 1)}.0 | "
        f"reserved: 1.0 | max reserved: {2048 * (rank + 1)}.0"
        for rank in (0, 1, 4, 7)
    ]
    run = run_of(dump(), iterations(1, 3), lines, iterations(4, 20))
    assert run.record.memory_allocated_gib == [2.0, 8.0]
    assert run.record.memory_reserved_gib == [4.0, 16.0]


def test_memory_of_some_stages_is_one_figure_and_told():
    line = "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 1024.0 | reserved: 1.0 | max "
    line += "reserved: 1.0"
    run = run_of(dump(), iterations(1, 3), line, iterations(4, 20))
    assert run.record.memory_allocated_gib == [1.0]
    assert flags_with(run, "memory is printed of 1 of 2 stages")


def test_done_is_the_last_planned_step_or_a_word_of_the_program():
    assert run_of(dump(), iterations(1, 20, of=20)).record.ended == "done"
    record = run_of(dump(), iterations(1, 20)).record
    assert (record.ended, record.cause) == ("unknown", "the log ends at step 20 of 1000")


def test_a_failure_is_the_cause_with_its_place():
    run = run_of(
        dump(), iterations(1, 20), "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert run.record.ended == "gpu_memory"
    assert run.record.cause.endswith("(a.log:41)")
    assert run.failures[0].place.line == 41


def test_no_secret_is_in_a_record():
    secrets = {"wandb_api_key": "0123456789abcdef0123456789abcdef01234567", "hub_token": "hf_" + "a" * 30}
    run = run_of(dump(**secrets, password="hunter2hunter2", tokenizer_type="GPT2BPETokenizer"), iterations(1, 5))
    text = run.record.to_json()
    for secret in (*secrets.values(), "hunter2"):
        assert secret not in text
    assert "GPT2BPETokenizer" in text


def test_timers_are_means_in_milliseconds():
    times = "time (ms) | forward-compute: {0}.00 | optimizer: 87.67"
    run = run_of(dump(), iterations(1, 1), times.format(100), iterations(2, 2), times.format(200))
    assert run.record.settings["timers_ms"]["forward-compute"] == pytest.approx(150)


TITAN = (
    "[rank0]:[titan] 2025-07-21 15:57:{0:02d},242 - root - INFO - step: {1:2d}  loss:  4.6671  grad_norm:  2.5457  "
    "memory:  0.50GiB(0.00%)  tps: {2}  tflops: 3.59  mfu: 0.36%"
)


def test_tokens_a_second_of_one_gpu_alone_are_no_step_time():
    run = run_of([TITAN.format(step, step, "35,051") for step in range(1, 31)])
    assert run.record.tflops_printed == 3.59
    assert run.record.tokens_per_s is None
    # One step per second by the lines' times of day; a flag says that the program does not print it.
    assert run.record.step_s == pytest.approx(1.0)
    assert run.record.sources["step_s"].startswith("inferred: differences of the lines' times of day")
    assert flags_with(run, "prints no step time")


def test_a_log_without_steps_but_with_facts_is_a_run():
    record = run_of(dump(), "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB").record
    assert (record.gpus, record.step_s, record.ended) == (8, None, "gpu_memory")


def test_thinned_lines_are_told():
    parts = read_lines("a.log", [*dump(), *iterations(1, 30)])
    (steps,) = parts[0].steps.values()
    steps.stride, steps.count = 4, 120
    found = run_steps([parts])
    assert (found.stride, found.count) == (4, 120)


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
    assert run.record.step_s == pytest.approx(np.median(steady))
    assert run.record.steps_used == len(steady)


def test_report_writes_nothing_beside_a_foreign_log(tmp_path):
    write_log(tmp_path / "lab" / "a.log", dump(), iterations(1, 5))
    before = sorted(path.name for path in (tmp_path / "lab").rglob("*"))
    assert len(gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs) == 1
    assert sorted(path.name for path in (tmp_path / "lab").rglob("*")) == before


def test_a_record_of_a_log_is_json(tmp_path):
    record = run_of(dump(), iterations(1, 5)).record
    assert json.loads(record.to_json())["dialect"] == "megatron"


def test_a_total_over_steps_that_were_trained_before_is_no_figure():
    lines = ["  Continuing training from global step 500", "Total optimization steps = 16"]
    record = run_of(lines, "{'train_runtime': 900.0, 'train_samples_per_second': 1.0, 'epoch': 1.0}").record
    assert record.step_s is None


def test_a_log_of_failures_alone_is_of_no_engine():
    line = "slurmstepd: error: *** JOB 1999618 ON r6i4n5 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***"
    record = run_of(line).record
    assert (record.engine, record.dialect, record.ended) == (None, None, "walltime")
    assert record.job_id == "1999618"


def test_two_programs_that_time_the_same_steps_otherwise_are_told_of():
    pipe = "[2021-05-27 04:02:{0:02d},142] steps: {0} loss: 12.8004 iter time (s): 0.900 samples/sec: 7.052"
    lines = [line for step in range(1, 11) for line in (pipe.format(step), iteration(step, 1000.0))]
    run = run_of(dump(), lines)
    assert run.record.step_s == 1.0
    assert flags_with(run, "times the same steps at 0.900 of what megatron says")


@pytest.mark.parametrize(("every", "each_s"), [(1, 20.0), (1, 0.25), (10, 0.5)])
def test_the_lines_times_of_day_tell_a_step_time_where_nothing_else_does(every, each_s):
    lines = []
    for step in range(every, 400 * every, every):
        at = datetime.fromtimestamp(1.7e9 + int(step * each_s), UTC).strftime("%Y-%m-%d %H:%M:%S")
        line = TITAN.replace("2025-07-21 15:57:{0:02d},242", f"{at},000")
        lines.append(line.format(0, step, "1,000"))
    run = run_of(lines)
    assert run.record.step_s == pytest.approx(each_s, rel=0.03)
    assert flags_with(run, "prints no step time: step_s is from differences of the lines' times of day")


def test_lines_without_a_number_are_placed_by_their_epochs():
    head = ["  Num Epochs = 2", "  Total optimization steps = 250"]
    text = "{{'loss': {:.4f}, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': {:.2f}}}"
    run = run_of(head, [text.format(5 - step / 100, step / 125) for step in range(10, 251, 10)])
    assert run.steps["step"].tolist() == list(range(10, 251, 10))
    # Without the length of an epoch they are counted, and a flag says it.
    run = run_of([text.format(5 - step / 100, step / 125) for step in range(10, 251, 10)])
    assert run.steps["step"].tolist() == list(range(1, 26))
    assert flags_with(run, "have no step numbers")


def test_the_curve_has_tokens_a_second_where_the_batch_is_known():
    curve = run_of(dump(), iterations(1, 5)).steps
    assert curve["tokens_per_s"].tolist() == [16 * 128 / 5] + [16 * 128] * 4


def test_many_long_logs_are_held_in_bounded_room_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "_MOST_ROWS", 300)
    for number, length in enumerate((50, 200, 400)):
        write_log(tmp_path / f"exp{number}" / "train.log", dump(), iterations(1, length))
    found = {read.record.run: read for read in gather_paths([str(tmp_path)], tmp_path).runs}
    held = {name: len(read.steps["step"]) for name, read in found.items()}
    assert sum(held.values()) <= 300
    assert min(held.values()) >= 25
    assert found["exp2"].steps.stride >= 2
    assert found["exp2"].steps["step"][-1] == 400
    assert any("lines of steps every" in flag for flag in found["exp2"].record.flags)


def test_a_log_that_ends_one_step_short_is_not_done():
    record = run_of(dump(), iterations(1, 19, of=20)).record
    assert (record.ended, record.cause) == ("unknown", "the log ends at step 19 of 20")


def test_tokens_a_second_of_one_gpu_are_a_step_time_by_all_gpus():
    record = run_of(dump(), [TITAN.format(step, step, "512") for step in range(1, 31)]).record
    assert (record.gpus, record.global_batch, record.seq) == (8, 16, 128)
    assert record.step_s == pytest.approx(16 * 128 / (512 * 8))
    assert record.tokens_per_s == pytest.approx(512 * 8)


def test_the_steps_of_a_total_follow_from_rates_of_three_digits():
    """bigscience experiments/gpt2-hf-ds perf_n16: 1000 samples in 273 s, 0.007 steps a second: two steps."""
    total = (
        "{'train_runtime': 273.0148, 'train_samples_per_second': 3.663, 'train_steps_per_second': 0.007, 'epoch': 1.0}"
    )
    run = run_of(total)
    assert (run.record.step_s, run.record.steps_used, run.record.ended) == (pytest.approx(136.5074), 2, "done")
    assert "the only number that is 0.007 a second" in run.record.sources["step_s"]
    # 0.073 a second over ten times as long may be 198, 199 or 200 steps; with a batch of 50 samples it is 200.
    several = total.replace("0.007", "0.073").replace("273.0148", "2730.148")
    assert run_of(several).record.step_s is None
    batch = "  Total train batch size (w. parallel, distributed & accumulation) = 50"
    assert run_of(batch, several).record.step_s == pytest.approx(2730.148 / 200)


def test_a_total_of_fewer_steps_than_planned_is_no_end():
    lines = ["  Total optimization steps = 1000", " 12%|█▎        | 120/1000 [02:00<13:54,  1.06s/it]"]
    total = "{'train_runtime': 120.1, 'train_samples_per_second': 1.0, 'train_steps_per_second': 1.0, 'epoch': 0.1}"
    assert run_of(*lines, total).record.ended == "unknown"
    assert run_of(lines[0], lines[1].replace("120/1000", "1000/1000"), total).record.ended == "done"


def test_the_sequence_follows_from_tokens_and_samples():
    """BLOOM's chronicles: no arguments, but both counts."""
    line = (
        "[default7]: iteration {0:8d}/  115311 | consumed samples: {1:12d} | consumed tokens: {2:12d} | elapsed time "
        "per iteration (s): 106.46 | global batch size:  2048 | lm loss: 2.1988E+00 | samples per second: 19.238 | "
    )
    record = run_of(*[line.format(n, 2048 * n, 2048 * 2048 * n) for n in range(100, 110)]).record
    assert (record.seq, record.tokens_per_s) == (2048, pytest.approx(2048 * 2048 / 106.46))
    assert record.sources["seq"].startswith("inferred: consumed_tokens / consumed_samples")


def test_whole_seconds_time_steps_over_twenty_of_them():
    """awsome-distributed-training's FSDP example: 3 or 4 s by the clock of each line are 3.7 s."""
    line = "0: 2025-06-20 14:17:{:02d} I [train.py:103] Batch {} Loss: 7.24, Speed: 9.41 samples/sec, lr: 0.000010"
    seconds = (10, 14, 17, 21, 24, 28, 32, 36)
    record = run_of(*[line.format(second, 90 + n) for n, second in enumerate(seconds)]).record
    assert record.step_s == pytest.approx(3.7, abs=0.2)
    assert record.attempts[0]["last_step"] == 97


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        (["  train_samples_per_second =       6.48", "  train_steps_per_second   =      0.406"], 501),
        (["  train_samples_per_second =       6.48"], 501),
        (["  Num Epochs = 3"], 501),
        ([], None),  # of how many epochs nothing says
        (["  Num Epochs = 1", "  train_samples_per_second =       6.48"], None),  # they contradict each other
    ],
)
def test_a_metrics_block_of_several_epochs(more, steps):
    """The form of transformers' log_metrics: 2,667 samples in batches of 16, three times."""
    record = run_of(
        "  Num examples = 2,667",
        "  Total train batch size (w. parallel, distributed & accumulation) = 16",
        *[line for line in more if "Epochs" in line],
        "  train_runtime            = 0:20:34.50",
        *[line for line in more if "Epochs" not in line],
    ).record
    assert record.steps_used == steps
    assert record.step_s == (None if steps is None else pytest.approx(1234.5 / steps))
    assert steps is not None or any("over an unknown number of steps" in flag for flag in record.flags)
