"""The end of a log: the last in file order of step, word of completion and failure."""

from pathlib import Path

import pytest

from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from tests.reader.reading import read_log_plainly

CUT = [
    "Traceback (most recent call last):",
    '  File "train.py", line 211, in <module>',
    "    main()",
    '  File "/opt/env/lib/python3.11/site-packages/torch/serialization.py", line 441, in save',
]
WHOLE = [*CUT, "    self.file.write(buffer)", "RuntimeError: unable to write file /scratch/model.bin"]
NOISE = ["Exception ignored in: <function Connection.__del__ at 0x7f00>", *CUT[:3], "OSError: [Errno 9] Bad file"]
HEADER = [
    "***** Running training *****",
    "  Num examples = 1,920",
    "  Num Epochs = 1",
    "  Instantaneous batch size per device = 4",
    "  Total train batch size (w. parallel, distributed & accumulation) = 16",
    "  Gradient Accumulation steps = 1",
    "  Total optimization steps = 120",
]


def bar(step: int, total: int, more: str = "") -> str:
    left = total - step
    clocks = f"{step // 60:02d}:{step % 60:02d}<{left // 60:02d}:{left % 60:02d}"
    return f"{100 * step // total:3d}%|{'█' * (10 * step // total):10}| {step}/{total} [{clocks},  1.00s/it{more}]"


def bars(last: int, total: int, loss: bool = False) -> list[str]:
    return ["\r".join(bar(step, total, f", loss={5 - step / 100:.3f}" if loss else "") for step in range(last + 1))]


def trainer(last: int) -> list[str]:
    return [
        line
        for step in range(10, last + 1, 10)
        for line in (bar(step, 120), f"{{'loss': {5 - step / 100:.4f}, 'grad_norm': 1.1, 'epoch': {step / 120:.2f}}}")
    ]


def megatron(last: int) -> list[str]:
    return [
        f" iteration {step:8d}/     300 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): 812.5 | "
        f"learning rate: 1.500E-04 | global batch size:    64 | lm loss: {5 - step / 100:.6E} | loss scale: 1.0 | "
        "grad norm: 1.204 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for step in range(10, last + 1, 10)
    ]


def own(last: int, first: int = 10) -> list[str]:
    return [f"step {step}/300 | loss {5 - step / 100:.3f} | 250.0 ms/step" for step in range(first, last + 1, 10)]


def epochs(last: int) -> list[str]:
    return [f"Epoch {n}/40 - Train Loss: {3 - n / 20:.3f}, Val Loss: {3.1 - n / 20:.3f}" for n in range(1, last + 1)]


def end_of(lines: list[str], folder: Path) -> tuple[str, str, int | None]:
    """(ended, begin of the cause, last step), of a log read in blocks and line by line."""
    log = folder / "a.log"
    log.write_text("\n".join(lines) + "\n", newline="")
    found = []
    for parts in (read_log(log).parts, read_log_plainly(log).parts):
        (run,) = group_logs([(log, parts)])
        record = read_foreign(run, "a").record
        found.append((record.ended, (record.cause or "").partition(":")[0][:27], record.attempts[-1]["last_step"]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("lines", "last_step"),
    [
        (HEADER + trainer(120), 120),
        (megatron(300), 300),
        (epochs(40), 40),
        (bars(120, 120, loss=True), 120),
    ],
)
def test_a_cut_traceback_after_the_last_step_is_the_end(lines: list[str], last_step: int, tmp_path: Path) -> None:
    assert end_of(lines, tmp_path) == ("done", "", last_step)
    cut = [*lines, "2025-03-01 12:00:00 - ERROR - Error happened while training", *CUT]
    assert end_of(cut, tmp_path) == ("error", "a traceback that the log cu", last_step)
    assert end_of([*lines, *WHOLE], tmp_path) == ("error", "RuntimeError", last_step)


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        # A word after a traceback is the script's.
        ([*own(200), *WHOLE, "Training complete."], "error"),
        ([*own(300), *WHOLE, "Training complete."], "error"),
        ([*megatron(300), *WHOLE, "Done!"], "error"),
        ([*own(300), "Training complete.", *WHOLE], "error"),
        # A step of the program outlives it, and the interpreter's noise at its exit is no end.
        ([*own(100), *WHOLE, *own(300, 110), "Training complete."], "done"),
        ([*HEADER, *trainer(60), *WHOLE, *trainer(120)[12:]], "done"),
        ([*megatron(100), *WHOLE, *megatron(300)[10:]], "done"),
        ([*own(300), "Training complete.", *NOISE], "done"),
        ([*own(300), "Training complete.", *NOISE[:-1]], "done"),
    ],
)
def test_a_traceback_is_outlived_by_a_step_alone(lines: list[str], ended: str, tmp_path: Path) -> None:
    assert end_of(lines, tmp_path)[0] == ended


@pytest.mark.parametrize(
    ("lines", "total"),
    [
        ([*own(100), *WHOLE, *bars(300, 300)], 300),
        ([*bars(39, 120, loss=True), *WHOLE, *bars(120, 120)], 120),
        ([*HEADER, *trainer(40), *WHOLE, *bars(120, 120)], 120),
        ([*HEADER, *WHOLE, *HEADER, *bars(120, 120)], 120),
    ],
)
def test_the_bars_of_a_start_after_a_failed_one_are_the_end(lines: list[str], total: int, tmp_path: Path) -> None:
    assert end_of(lines, tmp_path) == ("done", "", total)
    # An evaluation after a failure that was caught is no start.
    assert end_of([*own(100), bar(100, 300), *WHOLE, *bars(474, 474)], tmp_path)[2] == 100


@pytest.mark.parametrize("word", ["Done!", "[finished]", "All done.", "2025-03-01 12:00:00 - INFO - Finished"])
@pytest.mark.parametrize(
    ("lines", "missed"),
    [
        (own(300), own(200)),
        (megatron(300), megatron(200)),
        (epochs(40), epochs(28)),
        ([line.replace("/300", "") for line in own(300)], None),  # no total is printed
    ],
)
def test_a_word_alone_is_the_end_if_no_total_was_missed(
    lines: list[str], missed: list[str] | None, word: str, tmp_path: Path
) -> None:
    assert end_of([*lines, "Saved the model to out/final.pt", word], tmp_path)[0] == "done"
    if missed is not None:
        assert end_of([*missed, word], tmp_path)[0] == "unknown"
        # With a subject it is believed.
        assert end_of([*missed, "Training complete. Checkpoint saved to out/final.pt"], tmp_path)[0] == "done"
    else:
        assert end_of([*lines, word, *[f"task {n}: accuracy 0.31" for n in range(40)]], tmp_path)[0] == "unknown"
        assert end_of([*lines, "Saving the model... done"], tmp_path)[0] == "unknown"


@pytest.mark.parametrize(
    "lines", [HEADER + trainer(120), megatron(300), bars(120, 120, loss=True), bars(120, 120)], ids=range(4)
)
def test_a_script_that_says_its_training_failed_is_not_done(lines: list[str], tmp_path: Path) -> None:
    for words in (
        "Error happened while training",
        "2025-03-01 12:00:00,123 - ERROR - An error occurred during training: no space left in /scratch",
        "ERROR:root:Training failed with exit code 1",
    ):
        assert end_of([*lines, words], tmp_path)[0] == "error"
        assert end_of([*lines, words, *WHOLE], tmp_path)[:2] == ("error", "RuntimeError")
    done = end_of(lines, tmp_path)
    for words in ("no error occurred during training", "Training failed samples: 0", "error rate after training 0.1"):
        assert end_of([*lines, words], tmp_path) == done
