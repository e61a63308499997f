"""Hugging Face's Trainer: metrics, header, configuration and overrides; bars; one log of four nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_gpt.readers.dialects.hf_trainer import DIALECT
from hpc_gpt.readers.logs import Part
from tests.readers.reading import read_lines

INFO = "[INFO|trainer_pt_utils.py:912] 2021-05-25 06:45:27,966 >> "


def read(*lines: str) -> Part:
    parts = read_lines("log", lines)
    assert len(parts) == 1
    return parts[0]


def interpreted(part: Part) -> dict[str, object]:
    assert DIALECT.interpret is not None
    return dict(DIALECT.interpret({key: text for key, (text, _) in part.arguments.items()}))


@pytest.mark.parametrize(
    ("line", "totals"),
    [
        (INFO + "  train_runtime            = 0:14:31.66", {"runtime_s": 871.66}),
        ("  train_runtime            = 1 day, 2:03:04.50", {"runtime_s": 93784.5}),
        (INFO + "  train_samples_per_second =      1.147", {"samples_per_s": 1.147}),
        (INFO + "  train_steps_per_second   =      0.017", {"steps_rounded": 0.017}),
        (
            "{'train_runtime': 919.094, 'train_samples_per_second': 1.088, 'train_steps_per_second': 0.017, "
            "'epoch': 1.0}",
            {"runtime_s": 919.094, "samples_per_s": 1.088, "steps_rounded": 0.017},
        ),
        (
            "{'train_runtime': '919.1', 'train_samples_per_second': '1.088', 'train_loss': '3.5', 'epoch': '1'}",
            {"runtime_s": 919.1, "samples_per_s": 1.088, "loss_mean": 3.5},
        ),
        ("{'train_runtime': 919.094, 'train_samples_per_sec", {}),
    ],
)
def test_totals(line: str, totals: dict[str, float]) -> None:
    assert {name: fact.value for name, fact in read(line).totals.items()} == totals


def test_a_line_of_metrics_has_an_epoch_and_no_step_and_is_counted_once_whoever_prints_it() -> None:
    line = "{'loss': 1.1431, 'grad_norm': 0.8125, 'learning_rate': 1.0526e-05, 'num_tokens': 4096.0, 'epoch': 0.04}"
    other = "{'loss': 1.1431, 'grad_norm': 0.8125, 'learning_rate': 1.0526e-05, 'num_tokens': 8192.0, 'epoch': 0.08}"
    part = read(line, line, other, "{'loss': 1.0, 'learning_rate': 1e-0")
    steps = part.steps["hf_trainer"]
    assert "step" not in steps
    assert steps["loss"].tolist() == [1.1431, 1.1431]
    assert steps["epoch"].tolist() == [0.04, 0.08]
    assert steps["lr"].tolist() == [1.0526e-05] * 2
    assert steps["consumed_tokens"].tolist() == [4096.0, 8192.0]
    assert part.left_out == {"lines of a step that was printed before": 1}


def test_evaluations_in_a_dict_and_in_the_block() -> None:
    part = read("{'eval_loss': 2.8139, 'eval_runtime': 9.1, 'epoch': 1.0}", "  eval_loss = 2.75")
    assert [loss for _, loss, _ in part.evals] == [2.8139, 2.75]


def test_the_overrides_win_over_the_configuration_wherever_they_stand() -> None:
    config = [
        '  "n_embd": 768,',
        '  "n_head": 12,',
        '  "n_layer": 12,',
        '  "n_positions": 1024,',
        '  "vocab_size": 50257',
    ]
    override = "INFO:__main__:Overriding config: n_embd=7168,n_head=32,n_layer=40,n_positions=1024,use_cache=False"
    expected = {"hidden": 7168, "heads": 32, "layers": 40, "vocab": 50257, "seq": 1024}
    assert interpreted(read(*config, override)) == expected
    assert interpreted(read(override, *config)) == expected
    assert interpreted(read(*config))["hidden"] == 768


def test_what_the_command_and_the_dump_of_arguments_give() -> None:
    part = read(
        "+ torchrun run_clm.py --config_overrides n_embd=1024,gradient_checkpointing=true --block_size 512 --bf16 ",
        "TrainingArguments(",
        "bf16=True,",
        "per_device_train_batch_size=4,",
        "gradient_accumulation_steps=8,",
        "hub_token=<HUB_TOKEN>,",
        "logging_steps=10,",
    )
    assert interpreted(part) == {
        "hidden": 1024,
        "seq": 512,
        "dtype": "bf16",
        "recompute": "full",
        "micro_batch": 4,
        "micro_batches": 8,
        "log_interval": 10,
    }
    assert not any("token" in key for key in part.arguments)


def test_a_size_of_nothing_under_zero_3_is_not_taken() -> None:
    part = read("INFO:__main__:Training new model from scratch - Total size=0.00M params")
    assert part.facts == {}


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (" 12%|█▎        | 2/16 [02:00<13:54, 59.61s/it]", [(2.0, 120.0)]),
        ("  0%|          | 0/16 [00:00<?, ?it/s]", [(0.0, 0.0)]),
        ("12:  12%|█▎        | 2/16 [1:02:00<13:54,  1.61it/s, loss=3.1]", [(2.0, 3720.0)]),
        (
            "\r  6%|▋  | 1/16 [00:58<14:41, 58.76s/it]\r 12%|█▎ | 2/16 [02:00<13:54, 59.61s/it]",
            [(1.0, 58.0), (2.0, 120.0)],
        ),
        ("Loading checkpoint shards: 100%|██████████| 3/3 [00:10<00:00,  3.40s/it]", []),
        ("Map:  10%|█         | 1000/10000 [00:01<00:09, 990.33 examples/s]", []),
        ("Downloading: 100%|██████████| 665/665 [00:00<00:00, 665kB/s]", []),
        (" 12%|█▎        | 2/16 [02:00<13:54, 59.6", []),
    ],
)
def test_bars(line: str, progress: list[tuple[float, float]]) -> None:
    assert [(step, elapsed) for step, elapsed, _ in read(line).progress] == progress


@pytest.mark.shared
def test_the_shared_log_of_four_nodes(shared: Path) -> None:
    path = shared / "logs" / "hf_ds_gpt2_base_n4-1832555.out"
    parts = read_lines("log", path.read_bytes().decode("utf-8", "replace").split("\n"))
    assert len(parts) == 1
    part = parts[0]
    facts = {name: [(fact.value, fact.place.line) for fact in found] for name, found in part.facts.items()}
    assert facts["micro_batch"][0] == (4, 1595)
    assert facts["global_batch"][0] == (64, 1598)
    assert facts["micro_batches"][0] == (1, 1601)
    assert facts["steps_planned"] == [(16, 1604)]
    assert facts["samples_per_epoch"] == [(1000, 1589)]
    assert facts["zero_stage"][0][0] == 3
    assert facts["nodes"] == [(4, 1079)]
    assert facts["gpus_per_node"] == [(4, 1079)]
    assert "params" not in facts or 0 not in [value for value, _ in facts["params"]]
    assert interpreted(part) == {
        "hidden": 7168,
        "layers": 40,
        "heads": 32,
        "vocab": 50257,
        "seq": 1024,
        "dtype": "fp16",
        "recompute": "full",
        "micro_batch": 4,
        "micro_batches": 1,
        "log_interval": 500,
    }
    # Four ranks print a summary each, 919.03 s to 919.097 s: one is taken.
    assert part.totals["runtime_s"].value == pytest.approx(919.06, abs=0.05)
    assert part.totals["runtime_s"].place.line == 1787
    assert part.totals["samples_per_s"].value == 1.088
    assert part.progress[0][:2] == (0.0, 0.0)
    assert part.progress[2][:2] == (2.0, 120.0)
    assert max(step for step, _, _ in part.progress) == 16
    assert "hf_trainer" not in part.steps
