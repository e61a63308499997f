"""How many GPUs a run had, by what its log says in passing: only if all of it agrees."""

from __future__ import annotations

import pytest

from hpc_gpt.report.gather import gather_paths
from tests.readers.made_logs import run_of

STEP = "iter {0}: loss {1:.4f}, time 250.10ms, mfu 31.20%"
STEPS = [STEP.format(step, 5 - step / 100) for step in range(0, 100, 10)]
# Lightning's lines, and NeMo's; the rank's label is srun's.
LIGHTNING = "2: Initializing distributed: GLOBAL_RANK: 2, MEMBER: 3/16"
REGISTERED = "All distributed processes registered. Starting with 16 processes"


def record_of(*lines):
    return run_of(*lines).record


def labelled(label, ranks):
    return [label.format(rank) + line for line in STEPS for rank in range(ranks)]


@pytest.mark.parametrize(
    ("before", "gpus", "where"),
    [
        (["World size: 16"], 16, "a.log:1, the world size"),
        (["training on 8 devices"], 8, "a.log:1, the world size"),
        (["World size: 16", "training on 16 GPUs"], 16, "a.log:1, the world size"),
        (["World size: 16", "training on 8 GPUs"], None, None),
        ([LIGHTNING], 16, "a.log:1, the world size"),
        ([LIGHTNING, "distributed_backend=nccl", REGISTERED], 16, "a.log:1, the world size"),
        ([LIGHTNING, "distributed_backend=gloo", REGISTERED], None, None),
        (["GPU available: True (cuda), used: False", LIGHTNING], None, None),
        (["World size: 2", "--nnodes 2 --nproc_per_node 8 "], 16, "nodes 2 x gpus_per_node 8"),
    ],
)
def test_a_world_size(tmp_path, before, gpus, where):
    record = record_of([*before, *STEPS])
    assert record.gpus == gpus
    assert where is None or record.sources["gpus"].endswith(where)


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        (labelled("[rank{0}]: ", 8), 8),
        (labelled("{0}: ", 4), 4),
        (labelled("[default{0}]:", 8), None),  # of each node
        ([f"[rank3]: {line}" for line in STEPS], None),
        ([line for line in labelled("[rank{0}]: ", 8) if "rank5" not in line], None),
        (["World size: 16", *labelled("[rank{0}]: ", 8)], None),
    ],
)
def test_consecutive_labels_of_ranks_from_0(tmp_path, lines, gpus):
    assert record_of(lines).gpus == gpus
    (tmp_path / "b.log").write_text("".join(f"{line}\n" for line in lines))
    (run,) = gather_paths([str(tmp_path / "b.log")], tmp_path).runs
    assert run.record.gpus == gpus, "also by blocks"


def test_a_table_of_gpus_counts_for_the_only_node(tmp_path):
    table = [f"GPU {at}: NVIDIA A100-SXM4-80GB (UUID: GPU-{at})" for at in range(4)]
    assert record_of([*table, *STEPS]).gpus is None, "the job may have used one of them"
    assert record_of(["torchrun --nnodes 1 train.py", *table, *STEPS]).gpus == 4


def test_tinygrad_names_its_gpus_in_each_line(tmp_path):
    """tinygrad/tinygrad, pull request 9648."""
    line = (
        "{0:5} {1} ms run,   77.01 ms python,   0.43 ms fetch data, 4081.33 ms AMD * 8,  0.69 loss, 0.000571 LR,"
        " 1038.57 GB used, 328033.10 GFLOPS"
    )
    times = ("182379.69", "207579.13", "15884.85", "4158.77", "4167.34", "4168.57", "4174.75", "4159.77")
    lines = ["training with batch size 1024 for one epoch with 3222 steps"]
    record = record_of([*lines, *(line.format(*pair) for pair in enumerate(times))])
    assert (record.engine, record.gpus, record.global_batch) == ("tinygrad", 8, 1024)
    assert record.step_s == pytest.approx(4.167, abs=0.01)


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [(range(10, 60, 10), 5), (range(10, 50, 10), None), ([3] * 9, None), ([5, 4, 3, 2, 1, 0], None)],
)
def test_an_unknown_program_needs_five_lines_with_a_rising_step(tmp_path, numbers, steps):
    lines = [f"step: {step}, loss: {9 - at / 10:.4f}, step_time: 0.2512s" for at, step in enumerate(numbers)]
    record = record_of(lines)
    assert record.loss_last == (None if steps is None else 9 - (steps - 1) / 10)
    assert (record.step_s is None) == (steps is None)


MEGATRON = (
    " iteration {0:8d}/     100 | consumed samples: {1:12d} | consumed tokens: {2:12d} |"
    " elapsed time per iteration (ms): 1000.0 | samples per second: 64.0 | tokens per gpu per second (tgs): 8192.0 |"
    " lm loss: 2.0E+00 |"
)


def test_gpus_and_batch_follow_from_rates_and_counts_that_agree(tmp_path):
    lines = [MEGATRON.format(step, 64 * step, 64 * 2048 * step) for step in range(1, 9)]
    record = record_of(lines)
    assert (record.seq, record.global_batch, record.gpus) == (2048, 64, 16)
    grown = [MEGATRON.format(step, 32 * step * step, 32 * 2048 * step * step) for step in range(1, 9)]
    assert record_of(grown).global_batch is None


def test_dp_follows_from_the_three_sizes_of_a_batch(tmp_path):
    said = (
        "[titan] 2026-02-11 01:21:06,678 - __main__ - INFO - Trainer is initialized with local batch size 1, "
        "global batch size 48, gradient accumulation steps 2, sequence length 4096, total steps 9 (warmup 2)"
    )
    step = "[titan] - root - INFO - step: {0:2d}  loss:  7.7  memory: 15.45GiB(24.14%)  tps: 1,425  mfu: 19.71%"
    record = record_of([said, *(step.format(number) for number in range(1, 6))])
    assert (record.dp, record.gpus) == (24, None)
    mesh = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=24, cp=1, tp=2, ep=1"
    assert record_of([mesh, said, *(step.format(n) for n in range(1, 6))]).gpus == 48
