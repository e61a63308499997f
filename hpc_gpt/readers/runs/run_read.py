"""A run as it was read, records that were kept in files, and the figures that follow from a record's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from hpc_gpt.errors import ConfigError
from hpc_gpt.formulas import Recompute, hfu, memory_seed003_gib, mfu, tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.readers.causes.first_cause import Cause
from hpc_gpt.readers.logs.part import Failure
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.settings.cluster import DEVICES, peak_tflops
from hpc_gpt.small_files import read_json


@dataclass(frozen=True)
class RunRead:
    """One run. `steps`: those that a later attempt trained again are there too, and do not count.

    `failures`: the first cause first, then what else went wrong; echoes last. `files`: all it was read from.
    `folder`: the run folder if it is one of ours, else None. `causes`: of each attempt, of others' logs.
    `rounds`: of a bench's row its tokens/s round by round.
    """

    record: Record
    steps: StepTable = field(default_factory=StepTable)
    failures: Sequence[Failure] = ()
    files: Sequence[Path] = ()
    folder: Path | None = None
    causes: Sequence[Cause] = ()
    rounds: Sequence[float] = ()


# The file in which `bench` keeps its rows, beside the runs of their rounds.
BENCH_FILE = "bench.json"
# No record is larger; a log that begins like one may be.
_MOST_BYTES = 64 * 2**20


def is_bench(path: Path) -> bool:
    """Whether it is the file of a bench's rows, and not just a file of that name."""
    return path.name == BENCH_FILE and isinstance(_tables(path).get("bench"), str)


def read_records(path: Path) -> list[Record] | None:
    """The records of a file; None if it is no JSON of a record or of several. Raises ConfigError for a damaged one."""
    tables = _tables(path)
    listed = tables.get("records", [tables])
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "ended" in each for each in listed):
        return None
    return [_record(each, path) for each in listed]


def read_rounds(path: Path, rows: int) -> list[list[float]]:
    """Tokens/s round by round of each of a bench's rows, of which there are so many; none if the file has none."""
    listed = _tables(path).get("rows")
    if not isinstance(listed, list) or len(listed) != rows:
        return [[] for _ in range(rows)]
    return [_speeds(each.get("tokens_per_s") if isinstance(each, dict) else None) for each in listed]


def _speeds(listed: Any) -> list[float]:
    figures = listed if isinstance(listed, list) else []
    sound = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < 1e15 for each in figures)
    return [float(each) for each in figures] if sound else []


def _tables(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if it holds none."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
    except OSError:
        return {}
    return read_json(path)


def _record(tables: dict[str, Any], path: Path) -> Record:
    from pydantic import TypeAdapter, ValidationError

    known = {key: value for key, value in tables.items() if key in RECORD_KEYS}
    try:
        return TypeAdapter(Record).validate_python(known)
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}", "is this the record.json of a run?") from None


class _Run(TypedDict):
    seq: int
    global_batch: int
    gpus: int
    step_s: float


class _Shape(TypedDict):
    layers: int
    hidden: int


# How a record's words for recomputation read in the formulas.
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full"}


def add_figures(record: Record) -> Record:
    """The record with the figures that its sizes and `step_s` give; one whose inputs are not known stays null."""
    record = _add_seed003(record)
    if not record.step_s or not record.global_batch or not record.seq:
        return record
    sources = dict(record.sources)
    flags = list(record.flags)
    record = replace(record, tokens_per_s=record.global_batch * record.seq / record.step_s)
    sources["tokens_per_s"] = "global_batch x seq / step_s"
    if not record.gpus:
        return replace(record, sources=sources)
    record = _add_flops(record, sources)
    peak = peak_tflops(record.device, record.dtype or "")
    if record.device is None:
        sources["mfu"] = sources["hfu"] = "null: no device is named"
    elif peak is None:
        lack = f"{_lack(record)} for device {record.device}"
        sources["mfu"] = sources["hfu"] = f"null: {lack}"
        flags.append(f"{lack}: mfu and hfu are null")
    else:
        if record.tflops_model is not None:
            record = replace(record, mfu=mfu(record.tflops_model, peak))
        if record.tflops_hardware is not None:
            record = replace(record, hfu=hfu(record.tflops_hardware, peak))
        sources["mfu"] = f"tflops_model / {peak} dense {record.dtype} TFLOP/s of {record.device}"
        sources["hfu"] = f"tflops_hardware / {peak} dense {record.dtype} TFLOP/s of {record.device}"
        if max(record.mfu or 0.0, record.hfu or 0.0) > 1:
            flags.append(f"faster than the peak of {record.device}: the device or a size is wrong")
    return replace(record, sources=sources, flags=flags)


def _lack(record: Record) -> str:
    if record.device not in DEVICES:
        return "no peaks known"
    return f"no dense {record.dtype} peak known" if record.dtype else "no dtype is named"


def _add_seed003(record: Record) -> Record:
    """With seed 003's memory formula for one GPU's share of the model: its slice of the layers of a stage."""
    sizes = (record.params, record.micro_batch, record.seq, record.layers, record.hidden, record.heads, record.vocab)
    params, batch, seq, layers, hidden, heads, vocab = sizes
    tp, pp = record.tp, record.pp
    if not (params and batch and seq and layers and hidden and heads and vocab and tp and pp):
        return record
    bytes_each = 4 if record.dtype == "fp32" else 2
    figure = memory_seed003_gib(
        params=params / (tp * pp),
        batch=batch,
        seq=seq,
        layers=layers / pp,
        hidden=hidden / tp,
        heads=heads / tp,
        vocab=vocab / tp,
        bytes_each=bytes_each,
    )
    where = f"(4 P + 2 B C (2 V + l (6 e + h C))) x {bytes_each} bytes, seed 003, of one rank's tp and pp share"
    return replace(
        record, memory_seed003_gib=figure, sources={**record.sources, "memory_seed003_gib": f"{where}; no sharding"}
    )


def _add_flops(record: Record, sources: dict[str, str]) -> Record:
    assert record.step_s
    assert record.gpus
    assert record.global_batch
    assert record.seq
    recompute = _RECOMPUTE.get(record.recompute or "")
    run = _Run(seq=record.seq, global_batch=record.global_batch, gpus=record.gpus, step_s=record.step_s)
    if record.params and recompute:
        record = replace(record, tflops_seed=tflops_seed(params=record.params, recompute=recompute, **run))
        sources["tflops_seed"] = f"{8 if recompute == 'full' else 6} P s B / (t n 1e12), seed 001"
    if record.layers and record.hidden:
        shape = _Shape(layers=record.layers, hidden=record.hidden)
        if record.vocab and recompute:
            figure = tflops_hardware(**shape, **run, vocab=record.vocab, recompute=recompute)
            record = replace(record, tflops_hardware=figure)
            sources["tflops_hardware"] = f"Narayanan et al. 2021 eq. 3, recompute {recompute}"
        if record.params:
            record = replace(record, tflops_model=tflops_model(**shape, **run, params=record.params))
            sources["tflops_model"] = "(6 P + 12 L h s) s B / (t n 1e12), PaLM appendix B"
    return record
