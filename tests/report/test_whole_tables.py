"""Every table of runs as it is printed, whole: usual, published, swept, on a terminal, of races."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.report.bench_table import file_text
from hpc_gpt.report.published_tables import (
    PUBLISHED_TABLES,
    SweepLine,
    SweepLines,
    lines_of,
    notes_on_rows,
    sweep_lines,
    sweep_text,
    terminal_table,
)
from hpc_gpt.report.tables import as_block, records_text
from tests.made_runs import make_run
from tests.measured_rows import make_bench
from tests.report.test_whole_texts import OTHER, RUN

# Changed by hand: the texts below their headings.
_FILE = Path(__file__).with_name("tables.txt").read_text(encoding="utf-8")
TEXTS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", _FILE, re.MULTILINE))
WAITS = Record(run="x", gpus=4, ended="pending")
FULL = replace(RUN, recompute="full", memory_reserved_gib=[27.0], gpu_util_mean=71.94, gpu_util_spread=22.0,
               memory_seed003_gib=33.5, compile_s=12.0, attention_used="cudnn", matmul_tflops_before=770.0,
               matmul_tflops_after=765.0, sm_clock_mhz=1700.0, power_w=690.0,
               versions={"torch": "2.11", "nccl": "2.27"},
               config_hash="0123", tokens_per_s_spread=0.021, rounds=3)  # fmt: skip
OWN = """
[model]
preset = "gpt2"
[layout]
gpus = 1
[rows]
"small" = { layout.micro_batch = 1, train.lr = 1e-3, published.step_s = 0.5, published.watts = 310 }
"large" = { layout.micro_batch = 8, published.step_s = "slow", published.notes = "by night" }
"none" = { layout.tp = 3, impossible = "tp3 does not divide 12 heads by 4" }
"""
RACES: dict[str, dict[str, Any]] = {
    "won": {
        "is_over": True,
        "winner": "R#2",
        "why": "it was measured in 3 rounds",
        "place": 2,
        "submit": "hpc-gpt submit 'a b' --row quick",
    },
    "of two rounds": {"is_over": True, "winner": "R#1", "why": "it is faster", "unchecked": True, "rounds": 2},
    "on CPUs": {"is_over": True, "winner": "R#2", "why": "it is faster", "device": None},
    "not over": {"is_over": False, "winner": "R#2"},
    "without a winner": {"is_over": True, "winner": None, "why": "no row was measured"},
}


def published(name: str, _: Path) -> str:
    """Our figures beside those of the row that has most of them."""
    row = max(find_sweep(name).rows, key=lambda row: len(row.published))  # type: ignore[union-attr, arg-type]
    ours = SweepLines(name, [SweepLine(row, FULL, FULL)], [FULL])
    return sweep_text(ours, "md")


def on_terminal(room: int, _: Path) -> str:
    settings = {"sweep": {"name": "a", "row": "r", "varied": {"train": {"lr": 0.01}}}}
    text, _, narrow = terminal_table(lines_of([RUN, OTHER, replace(RUN, run="r-13", settings=settings)]), room)
    return text + (f"{narrow}\n" if narrow else "")


def of_own_sweep(folder: Path) -> str:
    """The notes on the rows of a sweep of one's own, and on the columns that are left out."""
    lines = own_sweep(folder)
    _, _, narrow = terminal_table(lines, 100)
    return "".join(f"{note.run}: {note.text}\n" for note in notes_on_rows(lines)) + f"{narrow}\n"


def own_sweep(folder: Path) -> Any:
    (file := folder / "mine.toml").write_text(OWN)
    of = {"name": "mine", "row": "small", "varied": {}}
    ran = replace(RUN, settings={"sweep": of}, step_s=0.25)
    smoke = replace(RUN, run="r-13", name="made-smoke", settings={"sweep": {**of, "row": "large"}})
    gone = replace(RUN, run="r-14", settings={"sweep": {**of, "row": "gone", "varied": {"train": {"lr": 0.5}}}})
    return sweep_lines("mine", [ran, smoke, gone, replace(RUN, run="r-15", settings={})], str(file))


def rows_of_json(text: str) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in json.loads(text)["rows"])


def bench_text(folder: Path, rows: int | None = None) -> str:
    slower = replace(FULL, name="fsdp", tokens_per_s=2400.0, gpus=4, allocator_retries=3, dialect="nanotron")
    failed = Record(name="mbs 64", ended="gpu_memory", cause="too large")
    on_cpu = Record(name="cpu", ended="done", dialect="hpc-gpt", tokens_per_s=2.0, memory_reserved_gib=[1.5])
    records = [replace(FULL, name="ddp"), slower, failed, on_cpu, replace(on_cpu, name="none", tokens_per_s=None)]
    return file_text(make_bench(folder, "b", *((record, ()) for record in records[:rows])) / "bench.json")


def race_text(name: str, folder: Path) -> str:
    race, run = RACES[name], make_run(folder, "generic-slurm")
    rounds, device = race.get("rounds", 3), race.get("device", "H100")
    speeds = {"slow": (100.0, 101.0, 99.0), "quick": (110.0, 112.0, 111.0), "far": (50.0, 51.0, 49.0), "out": ()}
    records, rows = [], []
    for place, (row, each) in enumerate(speeds.items(), 1):
        rate = each[0] if each else None
        record = Record(
            run=f"R#{place}", tokens_per_s=rate, step_s=rate and 64 / rate, ended="done" if rate else "error", tp=place,
            dp=2, cp=1, device=device, rounds=rounds if each else 0, dialect="hpc-gpt", mfu=rate and rate / 1000,
            predicted_memory_gib=[place / 2], compile_s=rate and rate / 4, tokens_per_s_spread=rate and rate / 9000,
        )  # fmt: skip
        records.append(record.to_tables())
        note = None if each else "out of memory at the first visit"
        rows.append({"tokens_per_s": each[:rounds], "name": row, "predicted_step_s": place / 8, "note": note,
                     "ratio": rate and rate / 110})  # fmt: skip
    page = {"schema": 1, "bench": "R", "records": records, "rows": rows, "race": {"rows": rows, **race}}
    (run.path / "bench.json").write_text(json.dumps(page))
    text = file_text(run.path / "bench.json").replace(str(run.path), "FOLDER")
    return text if "place" in race else text[text.index("device:") :]


MADE: dict[str, Callable[[Path], str]] = {
    "usual, md": lambda _: records_text([RUN, OTHER, WAITS], "md"),
    "usual, of what waits": lambda _: records_text([WAITS], "md") + as_block(WAITS),
    "usual, csv": lambda _: records_text([RUN, OTHER, WAITS], "csv"),
    **{f"terminal of {room}": partial(on_terminal, room) for room in (200, 90, 30)},
    **{name: partial(published, name) for name in list(PUBLISHED_TABLES)[1:]},
    "any run in published columns": lambda _: sweep_text(lines_of([FULL], "memory-ladder"), "table"),
    "own sweep, md": lambda folder: sweep_text(own_sweep(folder), "md"),
    "own sweep, csv": lambda folder: sweep_text(own_sweep(folder), "csv"),
    "own sweep, json": lambda folder: rows_of_json(sweep_text(own_sweep(folder), "json")),
    "own sweep, terminal of 100": of_own_sweep,
    "published sweep, terminal of 75": lambda _: terminal_table(sweep_lines("colab-ladder", []), 75)[0],
    "rows of a bench": bench_text,
    "rows of a bench, of one row": partial(bench_text, rows=1),
    **{f"race {name}": partial(race_text, name) for name in RACES},
}


@pytest.mark.parametrize("name", MADE)
def test_a_table_is_what_its_rows_say(name: str, tmp_path: Path) -> None:
    assert MADE[name](tmp_path) == TEXTS[name]


def test_each_text_is_of_a_table() -> None:
    assert list(TEXTS) == list(MADE)
