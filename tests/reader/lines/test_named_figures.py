"""Names and figures in the forms in which programs print them."""

import pytest

from hpc_gpt.reader.lines.named_figures import figure_spans
from hpc_gpt.reader.lines.pattern import figure_names

EVERY = """
    loss$=loss|train_loss loss_eval=val_loss lr grad_norm step_ms[ms]=dt|time| step_s[s]=dt tokens_per_s[tok/s]=
    mfu_percent+[%]=mfu nan=number_of_nan_iterations global_batch memory_reserved_gib[GiB(]=memory tflops$3 at
    tokens_per_s_gpu=tokens_per_GPU_(tokens/s/GPU)
"""


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("loss: 4.66", "loss=4.66"),
        ("loss 4.0863, time 561.94ms, mfu 3.1%", "loss=4.0863 step_ms=561.94 mfu_percent=3.1"),
        ("| train loss 2.5 | val loss 2.75 | lr 3.00e-04 |", "loss=2.5 loss_eval=2.75 lr=3.00e-04"),
        (
            "loss  10.97 (+nanz)| grad norm nan (+nanz)| 70.68 ms | 24920 tok/s",
            "loss=10.97 grad_norm=nan step_ms=70.68 tokens_per_s=24920",
        ),
        ('{"loss": 2.5, "lr": "1e-4", "at": 12.5}', "loss=2.5 lr=1e-4 at=12.5"),
        ("- train/loss:1.0 - lr:np.float64(0.25) - grad_norm:-3", "lr=0.25"),
        ("dt: 0.5s, dt: 8ms", "step_s=0.5 step_ms=8"),
        ("lr: 1.0 memory: 31.4GiB(39.7%) tflops: 5.25", "lr=1.0 memory_reserved_gib=31.4"),  # 5.250 would be whole
        ("tflops: 5.250", "tflops=5.250"),
        ("number of nan iterations:   0 | global batch: 1.02K |", "nan=0"),
        ("global-batch: 1,024 | tokens per GPU (tokens/s/GPU): 1.02K |", "global_batch=1,024 tokens_per_s_gpu=1.02K"),
        ("memory: 5 GB lr: 0.1, mfu: -100.0%", "lr=0.1"),
        ("lr: 2,513, loss: 1", "lr=2,513 loss=1"),
        ("lr: 2,513,", ""),  # of 2,513,278
        ("lr: 1,5", ""),
        ("best val loss: 2.5 and lr: x", ""),
    ],
)
def test_the_figures_of_a_line(line: str, read: str) -> None:
    spans = figure_spans(line, 0, len(line), figure_names(EVERY))
    found = sorted((start, f"{name}={line[start:end]}") for name, (start, end) in spans.items())
    assert " ".join(text for _, text in found) == read


def test_a_long_line_takes_no_square_of_time() -> None:
    line = "a word of text " * 20_000 + "loss: 1.5 " * 20_000
    assert figure_spans(line, 280_000, len(line), figure_names("loss")) == {}
    assert figure_spans(line, 290_000, len(line), figure_names("loss"))
