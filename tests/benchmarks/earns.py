"""The figures that each part of the reader earns: `python -m tests.benchmarks.earns [PART …]`. Nothing passes or fails.

Switches one part off at a time, reads logs whose truth is known, and counts the figures that are right, null and wrong.
A part that earns no right figure and prevents no wrong one is worth less than its lines. The logs are those of
tests/reader/truth, what tests/reader/specimens say, the runs of tests/specimens, and, if they are there, the logs and
the failed runs of ../shared (its EXPECTED names the class of each). A dialect's own specimen does not count for it: its
lines are there because the dialect reads them.
"""

import importlib
import inspect
import json
import multiprocessing
import re
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.reader import dialects
from hpc_gpt.reader.logs import matches
from hpc_gpt.reader.records import facts, foreign
from hpc_gpt.report.gather import gather_paths
from tests.reader.dialects.test_specimens import SAID, said
from tests.reader.reading import specimen_of
from tests.reader.test_truth import _ROUNDED, TRUTH, is_right
from tests.specimens.__main__ import ARCHIVE

# {MODULE:FUNCTION that is switched off: the function in its place}
PARTS: dict[str, Callable[..., Any]] = {
    "facts:_add_gpus": lambda *_: None,
    "facts:add_measured": lambda *_: None,
    "log_steps:_evenly": lambda numbers: numbers,
    "log_steps:_join_unnumbered": lambda *_: None,
    "log_steps:add_losses_beside": lambda *_: None,
    "log_steps:counted_in": lambda *_: None,
    "params:add_params": lambda *_: None,
    "rules:check_rates": lambda *_: [],
    "rules:flag_contradictions": lambda *_: None,
    "times:_differences": lambda steps, *_: (np.full(len(steps), np.nan), ""),
    "times:timed_bars": lambda *_: None,
}
KINDS = ("right", "null", "wrong")
SHARED = Path(__file__).parents[3] / "shared"
# What ../shared/logs say, by hand (tests/reader/records/test_shared_logs.py has the reasons).
LOGS = {
    "meg_gpt2_perf_n16": {
        "gpus": 64, "tp": 4, "pp": 16, "dp": 1, "micro_batch": 4, "micro_batches": 256, "global_batch": 1024,
        "seq": 1024, "step_s": 128.95, "params": 51_970_064_384, "layers": 64, "hidden": 8192, "heads": 32,
        "vocab": 50688, "engine": "megatron-lm", "dtype": "fp16", "recompute": "full", "skipped_steps": 3,
    },
    "meg_ds_zero_gpt2_perf_n16_nbs48_ms48": {
        "gpus": 64, "tp": 4, "pp": 1, "dp": 16, "micro_batch": 48, "micro_batches": 1, "global_batch": 768,
        "step_s": 124.91, "params": 51_970_064_384, "engine": "deepspeed-zero", "zero_stage": 3,
        "tflops_printed": 40.93, "memory_allocated_gib": 25.506, "memory_reserved_gib": 27.572, "loss_first": 12.52221,
        "loss_last": 40.75231,
    },
    "hf_ds_gpt2_base_n4-1832555": {
        "gpus": 16, "nodes": 4, "tp": 1, "pp": 1, "dp": 16, "micro_batch": 4, "micro_batches": 1, "global_batch": 64,
        "step_s": 57.44, "layers": 40, "hidden": 7168, "heads": 32, "seq": 1024, "vocab": 50257, "zero_stage": 3,
        "params": 25_033_831_424, "engine": "hf-deepspeed", "dtype": "fp16", "job_id": "1832555", "ended": "done",
    },
}  # fmt: skip


def truths(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(a log or a run folder, {field: what is true}); the fields of "absent" have no figure."""
    for path in TRUTH:
        true = json.loads(path.read_text())
        yield path.with_suffix(".log"), true["record"] | {"within": true.get("within", {}), "absent": true["absent"]}
    for made_before in sorted(ARCHIVE.parent.glob("made_at_*.tar.xz")):
        with tarfile.open(made_before) as archive:
            archive.extractall(folder, filter="data")
    for kept in folder.rglob("record.json"):
        record = json.loads(kept.read_text())
        del record["config_hash"]  # each version has its own
        yield kept.parent, {key: value for key, value in record.items() if isinstance(value, int | float | str)}
    if not SHARED.is_dir():
        return
    for log in (SHARED / "logs").iterdir():
        yield log, LOGS[log.stem]
    for case in sorted((SHARED / "cases").iterdir()):
        files = [path for path in case.iterdir() if path.is_file()] if case.is_dir() else []
        logs = [path for path in files if path.suffix in (".err", ".log", ".out", ".txt")]
        expected = (case / "EXPECTED").read_text() if case / "EXPECTED" in files else ""
        of_why = re.split(r"[;.]|, not", re.split(r"why[^:]{0,20}: ", expected)[-1])[0]
        classes = [word for word in re.findall(r"\w+", of_why) if word in ENDED]
        if len(logs) == 1 and classes and case.name[0] in "ABLV":
            yield logs[0], {"ended": classes}


def count() -> dict[str, Counter[str]]:
    """The numbers of right, null and wrong figures: of the logs, and of each dialect's specimen."""
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        for path, true in truths(Path(name)):
            records = gather_paths([str(path)], Path("/nowhere")).records
            within, absent = true.pop("within", {}), true.pop("absent", ())
            for field, value in true.items():
                read = getattr(records[-1], field, None) if records else None
                exact = 0.0 if isinstance(value, int) else 0.011
                share = within.get(field, _ROUNDED.get(field, exact))
                if read in (None, [], "unknown") and read != value:
                    found["null"] += 1
                elif isinstance(value, list):
                    found["right" if read in value else "wrong"] += 1
                else:
                    found["right" if read == value or is_right(read, value, share) else "wrong"] += 1
            for field in absent:
                found["right" if not records or records[-1].to_tables()[field] in (None, []) else "wrong"] += 1
    counts = {"logs": found}
    for name, figures in re.findall(r"^(\w+)\n((?:  .*\n)*)", SAID.read_text(encoding="utf-8"), re.MULTILINE):
        true = dict(line.split(" = ", 1) for line in figures.splitlines())
        read = dict(line.split(" = ", 1) for line in said(specimen_of(name).splitlines()).splitlines())
        counts[name] = Counter(
            "null" if key not in read else "right" if read[key] == text else "wrong"
            for key, text in true.items()
            if key.split()[0] not in ("engine", "dtype", "flag", "alone")
        )
    return counts


def without(part: str) -> dict[str, Counter[str]]:
    """The counts with one part switched off, a function of PARTS or a dialect."""
    if ":" in part:
        whole = function_of(part)
        for loaded in [each for name, each in sys.modules.items() if name.startswith("hpc_gpt.")]:
            for name in [name for name, value in vars(loaded).items() if value is whole]:
                setattr(loaded, name, PARTS[part])
    else:
        others = tuple(dialect for dialect in dialects.dialects() if dialect.name != part)
        by_name = {dialect.name: dialect for dialect in others}
        for cached in (matches.all_patterns, matches.patterns_by_literal, matches.literal_scan):
            cached.cache_clear()
        matches.dialects = lambda: others  # type: ignore[assignment]
        facts.dialects_by_name = foreign.dialects_by_name = lambda: by_name  # type: ignore[attr-defined]
    return count()


def function_of(part: str) -> Callable[..., Any]:
    """The function of a row of PARTS."""
    module, name = part.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"hpc_gpt.reader.records.{module}"), name)
    return function


def size(part: str) -> str:
    """The length of a part."""
    if ":" in part:
        return f"{len(inspect.getsource(function_of(part)).splitlines())} lines"
    return f"{sum(len(each.patterns) for each in dialects.dialects() if each.name == part)} patterns"


def main() -> None:
    parts = sys.argv[1:] or [*PARTS, *(dialect.name for dialect in dialects.dialects())]
    base = count()
    whole = sum(base.values(), Counter[str]())
    print(", ".join(f"{whole[kind]} {kind}" for kind in KINDS), flush=True)
    print(f"{'switched off':34} {'size':>12}" + "".join(f"{kind:>7}" for kind in KINDS))
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for part, found in zip(parts, pool.imap(without, parts), strict=True):
            changes = (sum(found[of][kind] - base[of][kind] for of in base if of != part) for kind in KINDS)
            print(f"{part:34} {size(part):>12}" + "".join(f"{change:+7}" for change in changes), flush=True)


if __name__ == "__main__":
    main()
