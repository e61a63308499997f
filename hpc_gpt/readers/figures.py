"""The figures that follow from a record's own keys: throughput, FLOPs by each formula, utilisation."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from hpc_gpt.formulas import Recompute, hfu, memory_seed003_gib, mfu, tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.devices import DEVICES, peak_tflops


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
    """The record with what its sizes and `step_s` give; a figure whose inputs are not known stays null."""
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
