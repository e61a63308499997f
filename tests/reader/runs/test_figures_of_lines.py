"""Which line is a step of its own, whose figure wins, and which figure is left out: small logs in programs' forms."""

from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.report.gather import gather_paths
from tests.reader.lines.comparable import comparable
from tests.reader.reading import read_log_plainly


def read(folder: Path, text: str, name: str = "train.log") -> Record:
    """The record of the only run of a log, which both readers read alike."""
    (folder / name).write_text(text)
    block, plain = (reader(folder / name) for reader in (read_log, read_log_plainly))
    assert [comparable(part) for part in block.parts] == [comparable(part) for part in plain.parts]
    [record] = gather_paths([str(folder / name)], Path("/nowhere")).records
    return record


def bar(step: int, total: int) -> str:
    return f"{100 * step // total:3d}%|{'#' * 4:10s}| {step}/{total} [{step // 60:02d}:{step % 60:02d}<10:00,  1.00s/it]"


# name -> the line of a step whose figures are those of the line before
EQUAL_LINES = {
    "HF Trainer": "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 2e-05, 'epoch': 0.01}",
    "TRL": "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1e-06, 'num_tokens': 81920.0, 'reward': 0.25, 'epoch': 0.0}",
    "ms-swift": "{'loss': 0.125, 'token_acc': 0.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.02}",
}


@pytest.mark.parametrize("count", [8, 60])
@pytest.mark.parametrize("name", EQUAL_LINES)
def test_equal_lines_with_a_step_of_the_bar_between_are_two(tmp_path: Path, name: str, count: int) -> None:
    line = EQUAL_LINES[name]
    lines = "".join(f"\r{bar(step, count)}\n{line}\n\r{bar(step, count)}" for step in range(1, count + 1))
    record = read(tmp_path, lines)
    assert record.attempts[-1]["last_step"] == count
    assert not [flag for flag in record.flags if "printed before" in flag]


@pytest.mark.parametrize("name", EQUAL_LINES)
def test_a_line_that_is_printed_twice_at_once_is_one(tmp_path: Path, name: str) -> None:
    line = EQUAL_LINES[name]
    lines = "".join(f"\r{bar(step, 40)}\n{line}\n\r{bar(step, 40)}\n{line}\n" for step in range(1, 41))
    record = read(tmp_path, lines)
    assert record.attempts[-1]["last_step"] == 40
    assert "left out: 40 lines of a step that was printed before" in record.flags


@pytest.mark.parametrize("quote", ["", "'"])
@pytest.mark.parametrize("name", EQUAL_LINES)
def test_a_step_in_the_line_is_its_number(tmp_path: Path, name: str, quote: str) -> None:
    line = EQUAL_LINES[name].removesuffix("}")
    record = read(tmp_path, "".join(f"{line}, 'step': {quote}{12 * step}{quote}}}\n" for step in range(1, 31)))
    assert record.attempts[-1]["last_step"] == 360
    assert not [flag for flag in record.flags if "counted" in flag or "printed before" in flag]
