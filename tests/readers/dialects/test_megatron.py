"""Megatron's lines of a training under way, in every dress they have worn, to the last figure."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.readers.dialects.reading import facts_of, read_text, step_of
from tests.readers.reading import read_lines

OF_2021 = (
    " iteration       30/    1000 | consumed samples:          120 | elapsed time per iteration (ms): 2767.3 |"
    " learning rate: 1.500E-04 | global batch size:     4 | lm loss: 3.282511E+01 | loss scale: 16384.0 |"
    " grad norm: 9.804 | number of skipped iterations:   1 | number of nan iterations:   0 |"
)
OF_V115 = (
    " iteration        1/    1000 | elapsed time per iteration (ms): 150471.3 | learning rate: 1.875E-05 |"
    " lm loss: 1.279022E+01 | loss scale: 1024.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
OF_3D = (
    " iteration        2/    1000 | consumed samples:         2048 | elapsed time per iteration (ms): 141096.8 |"
    " learning rate: 3.750E-05 | global batch size:  1024 | lm-loss: 1.244502E+01 | loss scale: -1.0 |"
    " grad norm: 0.000 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
OF_BLOOM = (
    " [default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 |"
    " elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 |"
    " lm loss: 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |"
)
OF_2024 = (
    " [2024-04-06 03:02:12] iteration       71/     100 | consumed samples:         9088 |"
    " elapsed time per iteration (ms): 5361.6 | throughput per GPU (TFLOP/s/GPU): 243.6 |"
    " learning rate: 1.420000E-05 | global batch size:   128 | lm loss: 1.818812E+00 |"
    " load_balancing_loss: 1.013377E+00 | loss scale: 1.0 | grad norm: 1.300 | num zeros: 0.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
OF_DEEPSPEED = (
    " iteration       10/   20000 | consumed samples:         2560 | consumed tokens:      5242880 |"
    " elapsed time per iteration (ms): 3512.4 | learning rate: 6.000E-06 | global batch size:   256 |"
    " lm loss: 9.100000E+00 | loss scale: 1.0 | grad norm: 2.100 | curriculum seqlen:   512 | actual seqlen:  2048 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 72.885 |"
    " tokens per gpu per second (tgs): 2332.315 | TFLOPs: 121.50 |"
)
OF_AMD = (
    " iteration       12/      50 | consumed samples:         1536 | elapsed time per iteration (ms): 2767.3/2800.1 |"
    " hip mem usage/free/total/usage_ratio: 117.96GB/138.04GB/255.98GB/46.08% |"
    " compute per GPU (TFLOP/s/GPU): 243.6 (avg 241.0)  | tokens/s/GPU inst/harmonic mean: 11839.7/11701.0 |"
    " learning rate: 1.000000E-05 | global batch size:   128 | lm loss: 9.512340E+00 | loss scale: 1.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_2021() -> None:
    assert step_of(OF_2021, "megatron") == {
        "step": 30,
        "consumed_samples": 120,
        "step_s": pytest.approx(2.7673),
        "lr": 1.5e-4,
        "loss": 32.82511,
        "grad_norm": 9.804,
        "skipped": 1,
        "nan": 0,
    }
    assert facts_of(read_text(OF_2021)) == {"steps_planned": [1000], "global_batch": [4], "loss_scale": [16384]}


def test_v115_has_neither_samples_nor_a_batch() -> None:
    assert step_of(OF_V115, "megatron") == {
        "step": 1,
        "step_s": pytest.approx(150.4713),
        "lr": 1.875e-5,
        "loss": 12.79022,
        "skipped": 0,
        "nan": 0,
    }
    assert facts_of(read_text(OF_V115)) == {"steps_planned": [1000], "loss_scale": [1024]}


def test_deepspeed_3d_writes_the_loss_with_a_hyphen() -> None:
    step = step_of(OF_3D, "megatron")
    assert (step["loss"], step["step_s"], step["grad_norm"]) == (12.44502, pytest.approx(141.0968), 0)
    assert facts_of(read_text(OF_3D))["loss_scale"] == [-1]


def test_bloom_is_in_seconds() -> None:
    step = step_of(OF_BLOOM, "megatron")
    assert step["step_s"] == 105.22
    assert (step["samples_per_s"], step["tflops"], step["consumed_tokens"]) == (19.463, 149.02, 20155564032)
    assert read_text(OF_BLOOM).step_rank == 7


def test_2024_with_a_time_of_day_and_a_throughput() -> None:
    step = step_of(OF_2024, "megatron")
    assert (step["tflops"], step["loss"]) == (243.6, 1.818812)
    assert step["at"] == 1712372532  # 2024-04-06 03:02:12, taken as UTC


def test_deepspeeds_fork() -> None:
    step = step_of(OF_DEEPSPEED, "megatron")
    assert (step["tokens_per_s_gpu"], step["samples_per_s"], step["tflops"]) == (2332.315, 72.885, 121.5)
    assert "seq" not in read_text(OF_DEEPSPEED).facts  # a curriculum changes it


def test_of_two_figures_with_a_slash_the_steps_own_is_taken() -> None:
    step = step_of(OF_AMD, "megatron")
    assert step["step_s"] == pytest.approx(2.7673)
    assert (step["tflops"], step["tokens_per_s_gpu"], step["consumed_samples"]) == (243.6, 11839.7, 1536)
    slashed = OF_AMD.replace(
        "compute per GPU (TFLOP/s/GPU): 243.6 (avg 241.0)", "throughput per GPU (TFLOP/s/GPU): 9.5/9.9"
    )
    assert step_of(slashed, "megatron")["tflops"] == 9.5


def test_tokens_a_second_of_one_gpu_in_other_words() -> None:
    for words in ("tokens/sec/gpu: 9041.5", "tokens-per-second-per-gpu: 9041.50", "tokens/s/GPU: 9041.5"):
        line = OF_2021.replace(" grad norm: 9.804 |", f" {words} | consumed tokens: 1.250B |")
        step = step_of(line, "megatron")
        assert (step["tokens_per_s_gpu"], step["consumed_tokens"]) == (9041.5, 1.25e9)


@pytest.mark.parametrize("line", [OF_2021, OF_V115, OF_3D, OF_BLOOM, OF_2024, OF_DEEPSPEED, OF_AMD])
def test_a_line_cut_anywhere_gives_nothing_wrong(line: str) -> None:
    (whole,) = read_text(line).steps.values()
    for end in range(len(line)):
        for steps in read_text(line[:end]).steps.values():
            for name in steps.columns:
                assert steps[name][0] == whole[name][0], (line[:end][-40:], name)


def test_no_loss_where_every_iteration_was_skipped() -> None:
    line = OF_2021.replace(" lm loss: 3.282511E+01 |", "").replace(" grad norm: 9.804 |", "")
    assert not {"loss", "grad_norm"} & step_of(line, "megatron").keys()


def test_a_loss_that_is_no_number_is_no_number() -> None:
    assert math.isnan(step_of(OF_2021.replace("3.282511E+01", "nan"), "megatron")["loss"])


def test_effective_tera_flops_belong_to_the_step_before() -> None:
    part = read_text(
        f"{OF_V115}\nEffective Tera Flops per GPU: 41.31 and total parameters 52.005 B\n"
        + OF_V115.replace("        1/", "        2/")
    )
    flops = part.steps["megatron"]["tflops"]
    assert flops[0] == 41.31
    assert np.isnan(flops[1])
    assert facts_of(part)["params"] == [52_005_000_000]


def test_timers_on_one_line() -> None:
    part = read_text(
        "time (ms) | forward-compute: 148.03 | backward-compute: 415.50 | train/valid data: 2.59\ntime (ms)"
    )
    assert part.timers_s == {
        "forward-compute": (pytest.approx(0.14803), 1),
        "backward-compute": (pytest.approx(0.4155), 1),
        "train/valid data": (pytest.approx(0.00259), 1),
    }


def test_timers_on_a_line_each_give_the_slowest_rank() -> None:
    text = (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (12.34, 45.60)\n"
        "    embedding-grads-all-reduce .....................: (0.01, 0.02)\n"
        "max time across ranks (ms):\n"
        "    optimizer ......................................: 7.50"
    )
    assert read_text(text).timers_s == {
        "forward-backward": (pytest.approx(0.0456), 1),
        "embedding-grads-all-reduce": (pytest.approx(2e-5), 1),
        "optimizer": (pytest.approx(0.0075), 1),
    }


def test_memory_glued_two_on_a_line() -> None:
    part = read_text(
        "[Rank 51] (after 20 iterations) memory (MB) | allocated: 19494.453125 | max allocated: 22106.013671875 |"
        " reserved: 26716.0 | max reserved: 26716.0[Rank 49] (after 20 iterations) memory (MB) |"
        " allocated: 19494.953125 | max allocated: 22107.013671875 | reserved: 26720.0 | max reserved: 26720.0"
    )
    assert {rank: (each.allocated_gib, each.reserved_gib) for rank, each in part.memory.items()} == {
        51: (22106.013671875 / 1024, 26716 / 1024),
        49: (22107.013671875 / 1024, 26720 / 1024),
    }


def test_memory_of_v115_names_no_rank_unless_its_line_is_labelled() -> None:
    line = (
        "after 1 iterations memory (MB) | allocated: 10857.5625 | max allocated: 26118.2294921875 |"
        " reserved: 28560.0 | max reserved: 28560.0"
    )
    assert read_text(line).memory[None].allocated_gib == 26118.2294921875 / 1024
    assert read_text(f"12: {line}").memory[12].reserved_gib == 28560 / 1024
    assert read_text(line.replace("reserved", "cached")).memory[None].reserved_gib == 28560 / 1024


def test_evaluations_with_their_step_but_not_the_test_sets() -> None:
    part = read_text(
        " validation loss at iteration 1000 | lm loss value: 2.461021E+00 | lm loss PPL: 1.171676E+01 |\n"
        " validation loss at iteration 2000 on validation set | lm loss value: 2.4E+00 | lm loss PPL: 1.1E+01 | \n"
        " validation loss at the end of training for val data | lm loss value: 2.3E+00 | lm loss PPL: 9.9E+00 | \n"
        " validation loss at the end of training for test data | lm loss value: 2.2E+00 | lm loss PPL: 9.9E+00 | \n"
        " validation loss at iteration 2000 on test set | lm loss value: 2.1E+00 | lm loss PPL: 9.9E+00 | "
    )
    assert part.evals == [(1000, 2.461021, 1), (2000, 2.4, 2), (None, 2.3, 3)]


def test_saves_count_when_they_succeeded() -> None:
    part = read_text(
        "saving checkpoint at iteration     500 to /ckpt\n"
        "  successfully saved checkpoint at iteration     500 to /ckpt\n"
        "  successfully saved checkpoint from iteration    1000 to /ckpt [ t 1/4, p 1/16 ]\n"
        "saving checkpoint at iteration    1500 to /ckpt in torch_dist format"
    )
    assert part.saves == [(500, None, 2), (1000, None, 3)]


def test_a_fork_says_how_long_a_save_took() -> None:
    part = read_text("Checkpoint Save GB: 1.2, GB/Sec: 0.1, Latency(second): 12.345")
    assert part.saves == [(None, 12.345, 1)]


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("[after training is done] datetime: 2021-05-26 03:20:38 ", "done"),
        ("[exiting program at iteration 30] datetime: 2021-05-26 03:20:38 ", "done"),
        ("[exiting program after 55.2 minutes] datetime: 2021-05-26 03:20:38 ", "walltime"),
        ("[exiting program after receiving SIGTERM.] datetime: 2021-05-26 03:20:38 ", "stopped"),
        ("[Detected kill switch at /kill. Exiting] datetime: 2021-05-26 03:20:38 ", "stopped"),
    ],
)
def test_ends(line: str, ended: str) -> None:
    part = read_text(line)
    assert [each for each, _ in part.ends] == [ended]
    assert part.last_at == 1621999238


def test_banner_counts_and_vocabulary() -> None:
    part = read_text(
        "using world size: 96, data-parallel-size: 1, tensor-model-parallel size: 4,"
        " pipeline-model-parallel size: 24 \n"
        "using torch.bfloat16 for parameters ...\n"
        "setting number of micro-batches to constant 144\n"
        " > padded vocab (size: 50300) with 388 dummy tokens (new size: 50688)\n"
        " > number of parameters on (tensor, pipeline) model parallel rank (2, 14): 612044801"
        " > number of parameters on (tensor, pipeline) model parallel rank (3, 14): 612044802\n"
        " > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (0, 0, 1): 7\n"
    )
    assert part.started
    assert facts_of(part) == {
        "gpus": [96],
        "dp": [1],
        "tp": [4],
        "pp": [24],
        "dtype": ["bf16"],
        "micro_batches": [144],
        "vocab_unpadded": [50300],
        "vocab": [50688],
    }
    assert {name: count for name, (count, _) in part.rank_params.items()} == {
        "2, 14": 612044801,
        "3, 14": 612044802,
        "0, 0, 1": 7,
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "using world size: 64, data-parallel size: 2, context-parallel size: 2 tensor-model-parallel size: 4,"
            " pipeline-model-parallel size: 4 ",
            {"gpus": [64], "dp": [2], "cp": [2], "tp": [4], "pp": [4]},
        ),
        (
            "using world size: 64, data-parallel size: 16, context-parallel size: 1, hierarchical context-parallel"
            " sizes: Nonetensor-model-parallel size: 2, encoder-tensor-model-parallel size: 8,"
            " pipeline-model-parallel size: 2, encoder-pipeline-model-parallel size: 9",
            {"gpus": [64], "dp": [16], "cp": [1], "tp": [2], "pp": [2]},
        ),
        (
            "using world size: 16, data-parallel-size: 2, sequence-parallel size: 4, tensor-model-parallel size: 2,"
            " pipeline-model-parallel size: 1 ",
            {"gpus": [16], "dp": [2], "cp": [4], "tp": [2], "pp": [1]},
        ),
        ("using world size: 64 and model-parallel size: 4", {"gpus": [64], "tp": [4]}),
    ],
)
def test_the_world_in_other_words(line: str, expected: dict[str, list[int]]) -> None:
    assert facts_of(read_text(line)) == expected


def test_zero_3_counts_the_whole_model_on_every_rank() -> None:
    part = read_text(" > number of parameters on model parallel rank 3            52.005 Billion")
    assert facts_of(part) == {"params": [52_005_000_000]}
    assert not part.rank_params


def test_a_model_size_of_2021_is_in_2_to_the_30() -> None:
    assert facts_of(read_text("Model size: 61B")) == {"params": [61 * 2**30]}
    for other in ("Model size: 124.44M params", "Model size: 7B parameters", "The Model size: 7B"):
        assert not read_text(other).facts


def test_a_second_start_is_another_part() -> None:
    banner = (
        "using world size: 4, data-parallel-size: 1, tensor-model-parallel size: 4, pipeline-model-parallel size: 1"
    )
    parts = read_lines("log", [banner, OF_2021, banner, OF_2021.replace("30/", "31/")])
    assert [(part.first_line, part.started, len(part.steps["megatron"])) for part in parts] == [
        (1, True, 1),
        (3, True, 1),
    ]


@pytest.mark.shared
def test_the_shared_megatron_log(shared) -> None:
    (part,) = read_lines("log", (shared / "logs" / "meg_gpt2_perf_n16.out").read_text().split("\n"))
    steps = part.steps["megatron"]
    assert steps["step_s"].tolist() == pytest.approx([155.4838, 129.0288, 128.8915])
    assert steps.totals == {"skipped": 3, "nan": 0}
    assert "loss" not in steps
    assert steps.line.tolist() == [341, 343, 345]
    facts = facts_of(part)
    assert {name: facts[name] for name in ("gpus", "tp", "pp", "dp", "micro_batches", "global_batch", "vocab")} == {
        "gpus": [64],
        "tp": [4],
        "pp": [16],
        "dp": [1],
        "micro_batches": [256],
        "global_batch": [1024],
        "vocab": [50688],
    }
    assert str(part.facts["gpus"][0].place) == "log:49"
    assert len(part.rank_params) == 64
    assert part.rank_params["3, 14"][1].line == part.rank_params["2, 14"][1].line  # two on one line
    assert sum(count for count, _ in part.rank_params.values()) == 56 * 805_560_320 + 4 * 917_757_952 + 4 * 909_385_728
    assert part.timers_s["forward-compute"] == (pytest.approx(32.05416 + 31.74974 + 31.88801), 3)
    assert len(part.arguments) == 138


@pytest.mark.shared
def test_the_shared_zero_log(shared) -> None:
    name = "meg_ds_zero_gpt2_perf_n16_nbs48_ms48.out"
    (part,) = read_lines("log", (shared / "logs" / name).read_text().split("\n"))
    steps = part.steps["megatron"]
    assert steps["step_s"].tolist() == pytest.approx([121.8998, 125.9124, 123.9078])
    assert steps["loss"].tolist() == [12.52221, 12.5177, 40.75231]
    assert steps["tflops"].tolist() == [41.94, 40.6, 41.26]
    facts = facts_of(part)
    # DeepSpeed's world_size of 16 is the data-parallel size.
    assert {name: facts[name] for name in ("gpus", "tp", "dp", "zero_stage", "params", "global_batch")} == {
        "gpus": [64],
        "tp": [4],
        "dp": [16],
        "zero_stage": [3],
        "params": [52_005_000_000],
        "global_batch": [768],
    }
    assert str(part.facts["params"][0].place) == "log:139"
    memory = part.memory[None]
    assert (memory.allocated_gib, memory.reserved_gib) == (26118.2294921875 / 1024, 28234 / 1024)
    assert memory.place.line == 332
    assert part.arguments["world_size"][0] == "64"
    assert part.arguments["deepspeed_activation_checkpointing"][0] == "True"
    assert len(part.arguments) == 119


def test_argonnes_fork_has_equals_signs() -> None:
    line = (
        "[2024-07-13 07:32:24][INFO][training_log:661] -  iteration=      10/  317892 | consumed_samples=        7680 |"
        " consumed_tokens=    31457280 | elapsed_time_per_iteration_ms=5361.6 | learning_rate=9.4374e-07 |"
        " global_batch_size=  768 | lm loss=11.164009 | loss_scale=1.0 | grad_norm=10.642 | actual_seqlen= 4096 |"
        " number_of_skipped_iterations=  0 | number_of_nan_iterations=  0 | samples_per_second=143.241 |"
        " tokens_per_gpu_per_second_tgs=6111.616 | TFLOPs=290.12 |"
    )
    assert step_of(line, "megatron_alcf") == {
        "step": 10,
        "consumed_samples": 7680,
        "consumed_tokens": 31457280,
        "step_s": pytest.approx(5.3616),
        "lr": 9.4374e-7,
        "loss": 11.164009,
        "grad_norm": 10.642,
        "skipped": 0,
        "nan": 0,
        "samples_per_s": 143.241,
        "tokens_per_s_gpu": 6111.616,
        "tflops": 290.12,
        "at": 1720855944,
    }
    assert facts_of(read_text(line))["global_batch"] == [768]
