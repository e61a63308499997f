"""Reads logs of other programs as runs: records and steps, each run with its own name."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.core.errors import fault_words
from hpc_gpt.core.format import counted_words
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.secrets import without_secrets
from hpc_gpt.reader.logs import Part, PeakMemory
from hpc_gpt.reader.logs.parts import BARS
from hpc_gpt.reader.logs.read_log import READER_FAILED, read_log
from hpc_gpt.reader.logs.source import STDIN
from hpc_gpt.reader.records import RunRead, add_figures
from hpc_gpt.reader.records.attempt_ends import add_ends
from hpc_gpt.reader.records.cross_checks import doubt_flops, doubt_rates, drop_growing_rates, flag_absent
from hpc_gpt.reader.records.discovery import WANDB_RUN, DiscoveredFiles, distinguishing_folders, is_general
from hpc_gpt.reader.records.draft import Draft, dialect_named, dialects_of, draft_of, stated
from hpc_gpt.reader.records.grouping import RunParts, group_logs
from hpc_gpt.reader.records.inferred import (
    add_batch,
    add_gpus,
    add_seq,
    drop_tokens,
    infer_fields,
    is_on,
    step_tokens,
)
from hpc_gpt.reader.records.log_steps import BARS_OF_OTHERS, LogSteps, run_steps, steps_to_show
from hpc_gpt.reader.records.outcome import add_counts, add_losses, add_rates, add_times
from hpc_gpt.reader.records.param_counts import add_params
from hpc_gpt.reader.records.sockets import OF_NETWORK, OVER_SOCKETS
from hpc_gpt.reader.steps import StepTable

_NO_STEPS = StepTable()
NOT_KNOWN = "has no line that a reader knows"
# Fields without a key in the record: they go into `settings`.
_SETTINGS = (
    *("ep", "vp", "kv_heads", "ffn", "vocab_unpadded", "steps_planned", "log_interval", "eval_interval"),
    *("save_interval", "gpus_per_node", "sequence_parallel", "flash_attention", "distributed_optimizer"),
    *("optimizer_offload", "param_offload", "partition_activations", "samples_per_epoch", "epochs", "params_printed"),
    *("experts", "experts_per_token", "swiglu", "untied_embeddings", "position_embedding", "global_batch_tokens"),
    *("head_dim", "active", "etp", "expert_ffn", "shared_ffn", "shared_gate", "dense_layers", "expert_groups"),
    *("groups_per_token", "router", "router_bias", "router_scale", "norm_topk", "q_lora", "kv_lora", "qk_rope"),
    *("v_head", "mtp_layers", "balance", "balance_coef", "z_loss_coef", "resumed_step", "epoch_s"),
)
_NO_ENGINE = "tqdm"  # many programs print its lines
_VERSIONS = {"torch_version": "torch", "framework_version": "framework", "deepspeed_version": "deepspeed"}


def read_foreign_runs(files: DiscoveredFiles, as_one: bool = False, records_only: bool = False) -> list[RunRead]:
    """The runs in the logs of `files`, which also counts the files that are not logs.

    `as_one`: the user says that the logs belong to one run; logs without steps are then joined to the one with steps.
    `records_only`: without steps and failures, which take most of the memory.
    """
    logs: list[tuple[Path, list[Part]]] = []
    left_out: dict[str, dict[str, int]] = {}
    silent: list[Path] = []
    for path in files.logs:
        log = read_log(path)
        if log.refused is not None:
            files.skip(log.refused, path)
        elif not any(part.dialects for part in log.parts):
            files.skip(NOT_KNOWN, path)
            silent.append(path)
        else:
            logs.append((path, log.parts))
            left_out |= {log.parts[0].file: log.left_out} if log.left_out else {}
    runs = _grouped(logs, silent, files)
    if as_one and runs and sum(run.has_steps for run in runs) <= 1:
        main, *others = sorted(runs, key=lambda run: not run.has_steps)
        for run in others:
            main.attempts[-1] += run.parts
            main.names += run.names
        runs = [main]
    runs = [run for run in runs if not _skip_bars_alone(run, files)]
    found_runs = []
    logs.clear()
    waiting = deque(zip(runs, _names(runs), strict=True))
    runs.clear()
    while waiting:  # the parts of a run are freed as soon as it is a record
        run, name = waiting.popleft()
        of_files: Counter[str] = Counter()
        for file in {part.file for part in run.parts}:
            of_files.update(left_out.get(file, {}))
        try:
            read = read_foreign(run, name, of_files)
            found_runs.append(replace(read, steps=_NO_STEPS, failures=(), causes=()) if records_only else read)
        except Exception as fault:
            for path in run.files:
                files.skip(f"{READER_FAILED}: {fault_words(fault)}", path)
    return found_runs


def _skip_bars_alone(run: RunParts, files: DiscoveredFiles) -> bool:
    """Skips the files of a run whose logs have only bars that do not count steps; returns whether it did."""
    alone = any(BARS_OF_OTHERS in part.left_out for part in run.parts) and all(
        part.dialects.keys() <= {BARS} for part in run.parts
    )
    for path in run.files if alone else ():
        files.skip(f"has only {BARS_OF_OTHERS}", path)
    return alone


def _grouped(logs: list[tuple[Path, list[Part]]], silent: list[Path], files: DiscoveredFiles) -> list[RunParts]:
    """The runs of the logs; each log is a run of its own if they cannot be grouped."""
    try:
        return group_logs(logs, silent)
    except Exception as fault:
        if len(logs) > 1:
            return [run for log in logs for run in _grouped([log], [], files)]
        for path, _ in logs:
            files.skip(f"{READER_FAILED}: {fault_words(fault)}", path)
        return []


# (folders, whether the log's name is added), from short to long: for a log with a general name, and for others.
_OF_GENERAL = ((1, False), (2, False), (1, True), (2, True), (3, False), (3, True), (5, True), (9, True))
_OF_NAMED = tuple((folders, True) for folders in (0, 1, 2, 3, 4, 5, 7, 9))


def _names(runs: Sequence[RunParts]) -> list[str]:
    """A name for each run: its log's, or its folder's if that is general; with more folders if two are equal."""
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
    """The name with so many folders (`_OF_NAMED`). The second run of a file is `name#2`."""
    log = run.names[0]
    if str(log.path) == STDIN:
        name = "stdin"
    else:
        folders = distinguishing_folders(log.path)
        count, with_stem = (_OF_GENERAL if is_general(log.stem) else _OF_NAMED)[length]
        taken = folders[-count:] if count else []
        name = "/".join([*taken, *([log.stem] if log.stem and (with_stem or not taken) else [])]) or log.path.name
    return name if run.number == 1 else f"{name}#{run.number}"


def read_foreign(run: RunParts, name: str, left_out: Mapping[str, int] | None = None) -> RunRead:
    """The run that parts of logs make up.

    `name`: unique among the runs of a report. `left_out`: reason -> how often something of its files was skipped.
    """
    parts = run.parts
    # The arguments of the last attempt, and those that only earlier attempts print.
    arguments = {key: text for part in reversed(parts) for key, (text, _) in part.arguments.items()}
    draft = draft_of(stated(parts))
    planned, epochs = draft.whole("steps_planned"), draft.whole("epochs")
    epoch_steps = planned / epochs if planned and epochs else None
    is_of_epoch = planned == draft.whole("epoch_steps")
    if planned and epochs and is_of_epoch:
        draft.set("steps_planned", planned * epochs, f"{draft.sources['steps_planned']} x {epochs} epochs")
    steps = run_steps(
        run.attempts, draft.whole("log_interval"), epoch_steps, draft.whole("global_batch"), draft.whole("seq")
    )
    if planned and is_of_epoch and not epochs and np.nanmax(steps["step"], initial=0.0) > planned:
        draft.values.pop("steps_planned")  # a bar's goal, of one epoch of an unknown number
    dialect = _dialect(steps, parts)
    present = [candidate.name for part in parts for candidate in dialects_of(part)]
    _add_engine(draft, dialect, parts)
    drop_tokens(draft)
    add_seq(draft, steps)
    add_batch(draft, steps)
    add_gpus(draft, parts)
    infer_fields(draft, present, arguments)
    _add_dtype(draft, dialect)
    add_params(draft, arguments, parts)
    drop_growing_rates(draft, steps)
    step_s = add_times(draft, steps, parts)
    add_losses(draft, steps, parts)
    add_counts(draft, steps, parts)
    add_rates(draft, steps, parts)
    drop_tokens(draft, "tokens_per_s", "tokens_per_s_gpu", "tokens_total")
    add_memory(draft, parts, arguments)
    causes = add_ends(draft, run, steps)
    _add_name(draft, run)
    _add_flags(draft, parts, dialect, left_out or {})
    record = add_figures(_record(draft, name, dialect, arguments, parts), foreign=True)
    record = doubt_flops(doubt_rates(record, steps))
    if len(steps) or any(part.progress for part in parts):
        record = flag_absent(record, draft)
    failures = [failure for cause in reversed(causes) for failure in cause.ordered]
    return RunRead(record, steps_to_show(steps, step_s, parts, step_tokens(draft)), failures, run.files, causes=causes)


def _dialect(steps: LogSteps, parts: Sequence[Part]) -> str | None:
    """The program of the log: that of its lines of steps, else of its totals, else one with an engine."""
    if steps.dialect is not None:
        return steps.dialect
    for part in parts:
        for fact in part.totals.values():
            return fact.dialect
    in_log = [candidate for part in parts for candidate in dialects_of(part)]
    # Else a training program, but not a launcher or scheduler.
    trained = [candidate.name for candidate in in_log if candidate.engine is not None]
    trains = [
        candidate.name
        for candidate in in_log
        if any(one.kind in ("step", "progress", "total") for one in candidate.patterns)
    ]
    return next(iter([*trained, *trains]), None)


def _add_engine(draft: Draft, dialect: str | None, parts: Sequence[Part]) -> None:
    present = {candidate.name: candidate for part in parts for candidate in dialects_of(part)}
    program = present.get(dialect or "")
    if program is not None and program.last_resort:
        return  # other programs in the log did not train
    if program is not None and program.engine is not None:
        draft.infer("engine", program.engine, f"the lines are {program.name}'s")
    else:
        other = next((candidate for candidate in present.values() if candidate.engine is not None), None)
        if other is not None:
            draft.infer("engine", other.engine, f"lines are {other.name}'s")
        elif program is not None and program.name != _NO_ENGINE:
            draft.infer("engine", program.name, "the program that printed these lines")


def _add_dtype(draft: Draft, dialect: str | None) -> None:
    """Adds the dtype that the program trains in by default."""
    program = dialect_named(dialect)
    if program is not None:
        draft.infer("dtype", program.dtype, f"{program.name} trains in {program.dtype} by default")


def _add_name(draft: Draft, run: RunParts) -> None:
    stem = run.names[0].stem
    job_id = draft.get("job_id") or run.names[0].job_id
    bare = stem.replace(str(job_id), "").strip("._- ") if job_id else stem
    folders = distinguishing_folders(run.names[0].path)
    if folders and (not bare or (stem == "output" and WANDB_RUN.fullmatch(folders[-1]))):
        bare = folders[-1]
    plain = "stdin" if str(run.names[0].path) == STDIN else bare or None
    draft.infer("name", plain, "the log's name")


def _add_flags(draft: Draft, parts: Sequence[Part], dialect: str | None, left_out: Mapping[str, int]) -> None:
    """Flags lines that the readers left out, and the dialect's caveats about the program's figures."""
    counts = Counter(left_out)
    for part in parts:
        counts.update(part.left_out)
    for reason, count in counts.items():
        draft.flag(f"left out: {counted_words(count, reason)}")
    in_log = {candidate.name: candidate for part in parts for candidate in dialects_of(part)}
    for name in dict.fromkeys([dialect, *(fact.dialect for part in parts for fact in part.totals.values())]):
        for flag in in_log[name].flags if name in in_log else ():
            draft.flag(f"{name}: {flag}", "program")
    if "over_sockets" in draft:
        draft.flag(OVER_SOCKETS, OF_NETWORK)


def _record(draft: Draft, run: str, dialect: str | None, arguments: Mapping[str, str], parts: Sequence[Part]) -> Record:
    keys = {entry.name for entry in fields(Record)}
    values = {name: value for name, value in draft.values.items() if name in keys and value is not None}
    if values.get("ep") == 1 and "experts" not in draft:
        del values["ep"], draft.sources["ep"]  # a dense model's dump of arguments has it, too
    settings: dict[str, Any] = {}
    if arguments:
        settings["arguments"] = dict(sorted(arguments.items()))
    timers: dict[str, list[float]] = {}
    for part in parts:
        for timer, (total, count) in part.timers_s.items():
            total_and_count = timers.setdefault(timer, [0.0, 0.0])
            total_and_count[0] += total
            total_and_count[1] += count
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


def add_memory(draft: Draft, parts: Iterable[Part], arguments: Mapping[str, str]) -> None:
    """Adds both lists of peak memory: one figure per stage if all stages print it, else the highest of all.

    Rank order: tp fastest, then cp and dp, then pp, as in Megatron and DeepSpeed; with Megatron's
    `--use-tp-pp-dp-mapping` pp before dp.
    """
    parts = list(parts)
    seen = [(rank, memory) for part in parts for rank, memory in part.memory.items()]
    # A figure before the first step is not a peak of training.
    seen = [(rank, memory) for rank, memory in seen if not memory.at_start]
    if not seen:
        return
    stages = _stage_of(draft, arguments)
    few: list[int] = []
    pp = draft.whole("pp") or 1
    for name, key in (("memory_allocated_gib", "allocated_gib"), ("memory_reserved_gib", "reserved_gib")):
        figures = [(rank, value, memory) for rank, memory in seen if (value := _figure(memory, key)) is not None]
        if not figures:
            continue
        _, highest, memory = max(figures, key=lambda figure: figure[1])
        peaks: dict[int, float] = {}
        for rank, value, _ in figures:
            if rank is not None and stages is not None and (stage := stages(rank)) is not None:
                peaks[stage] = max(peaks.get(stage, 0.0), value)
        if len(peaks) == pp > 1:
            listed = [peaks[stage] for stage in range(pp)]
            ranks = len({rank for rank, _, _ in figures})
            draft.set(
                name, listed, f"the highest of each stage over {ranks} ranks, the highest of all at {memory.place}"
            )
        else:
            draft.set(name, [highest], f"{memory.place}, the highest in the log")
            few.append(len(peaks))
    if few and pp > 1:
        where = f"for {max(few)} of {pp} stages" if max(few) else "without the rank"
        draft.flag(f"memory is printed {where}: one figure, the highest")


def _figure(memory: PeakMemory, key: str) -> float | None:
    value: float | None = getattr(memory, key)
    return value if value is not None and 0 < value < 1e6 else None


def _stage_of(draft: Draft, arguments: Mapping[str, str]) -> Callable[[int], int | None] | None:
    """A function from rank to pipeline stage; None if the layout is not known."""
    tp, pp, dp = (draft.whole(name) for name in ("tp", "pp", "dp"))
    if not (tp and pp and dp):
        return None
    ways, per_stage = tp * pp * dp * (draft.whole("cp") or 1), tp * dp * (draft.whole("cp") or 1)
    pipes_first = is_on(arguments, "use_tp_pp_dp_mapping")

    def stage(rank: int) -> int | None:
        if not 0 <= rank < ways:
            return None
        return rank // (ways // pp // dp) % pp if pipes_first else rank // per_stage

    return stage
