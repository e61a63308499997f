"""trainer_state.json: entries are identified by their steps, and the file may end anywhere."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines import source
from hpc_gpt.report.gather import gather_paths


def _state(log_history: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """The document as a Trainer writes it: its keys are sorted, and those before `log_history` have no braces."""
    head = {"best_metric": None, "epoch": log_history[-1]["epoch"], "global_step": log_history[-1]["step"]}
    tail = {"logging_steps": 1, "max_steps": 400, "num_train_epochs": 1, "save_steps": 50, "train_batch_size": 2}
    callbacks = {"stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}}}
    return {**head, "log_history": log_history, **tail, **callbacks, **keys}


def _read(folder: Path, text: str) -> Record:
    (folder / "trainer_state.json").write_text(text)
    [record] = gather_paths([str(folder / "trainer_state.json")], Path("/nowhere")).records
    return record


def _trainer(step: int) -> dict[str, Any]:
    return {"epoch": round(step / 40_000, 2), "grad_norm": 1.5, "learning_rate": 1e-5, "loss": 3 - step / 400}


def _trl(step: int) -> dict[str, Any]:
    further = {f"rewards/reward_{number}/mean": 0.25 for number in range(20)}
    return {"completion_length": 211.5, **_trainer(step), "kl": 0.01, "num_tokens": 4096.0 * step, **further}


def _swift(step: int) -> dict[str, Any]:
    return {**_trainer(step), "memory(GiB)": 41.2, "token_acc": 0.61, "train_speed(iter/s)": 0.91}


@pytest.mark.parametrize("entry_of", [_trainer, _trl, _swift])
def test_entries_of_one_rounded_epoch_are_steps(tmp_path: Path, entry_of: Any) -> None:
    entries = [{**entry_of(step), "step": step} for step in range(1, 301)]
    entries.insert(150, {"epoch": 0.0, "eval_loss": 2.71, "eval_runtime": 4.0, "step": 150})
    entries.append({"epoch": 0.01, "step": 307, "train_loss": 2.6, "train_runtime": 618.0})
    record = _read(tmp_path, json.dumps(_state(entries, max_steps=307), indent=2))
    assert (record.loss_first, record.loss_last, record.loss_eval) == pytest.approx((2.9975, 2.25, 2.71))
    assert (record.attempts[-1]["last_step"], record.step_s, record.ended) == (307, 2.0, "done")
    assert record.micro_batch == 2
    assert not [flag for flag in record.flags if "left out" in flag]


def test_a_norm_that_is_nan_takes_no_loss(tmp_path: Path) -> None:
    entries = [{**_trainer(step), "step": step} for step in range(1, 13)]
    entries[0]["grad_norm"] = entries[-1]["grad_norm"] = math.nan
    record = _read(tmp_path, json.dumps(_state(entries), indent=2))
    assert (record.loss_first, record.loss_last, record.ended) == (2.9975, 2.97, "unknown")


def test_an_entry_of_two_lines_of_one_step_is_one(tmp_path: Path) -> None:
    entries = [{**_trainer(step), "step": step} for step in range(1, 5)]
    entries[2:2] = [{"epoch": 0.0, "loss": 9.0, "step": 2}, {"epoch": 0.0, "my_metric": 1.0, "step": 2}]
    record = _read(tmp_path, json.dumps(_state(entries)))
    assert (record.loss_first, record.loss_last) == (2.9975, 2.99)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_document_may_end_anywhere(tmp_path: Path, indent: int | None) -> None:
    entries = [{**_trainer(step), "step": step} for step in range(1, 9)]
    text = json.dumps(_state(entries), indent=indent)
    for share in (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95):
        record = _read(tmp_path, text[: int(share * len(text))])
        steps = record.attempts[-1]["last_step"]
        assert 1 <= steps <= 8
        assert record.loss_last == pytest.approx(3 - steps / 400)


def test_a_large_document_is_read_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DOCUMENT", 1 << 16)
    entries = [{**_trainer(step), "step": step} for step in range(1, 2001)]
    record = _read(tmp_path, json.dumps(_state(entries)))
    assert 100 < record.attempts[-1]["last_step"] < 2000
    assert "64 MiB" in " ".join(record.flags)
