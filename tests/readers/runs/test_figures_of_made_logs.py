"""Figures of whole logs made to a known truth, where a plain reading of them goes wrong."""

import json

import pytest

from hpc_gpt.report.gather import gather_paths
from tests.readers.made_logs import dump, iteration, iterations, write_log

HF = """\
***** Running training *****
  Num examples = 3,200
  Num Epochs = 1
  Instantaneous batch size per device = 4
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Gradient Accumulation steps = 2
  Total optimization steps = 50
{'train_runtime': 100.0, 'train_samples_per_second': 32.0, 'train_steps_per_second': 0.5, 'train_loss': 7.4}
"""

MEMORY = (
    "[Rank {}] (after 1 iterations) memory (MB) | allocated: 10.0 | max allocated: 1024.0 | reserved: 20.0"
    " | max reserved: 2048.0"
)


def record_of(tmp_path, *lines):
    write_log(tmp_path / "lab" / "train.log", *lines)
    (run,) = gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs
    return run.record


def growing(batches, each=20, ms_a_sample=10.0):
    """Steps whose batch grows; a step takes as long as its samples."""
    consumed, lines = 0, []
    for step in range(1, len(batches) * each + 1):
        batch = batches[(step - 1) // each]
        consumed += batch
        line = iteration(step, ms_a_sample * batch, batch=batch)
        lines.append(line.replace(f"consumed samples: {16 * step:12d}", f"consumed samples: {consumed:12d}"))
    return lines


def test_steps_of_a_smaller_batch_are_none_of_the_last_ones(tmp_path):
    record = record_of(tmp_path, dump(global_batch_size=64), growing([16, 32, 48, 64]))
    assert (record.global_batch, record.step_s) == (64, 0.64)
    assert record.tokens_per_s == pytest.approx(128 / 0.01)
    assert any("59 lines of steps of another batch than 64" in flag for flag in record.flags)


def test_a_batch_that_grows_without_a_count_of_samples_is_told_of(tmp_path):
    lines = [line.replace("consumed samples", "consumed scamples") for line in growing([16, 64])]
    record = record_of(tmp_path, dump(global_batch_size=64), lines)
    assert any("step_s is of steps of every batch" in flag for flag in record.flags)


def test_the_ranks_of_a_trainer_follow_from_its_batch(tmp_path):
    record = record_of(tmp_path, HF)
    assert (record.gpus, record.dp, record.tp, record.pp) == (8, 8, 1, 1)
    assert "global_batch 64 / (micro_batch 4 x micro_batches 2)" in record.sources["dp"]


def test_tokens_a_second_of_the_whole_job_need_no_count_of_gpus(tmp_path):
    said = ["tokens per iteration will be: 491,520", "Overriding: block_size = 1024"]
    record = record_of(tmp_path, said, [f"iter {step}: loss 4.0000, time 500.00ms" for step in range(20)])
    assert (record.gpus, record.tokens_per_s) == (None, 983_040)


def test_tokens_a_second_follow_from_the_tokens_of_a_step_where_its_length_is_not_told(tmp_path):
    lines = [f"iter {step}: loss 4.0000, time 500.00ms" for step in range(20)]
    record = record_of(tmp_path, "tokens per iteration will be: 491,520", lines)
    assert (record.seq, record.global_batch, record.tokens_per_s) == (None, None, 983_040)
    assert record.sources["tokens_per_s"] == "491520 tokens a step / step_s"


@pytest.mark.parametrize(("last", "ended"), [(99, "done"), (98, "unknown")])
def test_steps_counted_from_0_end_one_before_the_number_planned(tmp_path, last, ended):
    line = "completed step: {}, seconds: 5.000, TFLOP/s/device: 134.924, Tokens/s/device: 8672.758, loss: 10.374"
    record = record_of(tmp_path, "Config param steps: 100", [line.format(step) for step in range(last + 1)])
    assert record.ended == ended


def test_bloom_has_a_norm_behind_its_embedding(tmp_path):
    shape = {"hidden_size": 14336, "num_layers": 70, "num_attention_heads": 112, "padded_vocab_size": 250880}
    kind = {"position_embedding_type": "PositionEmbeddingType.alibi", "embed_layernorm": True}
    record = record_of(tmp_path, dump(**shape, **kind), iterations(1, 10))
    assert record.params == 176_247_271_424  # as its model card says


@pytest.mark.parametrize("between", [MEMORY.format(1), "what no reader knows"])
def test_the_first_rank_dumps_the_arguments_and_the_last_tells_the_steps(tmp_path, between):
    write_log(tmp_path / "lab" / "log.0.out", dump())
    write_log(tmp_path / "lab" / "log.1.out", between)
    write_log(tmp_path / "lab" / "log.2.out", iterations(1, 10))
    (run,) = gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs
    assert (run.record.gpus, run.record.step_s) == (8, 1.0)


def test_the_loss_is_of_the_rank_that_knows_it(tmp_path):
    begin = "[titan] 2025-07-21 15:57:43,242 - root - INFO - "
    line = begin + "step: {:2}  loss: {:7.4f}  memory: 40.00GiB(50.50%)  tps: 3,500  mfu: 0.36%"
    for rank in range(4):
        losses = [10 - step / 10 if rank > 1 else -1.0 for step in range(1, 21)]
        lines = [line.format(step, loss) for step, loss in enumerate(losses, 1)]
        write_log(tmp_path / "lab" / "attempt_0" / str(rank) / "stderr.log", lines)
    (run,) = gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs
    assert (run.record.loss_first, run.record.loss_last) == (9.9, 8.0)


def test_rates_tell_the_gpus_and_the_step_of_a_program_that_names_neither(tmp_path):
    line = (
        "[rank 0] Step: {step:<5d} | Loss: 7.1234 | Global batch size:   1.05M | Tokens/s: {rate} | Tokens/s/GPU: {gpu}"
        " | Tokens: {tokens:.2f}M | MFU: 38.12% | Memory usage:  61.23GB"
    )
    rates = [("26.21K", "3.28K"), *[("131.07K", "16.38K")] * 29]
    lines = [
        line.format(step=step, rate=rate, gpu=gpu, tokens=step * 1.048576) for step, (rate, gpu) in enumerate(rates, 1)
    ]
    record = record_of(tmp_path, lines)
    assert record.gpus == 8
    assert record.sources["gpus"].startswith("inferred: tokens_per_s / tokens_per_s of one GPU")
    assert record.step_s == pytest.approx(8.0, rel=1e-3)
    assert any("step_s is from consumed_tokens of a step / tokens_per_s" in flag for flag in record.flags)
    assert record.tokens_per_s == pytest.approx(131_070)


@pytest.mark.parametrize(("told", "layout"), [(8, (2, 4, 2, 16)), (4, (None, None, 2, None))])
def test_stages_tell_the_layout_where_all_of_them_speak(tmp_path, told, layout):
    lines = [
        f"[2023-05-27 04:00:02,142] [INFO] [engine.py:144:__init__] RANK={4 * stage + tp} STAGE={stage} LAYERS=6 "
        f"[{6 * stage}, {6 * stage + 6}) STAGE_PARAMS=75000000 (75.000M) TOTAL_PARAMS=600000000 (600.000M) "
        "UNIQUE_PARAMS=590000000 (590.000M)"
        for stage in range(4)
        for tp in range(2)
    ]
    world = "[2023-05-27 04:00:01,000] [INFO] [config.py:963:print]   world_size ................... 2"
    steps = [f"steps: {step} loss: 9.0000 iter time (s): 1.500 samples/sec: 85.333" for step in range(10, 200, 10)]
    record = record_of(tmp_path, world, lines[:told], steps)
    assert (record.tp, record.pp, record.dp, record.gpus) == layout
    assert record.step_s == 1.5


def event(key, value, at_s, kind="POINT_IN_TIME", **metadata):
    words = {"namespace": "", "time_ms": int(1.7e12 + 1000 * at_s), "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**words, "metadata": {"file": "/workspace/train.py", "lineno": 1, **metadata}})


@pytest.mark.parametrize("timed", [True, False])
def test_blocks_of_samples_are_steps_of_the_batch(tmp_path, timed):
    lines = [event("global_batch_size", 1536, 0), event("init_start", None, 0, "INTERVAL_START")]
    for block in range(1, 31):
        samples = block * 16 * 1536
        if timed:
            lines.append(event("tracked_stats", {"train_step_timing": 9.0}, 144 * block, step=samples))
        lines.append(event("block_stop", None, 144 * block, "INTERVAL_END", samples_count=samples))
        lines.append(event("eval_accuracy", 4 - block / 100, 144 * block, samples_count=samples))
    record = record_of(tmp_path, lines)
    assert record.step_s == pytest.approx(9.0)
    assert "lines, 16 steps apart" in record.sources["step_s"]
    assert record.loss_eval == pytest.approx(3.7)
    assert not any("no step numbers" in flag for flag in record.flags)
