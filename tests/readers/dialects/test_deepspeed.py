"""DeepSpeed's own lines, and GPT-NeoX's."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_gpt.readers.runs.log_steps import run_steps
from tests.readers.dialects.reading import facts_of, read_text, step_of

TIMER = (
    "[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step=34/global_step=34,"
    " RunningAvgSamplesPerSec=7.864669709950182, CurrSamplesPerSec=8.00912418308922, MemAllocated=59.65GB,"
    " MaxMemAllocated=63.31GB"
)
OVERFLOW = (
    "[2023-07-25 21:03:18,000] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
    " Attempted loss scale: 65536, reducing to 32768"
)


def test_memory_is_in_2_to_the_30_and_the_highest_counts() -> None:
    part = read_text(
        "[2021-06-10 20:47:51,721] [INFO] [utils.py:628:see_memory_usage] MA 1.73 GB         Max_MA 10.73 GB"
        "         CA 1.75 GB         Max_CA 11 GB \n"
        "[2021-06-10 20:47:52,721] [INFO] [utils.py:628:see_memory_usage] MA 1.73 GB         Max_MA 2.73 GB"
        "         CA 1.75 GB         Max_CA 3 GB \n"
    )
    assert (part.memory[None].allocated_gib, part.memory[None].reserved_gib) == (10.73, 11)


def test_throughput_of_the_whole_job_at_the_last_step() -> None:
    step = step_of(TIMER, "deepspeed_throughput")
    assert (step["step"], step["samples_per_s"]) == (34, 8.00912418308922)
    assert read_text(TIMER).memory[None].allocated_gib == 63.31


def test_the_older_timer_is_a_running_mean() -> None:
    line = "[2021-03-10 18:22:31,608] [INFO] [timer.py:154:stop] 0/25, SamplesPerSec=6.302019280317165"
    step = step_of(line, "deepspeed_average")
    assert (step["step"], step["samples_per_s"]) == (25, 6.302019280317165)


def test_the_pipeline_engine() -> None:
    line = "[2021-05-27 04:02:02,142] steps: 2 loss: 12.8004 iter time (s): 145.206 samples/sec: 7.052"
    step = step_of(line, "deepspeed_pipe")
    assert (step["step"], step["loss"], step["step_s"], step["samples_per_s"]) == (2, 12.8004, 145.206, 7.052)
    more = line.replace("iter time", "moe loss: 0.1000 iter time")
    assert step_of(more, "deepspeed_pipe") == step
    assert np.isnan(step_of(line.replace("12.8004", "nan"), "deepspeed_pipe")["loss"])


def test_the_stages_parameters() -> None:
    part = read_text(
        "[INFO] [engine.py:134:__init__] RANK=0 STAGE=0 LAYERS=7 [0, 7) STAGE_PARAMS=917757952 (917.758M)"
        " TOTAL_PARAMS=52419493888 (52419.494M) UNIQUE_PARAMS=52004257792 (52004.258M)"
    )
    assert [count for count, _ in part.rank_params.values()] == [917757952]
    assert facts_of(part) == {"params_of_ranks": [52419493888], "params": [52004257792]}


def test_progress_but_not_what_is_said_before_training() -> None:
    line = (
        "[2021-05-27 04:02:02,141] [INFO] [logging.py:60:log_dist] [Rank 0] step={}, skipped=3,"
        " lr=[3.75e-05, 3.75e-05], mom=[(0.9, 0.999)]"
    )
    step = step_of(line.format(20), "deepspeed")
    assert (step["step"], step["skipped_so_far"], step["lr"]) == (20, 3, 3.75e-05)
    assert not read_text(line.format(0)).steps


def test_timers() -> None:
    part = read_text(
        "[2023-07-25 21:03:17,269] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms)"
        " | fwd_microstep: 41.28 | step: 12.20\n"
        "[2021-05-27 04:02:02,142] [INFO] [logging.py:60:log_dist] [Rank 0] rank=0 time (ms) | train_batch: 0.50"
    )
    assert {name: total for name, (total, _) in part.timers_s.items()} == {
        "fwd_microstep": pytest.approx(0.04128),
        "step": pytest.approx(0.0122),
        "train_batch": pytest.approx(0.0005),
    }
    assert list(part.dialects) == ["deepspeed"]


def test_an_overflow_skips_the_step_of_the_next_line() -> None:
    later = TIMER.replace("step=34", "step=44").replace("21:03:17", "21:04:17")
    other_rank = OVERFLOW.replace("Rank 0", "Rank 3")
    steps = run_steps([[read_text("\n".join([TIMER, OVERFLOW, other_rank, OVERFLOW, later]))]])
    assert steps.dialect == "deepspeed_throughput"
    assert steps["skipped"].tolist() == [0, 2]


def test_an_overflow_alone_is_no_step() -> None:
    part = read_text(OVERFLOW)
    assert len(run_steps([[part]])) == 0
    assert part.steps["deepspeed_overflow"].totals["skipped"] == 1


def test_the_configs_world_is_the_data_parallel_one() -> None:
    before = "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   "
    part = read_text(
        f"{before}world_size ................... 16\n"
        f"{before}train_batch_size ............. 768\n"
        f"{before}train_micro_batch_size_per_gpu  48\n"
        f"{before}gradient_accumulation_steps .. 1\n"
        f"{before}zero_optimization_stage ...... 3\n"
        f"{before}bfloat16_enabled ............. True\n"
        f"{before}fp16_enabled ................. False\n"
        f"{before}zero_config .................. stage=3 overlap_comm=True"
        " offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device='cpu', pin_memory=False)\n"
    )
    assert facts_of(part) == {
        "dp": [16],
        "global_batch": [768],
        "micro_batch": [48],
        "micro_batches": [1],
        "zero_stage": [3],
        "dtype": ["bf16"],
        "optimizer_offload": [True],
    }
    assert not part.arguments


def test_no_offload_is_no_offload() -> None:
    before = "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   "
    part = read_text(
        f"{before}zero_config .................. stage=2 offload_param=None offload_optimizer=None\n"
        f"{before}zero_config .................. stage=2"
        " offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device='none', pin_memory=False)\n"
        '    "offload_optimizer": {\n        "device": "none"\n    },\n    "cpu_offload": false'
    )
    assert not part.facts


def test_an_optimizer_of_the_cpu_is_offloaded() -> None:
    line = "[INFO] [engine.py:641:_configure_optimizer] DeepSpeed Basic Optimizer = DeepSpeedCPUAdam"
    assert facts_of(read_text(line)) == {"optimizer_offload": [True]}


def test_versions_profile_and_end() -> None:
    part = read_text(
        "[INFO] [logging.py:60:log_dist] [Rank 0] DeepSpeed info: version=0.3.17+unknown, git-hash=unknown\n"
        "torch version .................... 1.8.1\n"
        "world size:                                                             8       \n"
        "data parallel size:                                                     4       \n"
        "batch size per GPU:                                                     16      \n"
        "params of model = params per GPU * mp_size:                             1.34 B  \n"
        "[2023-01-01 00:00:00,000] [INFO] [launch.py:350:main] Process 4711 exits successfully."
    )
    assert facts_of(part) == {
        "deepspeed_version": ["0.3.17+unknown"],
        "torch_version": ["1.8.1"],
        "gpus": [8],
        "dp": [4],
        "micro_batch": [16],
        "params": [1_340_000_000],
    }
    assert [ended for ended, _ in part.ends] == ["done"]


def test_neox() -> None:
    line = (
        " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): 4103.1 |"
        " learning rate: 2.111E-06 | approx flops per GPU: 112.9TFLOPS | lm_loss: 1.118665E+01 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    expected = {
        "step": 34,
        "step_s": pytest.approx(4.1031),
        "samples_per_s": 7.799,
        "lr": 2.111e-6,
        "tflops": 112.9,
        "loss": 11.18665,
        "skipped": 0,
        "nan": 0,
    }
    assert step_of(line, "gpt_neox") == expected
    assert step_of(line.replace("112.9TFLOPS", "112.9GFLOPS"), "gpt_neox")["tflops"] == pytest.approx(0.1129)
    assert "tflops" not in step_of(line.replace("112.9TFLOPS", "1.2PFLOPS"), "gpt_neox")
    assert step_of(line.replace(" lm_loss", " MFU: 38.12% | HFU: 41.20% | lm_loss"), "gpt_neox")["mfu"] == 0.3812


def test_neox_evaluates_and_counts() -> None:
    part = read_text(
        " validation results at iteration 1000 | lm_loss value: 2.716132E+00 | lm_loss_ppl value: 1.5E+01 | \n"
        " test results at iteration 1000 | lm_loss value: 2.5E+00 | \n"
        " > total params: 20,556,201,984\n"
        "rank: 0 | time: 2021-05-26 03:20:38 | exiting the program at iteration 34"
    )
    assert part.evals == [(1000, 2.716132, 1)]
    assert facts_of(part) == {"params": [20_556_201_984]}
    assert [ended for ended, _ in part.ends] == ["done"]


def test_the_bridges_memory_is_in_10_to_the_9() -> None:
    part = read_text(
        "Step Time : 5.36s GPU utilization: 243.6MODEL_TFLOP/s/GPU\n"
        "[Rank 3] (after 2 iterations) memory (GB) | mem-reserved-gigabytes: 33.4 | mem-max-allocated-gigabytes: 30.1 |"
        " mem-max-reserved-gigabytes: 33.5 | mem-alloc-retries: 0"
    )
    assert part.memory[3].allocated_gib == pytest.approx(30.1e9 / 2**30)
    assert part.memory[3].reserved_gib == pytest.approx(33.5e9 / 2**30)
    assert part.steps["megatron_bridge"]["tflops"].tolist() == [243.6]
