"""Kinds of lines and files that many programs have, each in a small log: which figures are read, and which are not."""

from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.report.gather import gather_paths

STEP = "step {0} | loss {1:.3f} | dt: {2} ms | tokens/s: {3}\n"
BAR = "{0}%|####      | {1}/{2} [{3}<02:00, {4}s/it]"
HF = "{{'loss': {0:.2f}, 'grad_norm': 0.4, 'learning_rate': 2e-05, 'epoch': {1:.2f}}}\n"
METER = "Epoch: [{0}/3]  [ {1:3d}/80]  eta: 0:00:40  loss: {2:.4f} (2.5000)  time: 0.5000  data: 0.0002  max mem: {3}\n"
OF_BARS = "".join(
    f"Epoch {epoch}/3\n"
    + "\r".join(
        BAR.format(step, step, 40, f"00:{step:02d}", 1.0).replace("]", f", loss={2 - epoch / 4:.1f}]")
        for step in range(1, 41)
    )
    + f"\nEpoch {epoch} - Train Loss: {2.1234 - epoch / 4:.4f}, Val Loss: {2.2 - epoch / 4:.2f}\n"
    for epoch in (1, 2, 3)
)
TORCHTUNE = "[trainer0|0]:1|{0}|Loss: {1:.3f}:  {0}%|#   | {0}/90 [{2}<20:00, 16.00s/it][trainer0|0]:\n"
STATE = """{{
  "global_step": 40,
  "log_history": [
    {{
      "epoch": 0.5,
      "loss": 2.1,
      "step": 20
    }},
    {{
      "epoch": 0.5,
      "eval_loss": 2.0,
      "eval_runtime": 150.0,
      "step": 20
    }},
    {{
      "epoch": 1.0,
      "loss": 1.9,
      "step": 40
    }},
    {{
      "epoch": 1.0,
      "step": 40,
      "train_runtime": {0}
    }}
  ],
  "max_steps": 40
}}
"""


def clock(seconds: int) -> str:
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


def bars(*elapsed: int, label: str = "") -> str:
    drawn = enumerate(map(clock, elapsed))
    return "".join(f"\r{label}{BAR.format(step, step, len(elapsed) - 1, each, 60.0)}" for step, each in drawn)


def read(folder: Path, text: str, name: str = "run.log") -> list[Record]:
    (folder / name).write_text(text, newline="")
    return gather_paths([str(folder / name)], folder).records


# {kind: (log, its figures)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rate of all tokens so far": (
        "".join(STEP.format(step, 4 - step / 100, 500 + step % 3, 700 * step) for step in range(1, 31)),
        {"step_s": 0.501, "tokens_per_s": None, "tokens_per_s_gpu": None},
    ),
    "a rate that follows": (
        "".join(STEP.format(step, 4 - step / 100, 500, 700 + step % 3) for step in range(1, 31)),
        {"step_s": 0.5, "tokens_per_s": 701},
    ),
    "bars: only the interval of the start is dropped": (
        bars(0, 90, 130, 170, 210, 225, 290, 330) + "\n" + HF.format(1.4, 1.0),
        {"step_s": 40},
    ),
    "bars behind a host's label": (
        bars(0, 50, 70, 90, 111, 130, 151, label="10.1.2.3: ").replace("\r", "\n")
        + "\n10.1.2.3: " + HF.format(1.4, 1.0),
        {"step_s": 20, "last_step": 6},
    ),
    "a bar for each epoch": (OF_BARS, {"last_step": 3, "loss_first": 1.8734, "loss_last": 1.3734, "loss_eval": 1.45}),
    "a label within the line": (
        "".join(TORCHTUNE.format(step, 2 - step / 50, clock(40 + 16 * step)) for step in range(1, 12)),
        {"last_step": 11, "cause": "the log ends at step 11 of 90", "step_s": 16, "loss_last": 1.78},
    ),
    "epochs alone": (
        "".join(f"Epoch {epoch}/50 - Train Loss: {3 - epoch / 9:.2f}, Val Loss: 2.75\n" for epoch in range(1, 6)),
        {"cause": "the log ends at epoch 5 of 50", "loss_first": 2.89, "loss_eval": 2.75, "step_s": None},
    ),
    "epochs with one loss": (
        "".join(f"Epoch {epoch}, loss {0.8 - epoch / 99:.3f}, train accuracy: 61.5%\n" for epoch in range(4)),
        {"last_step": 3, "loss_first": 0.8, "loss_last": 0.77, "loss_eval": None},
    ),
    "epochs on lines of their own": (
        "".join(f"Epoch {epoch}/4\ntrain Loss: {0.9 - epoch / 9:.3f}\nval Loss: 0.65 Acc: 0.6\n" for epoch in range(5)),
        {"last_step": 4, "loss_first": 0.9, "loss_eval": 0.65, "ended": "done"},
    ),
    "short names of losses": (
        "".join(f"Epoch {epoch}: Train={40 - epoch}.25  Val=41.50\n" for epoch in range(1, 4)),
        {"last_step": 3, "loss_first": 39.25, "loss_last": 37.25, "loss_eval": 41.5},
    ),
    "a whole run's bar beats lines of epochs": (
        "".join(
            BAR.format(step, step, 90, clock(2 * step), 2.0) + "\nEpoch 1 loss: 1.5" * (step == 30) + "\n"
            for step in range(1, 80)
        ),
        {"last_step": 79, "loss_first": None},
    ),
    "a bar of a loader of unknown length": (
        "\r".join(
            f"Epoch 0: |   | {step}/? [00:{step}<00:00,  1.0it/s, train_loss_step={3 - step / 99:.3f}]"
            for step in range(10, 30)
        ),
        {"last_step": 29, "loss_first": 2.899, "engine": "lightning"},
    ),
    "memory of a later epoch": (
        "".join(METER.format(each, step, 3 - each, 2048 * (1 + each)) for each in range(3) for step in (0, 20, 40, 60)),
        {"memory_allocated_gib": [6.0], "last_step": 220},
    ),
    "a worker's own world": (
        "{'cluster': {'gpus_per_node': 4, 'num_nodes': 2}}\n"
        "(RolloutWorker pid=71, ip=10.0.0.4) world_size=1 rank=0 distributed_init_method=tcp://10.0.0.4:5001\n"
        + "".join(STEP.format(step, 3, 500, 900) for step in range(1, 7)),
        {"gpus": 8, "nodes": 2},
    ),
    "the first clock is of a line that no reader knows": (
        "2026-01-05 09:00:00,120 preparing\n" + "".join(STEP.format(step, 3, 500, 900) for step in range(1, 7))
        + "2026-01-05 17:00:00,250 Training finished in 8.0 hours\n",
        {"started": "2026-01-05T09:00:00Z"},
    ),
    "a date as the shell prints it": (
        "Mon Jan  5 09:00:00 CET 2026\n" + "".join(STEP.format(step, 3, 500, 900) for step in range(1, 7)),
        {"started": "2026-01-05T09:00:00Z"},
    ),
    "a mixed precision, parameters, brackets": (
        "Mixed precision type: fp16\nParameters: 31,204,608\n"
        + "".join(f"Epoch[{each}] Iteration[{step}/40] Loss: {5 - each}.5\n" for each in (1, 2) for step in (20, 40)),
        {"dtype": "fp16", "params": 31_204_608, "last_step": 80, "loss_last": 3.5},
    ),
    "an exact count beside a rounded one": (
        "Num processes: 8\n1.3 B     Total params\nNumber of trainable parameters = 1,298,765,312\n"
        + HF.format(2.0, 1.0),
        {"params": 1_298_765_312},
    ),
    "an exact count of more than a rounded one": (
        "using world size: 8, data-parallel-size: 8, tensor-model-parallel size: 1, pipeline-model-parallel size: 1\n"
        "Total number of parameters in billions: 1.21\n"
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1420926976\n"
        + "".join(STEP.format(step, 3, 500, 900) for step in range(1, 7)),
        {"params": 1_420_926_976, "tp": 1},
    ),
    "MLPerf HPC": (
        "".join(
            f':::MLLOG {{"namespace": "", "time_ms": 16000000{time}000, "key": "{key}", "value": {value}, '
            f'"metadata": {{"file": "t.py", "lineno": 3{more}}}}}\n'
            for time, key, value, more in (
                (10, "number_of_ranks", 24, ""),
                (10, "number_of_nodes", 6, ""),
                *(
                    (12 + step, "train_loss", 2 - step / 50, f', "epoch_num": 1, "step_num": {step}')
                    for step in range(10, 50, 10)
                ),
            )
        ),
        {"gpus": 24, "nodes": 6, "last_step": 40, "loss_first": 1.8, "step_s": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_log_gives_its_figures(tmp_path: Path, kind: str) -> None:
    text, figures = KINDS[kind]
    [record] = read(tmp_path, text)
    found = {**record.to_tables(), "last_step": record.attempts[-1]["last_step"], "attempts": len(record.attempts)}
    assert {name: found[name] for name in figures} == pytest.approx(figures, rel=0.011), record.flags


def test_epochs_that_begin_again_are_another_training(tmp_path: Path) -> None:
    lines = [f"Epoch {epoch}: loss {3 - epoch / 9:.2f}\n" for epoch in (1, 2, 3, 1, 2)]
    assert [record.attempts[-1]["last_step"] for record in read(tmp_path, "".join(lines))] == [3, 2]


def test_a_table_of_a_training_is_read_and_no_other(tmp_path: Path) -> None:
    rows = "".join(f"{10 * row},{row * 5120},{6 - row / 10:.2f},{'' if row % 2 else 6.5}\n" for row in range(1, 9))
    [record] = read(tmp_path, f"step,tokens_seen,train_loss,val_loss\n{rows}", "metrics.csv")
    assert (record.loss_first, record.loss_last, record.loss_eval, record.tokens_total) == (5.9, 5.2, 6.5, 40960)
    rows = "".join(f"{row},,{2 - row / 10:.2f}\n{row},{1.5 + row / 10:.2f},\n" for row in range(4))
    [record] = read(tmp_path, f"epoch,val_loss,train_loss_epoch\n{rows}", "epochs.csv")
    assert (record.loss_first, record.loss_eval, record.attempts[-1]["last_step"]) == (2.0, 1.8, 3)
    assert read(tmp_path, "date,loss\n2026-01-02,3.5\n2026-01-03,3.4\n", "sales.csv") == []


def test_a_runtime_is_less_its_evaluations_in_any_file(tmp_path: Path) -> None:
    [record] = read(tmp_path, STATE.format(550.0), "trainer_state.json")
    assert record.step_s == pytest.approx(10.0)
