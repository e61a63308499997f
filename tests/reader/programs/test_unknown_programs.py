"""Lines of programs that no dialect knows: what is read of them by name and unit, and when they are a training."""

from pathlib import Path

import pytest

from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.report.gather import gather_paths

# line -> its figures beside step and loss, which are 20 and 3.1
LINES: dict[str, dict[str, float]] = {
    "step 20/700 loss 3.1 time 250.0 ms tok/s 2000": {"step_s": 0.25, "tokens_per_s": 2000},
    "step 20 | loss 3.100 | 98123 tok/s | dt 250ms": {"step_s": 0.25, "tokens_per_s": 98123},
    "epoch 1 step 20/700 train_loss=3.1 tokens_per_sec=98123 sec_per_step=0.25": {
        "epoch": 1,
        "step_s": 0.25,
        "tokens_per_s": 98123,
    },
    "tok/s 2000 | Epoch [1/3], Step [20/700], lr: 0.1, loss = 3.1": {"epoch": 1, "lr": 0.1},
    "Epoch: [1][ 20/700]  Time  0.250 ( 0.300)  Data 0.100 (0.100)  Loss 3.1e+00 (3.5e+00)": {
        "epoch": 1,
        "step_s": 0.25,
    },
    "Epoch:[1/3](20/700) loss:3.1 lr:0.1 epoch_Time:30.0min:": {"epoch": 1, "lr": 0.1},
    "Ep 1 (Step 000020): Train loss 3.1, Val loss 4.5": {"loss_eval": 4.5},
    "dt 250ms | step 20 | lr 0.1 | loss 3,1000 | grad_norm: 1,25": {"lr": 0.1, "grad_norm": 1.25},
    "iteration 20, loss 3.1, 250 ms/step, 98,123 tokens/sec": {"step_s": 0.25, "tokens_per_s": 98123},
    "step: 20 loss: 3.1 (0.25 s/it) tok/s/gpu: 900": {"step_s": 0.25, "tokens_per_s_gpu": 900},
    "iter 20 loss 3.1 samples/s 12.5": {"samples_per_s": 12.5},
    '{"step": 20, "loss": 3.1, "tokens_per_second_per_gpu": 900.0}': {"tokens_per_s_gpu": 900},
    # MindFormers, PaddleNLP, PaddleOCR, PaddleClas, DiT, and loops that print a batch without a total.
    "{ step:[   20/  700], loss:   3.100000, per_step_time:    250ms, grad_norm:  13.8 }": {
        "step_s": 0.25,
        "grad_norm": 13.8,
    },
    "global step 20, epoch: 0, batch: 19, loss: 3.1000, avg_batch_cost: 0.25000 sec, speed: 4.0 step/s": {
        "step_s": 0.25,
    },
    "ppocr INFO: epoch: [1/100], global_step: 20, lr: 0.1, loss: 3.1, avg_batch_cost: 0.25000 s, ips: 32.0 samples/s": {
        "epoch": 1,
        "lr": 0.1,
        "step_s": 0.25,
    },
    "[Epoch 1, iter: 20] top1: 0.1, lr: 0.1, loss: 3.1, avg_reader_cost: 0.1 sec, avg_batch_cost: 0.25 sec,": {
        "epoch": 1,
        "lr": 0.1,
        "step_s": 0.25,
    },
    "(step=0000020) Train Loss: 3.1000, Train Steps/Sec: 4.00": {"step_s": 0.25},
    "epoch 0 iteration20, Loss: 3.1, Train Steps/Sec: 4.00": {"epoch": 0, "step_s": 0.25},
    "Epoch 1, Batch 20, Loss: 3.1": {"epoch": 1},
    "epoch: 1 | batch: 20 | loss: 3.1 | lr: 0.1": {"epoch": 1, "lr": 0.1},
    # Not of a step, or of which unit is not said.
    "step 20 loss 3.1 data time 250.0 ms": {},
    "step 20 loss 3.1 time 250.0": {},
    "step 20 loss 3.1 eval_tokens_per_sec 2000": {},
    "step 20 loss 3.1 2000 tokens": {},
}


@pytest.mark.parametrize("line", LINES)
def test_a_name_with_its_unit_is_enough(line: str) -> None:
    row = LiveLines().take(line)
    assert row == pytest.approx({"step": 20, "loss": 3.1, **LINES[line]})


def records(text: str, tmp_path: Path) -> list[tuple[float | None, float | None]]:
    (tmp_path / "run.log").write_text(text)
    found = gather_paths([str(tmp_path / "run.log")], tmp_path / "logs").records
    return [(record.loss_last, record.tokens_per_s) for record in found if record.loss_last is not None]


def test_two_lines_of_one_shape_are_a_training(tmp_path: Path) -> None:
    text = "Iteration 0: loss=3.10, 98000 tok/s\nIteration 50: loss=2.20, 99000 tok/s\n"
    assert records(text, tmp_path) == [(2.2, 98500)]


@pytest.mark.parametrize(
    "text",
    [
        "step 10 loss 2.5\n",
        "- at step 10, the loss 2.5 was wrong\n- since step 20 a loss 2.1 is right\n",
        "=== test session starts ===\nstep 10 loss 2.5\nstep 20 loss 2.1\n",
        "step 10 loss 2.5\nstep 20 loss 2.1\nRan 2 tests in 0.001s\n",
        "after step 10 loss 2.5\nthen step 20 with loss 2.1\nstep 30 loss 2.0\n",
    ],
)
def test_a_changelog_and_the_output_of_tests_are_none(text: str, tmp_path: Path) -> None:
    assert records(text, tmp_path) == []


# Lines of a step in which a known program's pattern reads no loss, with a loss in another form.
HIDDEN_LOSSES = {
    "modded-nanogpt": "step:{0}/900 | loss {1:.4f} | train_time:{2}ms step_avg:{3:.2f}ms\n",
    "the loss later": "step:{0}/900 train_time:{2}ms step_avg:{3:.2f}ms | loss {1:.4f} | lr 0.1\n",
    "MaxText": "completed step: {0}, loss {1:.4f}, seconds: 1.5{0}\n",
    "DeepSpeed": "[INFO] [logging.py:96:log_dist] [Rank 0] step={0}, skipped=0, lr=[0.0001], loss={1:.4f}, mom=[0.9]\n",
}


@pytest.mark.parametrize("form", HIDDEN_LOSSES.values(), ids=[*HIDDEN_LOSSES])
def test_a_known_programs_step_hides_no_loss(form: str, tmp_path: Path) -> None:
    text = "".join(form.format(step, 9 - step / 10, 100 * step, 100.0) for step in range(1, 41))
    assert records(text, tmp_path)[0][0] == pytest.approx(5.0)
