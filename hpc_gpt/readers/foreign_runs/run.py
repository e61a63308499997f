"""A run that another program logged, from the parts of its logs to its record and curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from hpc_gpt.readers.figures import add_figures
from hpc_gpt.readers.foreign_runs.counts import settle_counts, settle_losses
from hpc_gpt.readers.foreign_runs.curve import foreign_curve
from hpc_gpt.readers.foreign_runs.derived import derive, step_tokens
from hpc_gpt.readers.foreign_runs.discover import STDIN
from hpc_gpt.readers.foreign_runs.draft import Draft, draft_of
from hpc_gpt.readers.foreign_runs.ends import settle_ends
from hpc_gpt.readers.foreign_runs.log_names import telling_folders
from hpc_gpt.readers.foreign_runs.rates import settle_gpus, settle_stages
from hpc_gpt.readers.foreign_runs.run_parts import RunParts
from hpc_gpt.readers.foreign_runs.run_steps import RunSteps, run_steps
from hpc_gpt.readers.foreign_runs.slurm_script import Script
from hpc_gpt.readers.foreign_runs.stage_memory import settle_memory
from hpc_gpt.readers.foreign_runs.stated import dialects_of, stated
from hpc_gpt.readers.foreign_runs.times import ForeignTimes, settle_times
from hpc_gpt.readers.foreign_runs.true_params import settle_params
from hpc_gpt.readers.part import Part
from hpc_gpt.readers.pattern import Dialect
from hpc_gpt.readers.run_read import RunRead
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import without_secrets

# Fields that no key of a record holds, and where settings keep them.
_SETTINGS = (
    *("cp", "ep", "vp", "kv_heads", "ffn", "vocab_unpadded", "steps_planned", "log_interval", "eval_interval"),
    *("save_interval", "gpus_per_node", "sequence_parallel", "flash_attention", "distributed_optimizer"),
    *("optimizer_offload", "param_offload", "partition_activations", "samples_per_epoch", "epochs", "params_printed"),
    *("experts", "experts_per_token", "swiglu", "untied_embeddings", "position_embedding", "global_batch_tokens"),
    *("resumed_step", "allreduce_gbit_per_s", "allreduce_bus_gbit_per_s", "nccl_bus_gbyte_per_s"),
)
# Dialects of lines that many programs print.
_NO_ENGINE = frozenset(("tqdm", "generic", "bandwidth"))
_VERSIONS = {"torch_version": "torch", "framework_version": "framework", "deepspeed_version": "deepspeed"}


def read_foreign(
    run: RunParts, name: str, script: Script | None = None, left_out: Mapping[str, int] | None = None
) -> RunRead:
    """The run that parts of logs make up.

    `name`: unique among the runs of a report. `left_out`: what was skipped of its files, in words -> how often.
    """
    parts = run.parts
    arguments = _arguments(parts)
    draft = draft_of(stated(parts), script.facts() if script else {})
    planned, epochs = draft.whole("steps_planned"), draft.whole("epochs")
    epoch_steps = planned / epochs if planned and epochs else None
    steps = run_steps(run.attempts, draft.whole("log_interval"), epoch_steps, draft.whole("global_batch"))
    dialect = _dialect(steps, parts)
    present = [each.name for part in parts for each in dialects_of(part)]
    _settle_engine(draft, dialect, parts)
    settle_gpus(draft, steps)
    settle_stages(draft, parts)
    derive(draft, present, arguments)
    settle_params(draft, arguments, parts)
    times = settle_times(draft, steps, parts)
    settle_losses(draft, steps, parts)
    settle_counts(draft, steps, parts)
    settle_memory(draft, parts, arguments)
    causes = settle_ends(draft, run, steps)
    _settle_name(draft, run)
    _tell(draft, parts, dialect, left_out or {})
    record = add_figures(_record(draft, name, dialect, arguments, parts))
    record = _with_printed(record, steps, times, parts)
    record = _with_tokens_per_s(record, step_tokens(draft))
    files = [*run.files, *([script.path] if script else [])]
    failures = [failure for cause in reversed(causes) for failure in cause.ordered]
    return RunRead(record, foreign_curve(steps, times, parts, step_tokens(draft)), failures, files, causes=causes)


def _arguments(parts: Sequence[Part]) -> dict[str, str]:
    """The dump of the last attempt that has one, filled up from the earlier ones."""
    found: dict[str, str] = {}
    for part in parts:
        for key, (text, _) in part.arguments.items():
            found.setdefault(key, text)
    return found


def _dialect(steps: RunSteps, parts: Sequence[Part]) -> str | None:
    """The program whose log it is: that of the lines of steps, else of the totals, else the one with an engine."""
    if steps.dialect is not None:
        return steps.dialect
    for part in parts:
        for fact in part.totals.values():
            return fact.dialect
    found = [each for part in parts for each in dialects_of(part)]
    trained = [each.name for each in found if each.engine is not None]
    trains = [each.name for each in found if _trains(each)]
    return next(iter([*trained, *trains]), None)


def _trains(dialect: Dialect) -> bool:
    """Whether it is a training program's, and not only that of what stands around one."""
    return dialect.engine is not None or any(each.kind in ("step", "progress", "total") for each in dialect.patterns)


def _settle_engine(draft: Draft, dialect: str | None, parts: Sequence[Part]) -> None:
    found = {each.name: each for part in parts for each in dialects_of(part)}
    own = found.get(dialect or "")
    if own is not None and own.engine is not None:
        draft.infer("engine", own.engine, f"the lines are {own.name}'s")
    else:
        other = next((each for each in found.values() if each.engine is not None), None)
        if other is not None:
            draft.infer("engine", other.engine, f"lines are {other.name}'s")
        elif own is not None and own.name not in _NO_ENGINE:
            draft.infer("engine", own.name, "the program whose lines they are")


def _settle_name(draft: Draft, run: RunParts) -> None:
    stem = run.names[0].stem
    job_id = draft.get("job_id") or run.names[0].job_id
    bare = stem.replace(str(job_id), "").strip("._- ") if job_id else stem
    folders = telling_folders(run.names[0].path)
    plain = "stdin" if str(run.names[0].path) == STDIN else bare or (folders[-1] if folders else None)
    draft.infer("name", plain, "the log's name")


def _tell(draft: Draft, parts: Sequence[Part], dialect: str | None, left_out: Mapping[str, int]) -> None:
    """What the readers left out, and what must be known of the program's figures."""
    counts = dict(left_out)
    for part in parts:
        for words, count in part.left_out.items():
            counts[words] = counts.get(words, 0) + count
    for words, count in counts.items():
        draft.flag(f"left out: {count:,} {words}")
    found = {each.name: each for part in parts for each in dialects_of(part)}
    for name in dict.fromkeys([dialect, *(fact.dialect for part in parts for fact in part.totals.values())]):
        for flag in found[name].flags if name in found else ():
            draft.flag(f"{name}: {flag}")
    _tell_samples(draft)


def _tell_samples(draft: Draft) -> None:
    """A program that counts the samples of its data, not those it ran: the last batch is filled up."""
    counted = draft.whole("samples_total")
    if counted is None and (each := draft.whole("samples_per_epoch")) and (epochs := draft.whole("epochs")):
        counted = each * epochs
    batch, planned = draft.whole("global_batch"), draft.whole("steps_planned")
    if counted and batch and planned and counted < planned * batch < counted + batch * (draft.whole("epochs") or 1):
        draft.flag(f"the program counts {counted} samples, where {planned} x {batch} = {planned * batch} were run")


def _record(draft: Draft, run: str, dialect: str | None, arguments: Mapping[str, str], parts: Sequence[Part]) -> Record:
    keys = {entry.name for entry in fields(Record)}
    values = {name: value for name, value in draft.values.items() if name in keys and value is not None}
    settings: dict[str, Any] = {}
    if arguments:
        settings["arguments"] = dict(sorted(arguments.items()))
    timers: dict[str, list[float]] = {}
    for part in parts:
        for timer, (total, count) in part.timers_s.items():
            known = timers.setdefault(timer, [0.0, 0.0])
            known[0] += total
            known[1] += count
    if timers:
        settings["timers_ms"] = {timer: 1e3 * total / count for timer, (total, count) in timers.items() if count}
    settings |= {name: draft.values[name] for name in _SETTINGS if name in draft}
    versions = {short: str(draft.get(name)) for name, short in _VERSIONS.items() if name in draft}
    sources = {name: source for name, source in draft.sources.items() if name in keys}
    return Record(
        **{
            **values,
            "run": run,
            "dialect": dialect,
            "settings": without_secrets(settings),
            "versions": versions,
            "flags": draft.flags,
            "sources": sources,
        }
    )


def _with_printed(record: Record, steps: RunSteps, times: ForeignTimes, parts: Sequence[Part]) -> Record:
    """With what the program printed of its own speed, where the record has no figure of its own."""
    sources = dict(record.sources)
    chosen = times.steady if times.steady.any() else steps.counts
    flops = steps["tflops"]
    known = np.flatnonzero(np.isfinite(flops) & chosen)
    if len(known):
        median = float(np.median(flops[known]))
        sources["tflops_printed"] = (
            f"median of the program's own over {len(known)} lines from {steps.place(int(known[0]))}"
        )
        record = replace(record, tflops_printed=median)
    else:
        printed = [
            fact for part in parts for fact in part.facts.get("tflops", ()) if isinstance(fact.value, int | float)
        ]
        if printed:
            sources["tflops_printed"] = f"{printed[0].place}, median of {len(printed)} figures of the program's own"
            record = replace(record, tflops_printed=float(np.median([fact.value for fact in printed])))
    if record.tokens_per_s is None:
        for key, each, what in (("tokens_per_s", 1, ""), ("tokens_per_s_gpu", record.gpus, " of one GPU x gpus")):
            rates = steps[key][chosen] if len(steps) else steps[key]
            rates = rates[np.isfinite(rates)]
            if len(rates) and each:
                sources["tokens_per_s"] = f"median of the program's own{what} over {len(rates)} lines"
                record = replace(record, tokens_per_s=float(np.median(rates)) * each)
                break
    return replace(record, sources=sources)


def _with_tokens_per_s(record: Record, tokens: int | None) -> Record:
    """With what a step's tokens give, of a log that names neither batch and seq nor the rate, as nanoGPT's."""
    if record.tokens_per_s is not None or not record.step_s or not tokens:
        return record
    sources = {**record.sources, "tokens_per_s": f"{tokens} tokens a step / step_s"}
    return replace(record, tokens_per_s=tokens / record.step_s, sources=sources)
