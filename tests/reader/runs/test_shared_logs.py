"""The three real logs: what their records must say, and where Megatron-DeepSpeed's tables say something else."""

import re

import pytest

from hpc_gpt.report.gather import gather_paths

pytestmark = pytest.mark.shared


@pytest.fixture
def runs(shared, tmp_path):
    gathered = gather_paths([str(shared / "logs")], tmp_path)
    assert not gathered.unread
    return {str(run.record.run): run for run in gathered.runs}


@pytest.fixture
def records(runs):
    return {name: run.record for name, run in runs.items()}


def test_these_three_runs_and_no_others(records):
    assert sorted(records) == [
        "hf_ds_gpt2_base_n4-1832555",
        "meg_ds_zero_gpt2_perf_n16_nbs48_ms48",
        "meg_gpt2_perf_n16",
    ]


def flags_with(record, words):
    return [flag for flag in record.flags if words in flag]


def test_megatron_of_64_gpus(runs):
    run = runs["meg_gpt2_perf_n16"]
    record = run.record
    assert (record.gpus, record.tp, record.pp, record.dp) == (64, 4, 16, 1)
    assert (record.micro_batch, record.micro_batches, record.global_batch) == (4, 256, 1024)
    # Steps of 155.4838 s, 129.0288 s and 128.8915 s: the first is warm-up. Megatron-DeepSpeed's tables say 129 s.
    assert record.step_s == pytest.approx((129.0288 + 128.8915) / 2)
    assert (record.steps_used, record.warmup_steps) == (2, 1)
    assert run.steps.steady.tolist() == [False, True, True]
    assert flags_with(record, "every step was skipped")
    assert (record.skipped_steps, record.loss_first, record.loss_last) == (3, None, None)
    assert run.steps.is_skipped.all()
    # 52.0B; Megatron-DeepSpeed's tables say 48B, which is 48.4 x 2^30.
    assert record.params == 51_970_064_384
    assert int(record.params / 2**30) == 48
    # The ranks count 52,419,952,640: the embedding twice, what every tensor-parallel rank holds four times. No flag.
    assert record.settings["params_printed"] == 52_419_952_640
    assert not flags_with(record, "parameters")
    # 48 in place of 52.0 gives the source's 48.7 TFLOPs (at 129 s): the same formula gives 52.8.
    assert record.tflops_seed == pytest.approx(52.82, abs=0.01)
    assert record.tflops_seed * 48e9 / record.params * record.step_s / 129 == pytest.approx(48.77, abs=0.01)
    assert (record.engine, record.dtype, record.recompute, record.seq) == ("megatron-lm", "fp16", "full", 1024)
    assert (record.layers, record.hidden, record.heads, record.vocab) == (64, 8192, 32, 50688)
    assert (record.ended, record.cause) == ("unknown", "the log ends at step 3 of 1000")
    # The log has times of day only until training begins: 413.4 s of steps are not in it.
    assert record.gpu_hours == pytest.approx(64 * (155.4838 + 129.0288 + 128.8915) / 3600)
    assert record.device is None
    assert record.mfu is None


def test_zero_of_64_gpus(records):
    record = records["meg_ds_zero_gpt2_perf_n16_nbs48_ms48"]
    assert (record.gpus, record.tp, record.pp, record.dp) == (64, 4, 1, 16)
    assert (record.micro_batch, record.micro_batches, record.global_batch) == (48, 1, 768)
    # 121.8998 s, 125.9124 s, 123.9078 s: Megatron-DeepSpeed's tables say 122 s, which is the first alone.
    assert record.step_s == pytest.approx((125.9124 + 123.9078) / 2)
    assert (record.engine, record.zero_stage) == ("deepspeed-zero", 3)
    # The program says 52.005e9, which counts what each of the four tensor-parallel ranks holds four times.
    assert record.params == 51_970_064_384
    assert flags_with(record, "counts 52,005,000,000 parameters")
    assert flags_with(record, "51,970,064,384: parameters that each of 4 tensor-parallel ranks holds count 4 times")
    assert record.tflops_printed == pytest.approx((40.6 + 41.26) / 2)
    assert record.memory_allocated_gib == [pytest.approx(26118.2294921875 / 1024)]
    assert record.memory_reserved_gib == [pytest.approx(28234 / 1024)]
    assert (record.loss_first, record.loss_last) == (12.52221, 40.75231)
    assert record.skipped_steps == 0
    # The source's 38.67 TFLOPs are of 122 s and 48e9; the steady steps and the true size give 40.9.
    assert record.tflops_seed == pytest.approx(40.90, abs=0.01)
    assert record.tflops_seed * 48e9 / record.params * record.step_s / 122 == pytest.approx(38.67, abs=0.01)


def test_hugging_face_of_16_gpus(runs):
    run = runs["hf_ds_gpt2_base_n4-1832555"]
    record = run.record
    assert (record.gpus, record.nodes, record.tp, record.pp, record.dp) == (16, 4, 1, 1, 16)
    assert (record.micro_batch, record.micro_batches, record.global_batch) == (4, 1, 64)
    # 919.03 s / 16; Megatron-DeepSpeed's tables say 58.72 s, which is 64 / 1.09 samples a second.
    assert record.step_s == pytest.approx(919.03 / 16, abs=0.005)
    assert (record.steps_used, record.warmup_steps) == (16, 0)
    assert "warm-up included" in record.sources["step_s"]
    assert flags_with(record, "warm-up included")
    assert (record.layers, record.hidden, record.heads) == (40, 7168, 32)
    assert (record.seq, record.vocab) == (1024, 50257)
    # The script's 23B is in units of 2^30.
    assert record.params == 25_033_831_424
    assert flags_with(record, "prints a size of 23B")
    assert (record.engine, record.zero_stage, record.dtype) == ("hf-deepspeed", 3, "fp16")
    # The source's 25.66 TFLOPs is twice what its formula gives for its own row, 12.83.
    assert record.tflops_seed == pytest.approx(14.28, abs=0.01)
    assert (record.job_id, record.ended) == ("1832555", "done")
    assert record.tokens_total == 1024 * 1024
    assert run.steps["step"].tolist() == list(range(1, 17))
    assert not run.steps.steady.any()


def test_every_figure_says_where_it_is_from(records, shared):
    bare = {"schema", "run", "dialect", "settings", "flags", "flag_kinds", "sources", "versions"}
    for record in records.values():
        there = {key for key, value in record.to_tables().items() if value not in (None, [], {})}
        assert there - set(record.sources) <= bare
        for key in ("gpus", "global_batch", "step_s"):
            file, line = re.search(r"(/\S+):(\d+)", record.sources[key]).groups()
            assert 0 < int(line) <= len((shared / "logs" / file.rsplit("/")[-1]).read_bytes().split(b"\n"))
