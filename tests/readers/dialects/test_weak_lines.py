"""Lines that many programs print show no program, and text of a source file is no fact of a run."""

from __future__ import annotations

import pytest

from tests.readers.dialects.reading import facts_of, read_text


@pytest.mark.parametrize(
    "line",
    [
        "Training time: 12.50s",
        "Total parameters: 162,322,944",
        "Number of parameters: 560,988,160",
        "Memory used: 13.90 GB",
        "val loss 4.416467",
        "hidden_size: 4096",
        "max_seq_len: 2048",
        "124 M     Total params",
    ],
)
def test_one_of_them_names_no_program(line):
    part = read_text(line)
    assert part.dialects == {}
    assert part.totals == {}


def test_the_total_of_another_program_is_none_of_this_one():
    steps = "\n".join(f"step:{n}/100 train_loss:4.1 train_time:{n * 50}ms step_avg:50.00ms" for n in range(1, 6))
    part = read_text(f"{steps}\nTraining time: 12.50s")
    assert set(part.dialects) == {"modded_nanogpt"}
    assert part.totals == {}


def test_a_program_that_logs_its_own_source_states_nothing_by_it():
    """modded-nanogpt, records/track_1_short of 2025-07: an fp8 head, the arguments of a call on lines of their own."""
    source = """\
        scale_a=x.new_tensor(x_s, dtype=torch.float32),
            dtype=torch.float32,
        model: nn.Module = GPT(vocab_size=50257,
        zero_stage=1,
step:1/1705 train_time:390ms step_avg:390.50ms
"""
    assert facts_of(read_text(source)) == {"steps_planned": [1705]}


@pytest.mark.parametrize("line", ["def f(rank=0, world_size=1):", "world_size=1)"])
def test_a_default_in_a_repeated_source_is_no_number_of_gpus(line):
    assert facts_of(read_text(line)) == {}


def test_a_line_of_many_programs_counts_after_its_own_only():
    """The JSON of a DeepSpeed configuration and torchtune's configuration, a key a line."""
    shown = "[2021-05-25 22:30:04,195] [INFO] [config.py:752:print]   zero_optimization_stage ...... 3"
    line = '    "train_micro_batch_size_per_gpu": 2,'
    assert facts_of(read_text(line)) == facts_of(read_text("batch_size: 4")) == {}
    assert facts_of(read_text(f"{line}\n{shown}")).get("micro_batch") is None
    assert facts_of(read_text(f"{shown}\n{line}"))["micro_batch"] == [2]
