"""Hugging Face's `trainer_state.json`, which a Trainer writes beside each checkpoint, read as one JSON document.

An entry of `log_history` is identified by its step: its epoch is rounded. Entries of an evaluation have `eval_loss`,
the last one of a training has `train_runtime`. The batch is per device. The step time is the runtime over the steps, as
in the log.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_gpt.reader.lines.growing_parts import MAX_ROWS, PRINTED_BEFORE
from hpc_gpt.reader.lines.part import Fact, Part, Place
from hpc_gpt.reader.lines.step_rows import StepRows, sound_step

NAME = "trainer_state"
_HISTORY = re.compile(r'^\s*\{[^\[\]]*?"log_history"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_FIGURES = {
    "epoch": "epoch", "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "aux_loss": "balance_loss",
    "num_input_tokens_seen": "consumed_tokens",
}  # fmt: skip
_FACTS = {
    "logging_steps": "log_interval", "max_steps": "steps_planned", "num_train_epochs": "epochs",
    "train_batch_size": "micro_batch",
}  # fmt: skip


def is_trainer_state(head: str) -> bool:
    """Whether a file that begins with this text is a trainer_state.json."""
    return _HISTORY.match(head) is not None


def part_of(file: str, text: str) -> Part:
    """The part of a whole trainer_state.json, which may end in the middle."""
    head = _HISTORY.match(text)
    assert head is not None
    part, rows = Part(file, dialects={NAME: 1}), StepRows()
    begin = end = head.end()
    for line, entry, after in _entries(text, begin):
        part.last_line, end = line, after
        if isinstance(entry, dict):
            _add(part, rows, Place(file, line), _numbers(entry))
    rows.keep_at_most(MAX_ROWS)
    part.steps = {NAME: rows.table(part.left_out)} if rows.count else {}
    state, place = _numbers(_without_history(text, begin, end)), Place(file, 1)
    part.facts["engine"] = [Fact("hf", place, NAME)]
    for key, field in _FACTS.items():
        if key in state and state[key].is_integer():
            part.facts[field] = [Fact(int(state[key]), place, NAME)]
    if sound_step(state.get("global_step", 0.5)):
        part.saves.append((state["global_step"], None, part.last_line))
    return part


def _entries(text: str, place: int) -> Iterator[tuple[int, Any, int]]:
    """Yields (line, entry, the place after it) for each whole entry of `log_history`."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    while (begin := _BETWEEN.match(text, place)) and text[begin.end() : begin.end() + 1] not in ("", "]"):
        line, counted = line + text.count("\n", counted, begin.end()), begin.end()
        try:
            entry, place = decoder.raw_decode(text, counted)
        except ValueError:
            return
        yield line, entry, place


def _without_history(text: str, begin: int, end: int) -> dict[str, Any]:
    """The document without its entries, which stand from `begin` to `end`; what follows them may be cut off."""
    for rest in (text[end:], "]}"):
        try:
            state: dict[str, Any] = json.loads(text[:begin] + rest)
            return state
        except ValueError:
            continue
    return {}


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry that fit a float."""
    return {
        key: float(value)
        for key, value in entry.items()
        if isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
    }


def _add(part: Part, rows: StepRows, place: Place, entry: Mapping[str, float]) -> None:
    step = entry.get("step")
    if step is None or not sound_step(step):
        part.left_out["entries without a step"] = part.left_out.get("entries without a step", 0) + 1
        return
    if "eval_loss" in entry:
        part.evals.append((step, entry["eval_loss"], place.line))
    if entry.get("eval_runtime", 0) > 0:
        part.eval_s.append((entry["eval_runtime"], place.line))
    if "train_runtime" in entry:
        part.totals["runtime_s"] = Fact(entry["train_runtime"], place, NAME)
    row = {field: entry[key] for key, field in _FIGURES.items() if key in entry}
    if "loss" not in row and row.keys() <= {"epoch", "consumed_tokens"}:
        row = {}  # an evaluation's entry, the last one, or one of a callback: it trained no other step
    if rows.last_step is None or step > rows.last_step:
        if row or "train_runtime" in entry:
            rows.add({"step": step, **row}, place.line)
    elif step == rows.last_step and "loss" not in row.keys() & rows.open_row.keys():
        rows.open_row.update({field: figure for field, figure in row.items() if field not in rows.open_row})
    elif row:
        part.left_out[PRINTED_BEFORE] = part.left_out.get(PRINTED_BEFORE, 0) + 1
