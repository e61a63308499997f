"""Runs that other programs logged: from the logs that were found to records and steps, each under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.readers.logs.part import Part
from hpc_gpt.readers.logs.read_log import LogRead, read_log
from hpc_gpt.readers.logs.source import STDIN
from hpc_gpt.readers.runs.derived import add_gpus, add_memory, add_stages, derive, step_tokens
from hpc_gpt.readers.runs.discovery import Discovered, is_general, telling_folders
from hpc_gpt.readers.runs.draft import Draft, dialects_of, draft_of, stated
from hpc_gpt.readers.runs.grouping import RunParts, group_logs
from hpc_gpt.readers.runs.log_steps import LogSteps, run_steps, steps_to_show
from hpc_gpt.readers.runs.outcome import add_counts, add_ends, add_losses, add_times
from hpc_gpt.readers.runs.run_read import RunRead, add_figures
from hpc_gpt.readers.runs.slurm_script import Script, read_script, script_beside
from hpc_gpt.readers.runs.true_params import add_params
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import without_secrets

MOST_ROWS = 1 << 19  # lines of steps that are held of all logs: some 50 MB, and as much again as steps of runs
NOT_KNOWN = "holds no line that a reader knows"
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


def read_foreign_runs(found: Discovered, read: Callable[[Path], LogRead] = read_log) -> list[RunRead]:
    """The runs in the logs that were found. What is no log after all is counted in `found`."""
    logs: list[tuple[Path, list[Part]]] = []
    left_out: dict[str, dict[str, int]] = {}
    silent: list[Path] = []
    held = 0
    for path in found.logs:
        log = read(path)
        if log.refused is not None:
            found.skip(log.refused, path)
        elif not any(part.dialects for part in log.parts):
            found.skip(NOT_KNOWN, path)
            silent.append(path)
        else:
            logs.append((path, log.parts))
            held += _rows(log.parts)
            if held > MOST_ROWS:
                held = _bounded(logs)
            left_out[log.parts[0].file] = log.left_out
    runs = group_logs(logs, silent)
    scripts = [script for path in found.scripts if runs and (script := read_script(path)) is not None]
    names = _names(runs)
    found_runs = []
    for run, name in zip(runs, names, strict=True):
        of_files: Counter[str] = Counter()
        for file in {part.file for part in run.parts}:
            of_files.update(left_out.get(file, {}))
        found_runs.append(read_foreign(run, name, _script(run, scripts), of_files))
    return found_runs


def _rows(parts: Sequence[Part]) -> int:
    return sum(len(steps) for part in parts for steps in part.steps.values())


def _bounded(logs: Sequence[tuple[Path, list[Part]]]) -> int:
    """Halve the longest stretches until half of MOST_ROWS are left; returns how many lines of steps are left.

    Their stride says so, and with it a flag of the run.
    """
    parts = [part for _, found in logs for part in found]
    longest = max((len(steps) for part in parts for steps in part.steps.values()), default=0)
    while _rows(parts) > MOST_ROWS // 2 and longest > 2:
        longest //= 2
        for part in parts:
            for name, steps in part.steps.items():
                if len(steps) > longest:
                    part.steps[name] = steps.halved()
    return _rows(parts)


def _script(run: RunParts, scripts: Sequence[Script]) -> Script | None:
    for name in run.names:
        if (script := script_beside(name.path, name.stem, scripts)) is not None:
            return script
    return None


# (folders, whether the log's name is added), from short to long, of a log whose own name says nothing, and of others.
_OF_GENERAL = ((1, False), (2, False), (1, True), (2, True), (3, False), (3, True), (5, True), (9, True))
_OF_NAMED = tuple((folders, True) for folders in (0, 1, 2, 3, 4, 5, 7, 9))


def _names(runs: Sequence[RunParts]) -> list[str]:
    """A name for each run: the log's, or its folder's if that says nothing; with more folders if two are the same."""
    names = [_name(run, 0) for run in runs]
    for length in range(1, len(_OF_NAMED)):
        twice = {name for name, count in Counter(names).items() if count > 1}
        if not twice:
            return names
        names = [_name(run, length) if name in twice else name for run, name in zip(runs, names, strict=True)]
    met: Counter[str] = Counter()
    for index, name in enumerate(names):
        met[name] += 1
        names[index] = f"{name} ({met[name]})" if met[name] > 1 else name
    return names


def _name(run: RunParts, length: int) -> str:
    """The second run of a file is `name#2`."""
    log = run.names[0]
    if str(log.path) == STDIN:
        name = "stdin"
    else:
        folders = telling_folders(log.path)
        count, with_stem = (_OF_GENERAL if is_general(log.stem) else _OF_NAMED)[length]
        taken = folders[-count:] if count else []
        name = "/".join([*taken, *([log.stem] if log.stem and (with_stem or not taken) else [])]) or log.path.name
    return name if run.number == 1 else f"{name}#{run.number}"


def read_foreign(
    run: RunParts, name: str, script: Script | None = None, left_out: Mapping[str, int] | None = None
) -> RunRead:
    """The run that parts of logs make up.

    `name`: unique among the runs of a report. `left_out`: what was skipped of its files, in words -> how often.
    """
    parts = run.parts
    # Of the last attempt that has a dump, with what only earlier ones have.
    arguments = {key: text for part in reversed(parts) for key, (text, _) in part.arguments.items()}
    draft = draft_of(stated(parts), script.facts() if script else {})
    planned, epochs = draft.whole("steps_planned"), draft.whole("epochs")
    epoch_steps = planned / epochs if planned and epochs else None
    steps = run_steps(run.attempts, draft.whole("log_interval"), epoch_steps, draft.whole("global_batch"))
    dialect = _dialect(steps, parts)
    present = [each.name for part in parts for each in dialects_of(part)]
    _add_engine(draft, dialect, parts)
    add_gpus(draft, steps)
    add_stages(draft, parts)
    derive(draft, present, arguments)
    add_params(draft, arguments, parts)
    step_s = add_times(draft, steps, parts)
    add_losses(draft, steps, parts)
    add_counts(draft, steps, parts)
    add_memory(draft, parts, arguments)
    causes = add_ends(draft, run, steps)
    _add_name(draft, run)
    _add_flags(draft, parts, dialect, left_out or {})
    record = add_figures(_record(draft, name, dialect, arguments, parts))
    record = _with_printed(record, steps, parts, step_tokens(draft))
    files = [*run.files, *([script.path] if script else [])]
    failures = [failure for cause in reversed(causes) for failure in cause.ordered]
    return RunRead(record, steps_to_show(steps, step_s, parts, step_tokens(draft)), failures, files, causes=causes)


def _dialect(steps: LogSteps, parts: Sequence[Part]) -> str | None:
    """The program whose log it is: that of the lines of steps, else of the totals, else the one with an engine."""
    if steps.dialect is not None:
        return steps.dialect
    for part in parts:
        for fact in part.totals.values():
            return fact.dialect
    found = [each for part in parts for each in dialects_of(part)]
    # Else a training program's, and not that of a launcher or a scheduler.
    trained = [each.name for each in found if each.engine is not None]
    trains = [each.name for each in found if any(one.kind in ("step", "progress", "total") for one in each.patterns)]
    return next(iter([*trained, *trains]), None)


def _add_engine(draft: Draft, dialect: str | None, parts: Sequence[Part]) -> None:
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


def _add_name(draft: Draft, run: RunParts) -> None:
    stem = run.names[0].stem
    job_id = draft.get("job_id") or run.names[0].job_id
    bare = stem.replace(str(job_id), "").strip("._- ") if job_id else stem
    folders = telling_folders(run.names[0].path)
    plain = "stdin" if str(run.names[0].path) == STDIN else bare or (folders[-1] if folders else None)
    draft.infer("name", plain, "the log's name")


def _add_flags(draft: Draft, parts: Sequence[Part], dialect: str | None, left_out: Mapping[str, int]) -> None:
    """What the readers left out, and what must be known about the program's figures."""
    counts = Counter(left_out)
    for part in parts:
        counts.update(part.left_out)
    for words, count in counts.items():
        draft.flag(f"left out: {count:,} {words}")
    found = {each.name: each for part in parts for each in dialects_of(part)}
    for name in dict.fromkeys([dialect, *(fact.dialect for part in parts for fact in part.totals.values())]):
        for flag in found[name].flags if name in found else ():
            draft.flag(f"{name}: {flag}")
    _flag_samples(draft)


def _flag_samples(draft: Draft) -> None:
    """Flag a program that counts the samples of its data, and not those it ran: the last batch is filled up."""
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


def _with_printed(record: Record, steps: LogSteps, parts: Sequence[Part], tokens: int | None) -> Record:
    """With the speed that the program printed, and that of a step's `tokens`, if the record has no figure of its own.

    A log as nanoGPT's has neither batch, seq nor rate.
    """
    found: dict[str, tuple[float, str]] = {}
    chosen = steps.steady if steps.steady.any() else steps.counts
    known = np.flatnonzero(np.isfinite(steps["tflops"]) & chosen)
    facts = [fact for part in parts for fact in part.facts.get("tflops", ()) if isinstance(fact.value, int | float)]
    if len(known):
        source = f"median of the program's own over {len(known)} lines from {steps.place(int(known[0]))}"
        found["tflops_printed"] = (float(np.median(steps["tflops"][known])), source)
    elif facts:
        source = f"{facts[0].place}, median of {len(facts)} figures of the program's own"
        found["tflops_printed"] = (float(np.median([fact.value for fact in facts])), source)
    if record.tokens_per_s is None:
        for key, each, what in (("tokens_per_s", 1, ""), ("tokens_per_s_gpu", record.gpus, " of one GPU x gpus")):
            rates = steps[key][chosen & np.isfinite(steps[key])]
            if len(rates) and each:
                source = f"median of the program's own{what} over {len(rates)} lines"
                found["tokens_per_s"] = (float(np.median(rates)) * each, source)
                break
        else:
            if record.step_s and tokens:
                found["tokens_per_s"] = (tokens / record.step_s, f"{tokens} tokens a step / step_s")
    sources = {**record.sources, **{name: source for name, (_, source) in found.items()}}
    return replace(record, **{name: value for name, (value, _) in found.items()}, sources=sources)  # type: ignore[arg-type]
