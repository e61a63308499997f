"""Reads logs of other programs as runs: records and steps, each run with its own name."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import fault_words
from hpc_gpt.core.format import counted_words
from hpc_gpt.core.runs.record import ABSENT, Flag, Record
from hpc_gpt.core.secrets import without_secrets
from hpc_gpt.reader.lines.dialects import dialects_by_name
from hpc_gpt.reader.lines.growing_parts import BARS
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.read_log import READER_FAILED, read_log
from hpc_gpt.reader.lines.source import STDIN
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.programs.generic import DIFFUSION
from hpc_gpt.reader.runs.attempt_ends import add_ends
from hpc_gpt.reader.runs.discovery import WANDB_RUN, DiscoveredFiles, distinguishing_folders, is_general
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.facts import Facts, add_measured, dialects_of, facts_of
from hpc_gpt.reader.runs.figures import Figures, figures_of, with_figures
from hpc_gpt.reader.runs.grouping import RunParts, group_logs
from hpc_gpt.reader.runs.log_steps import BARS_OF_OTHERS, LogSteps, run_steps, steps_to_show
from hpc_gpt.reader.runs.params import add_params, add_vocab
from hpc_gpt.reader.runs.results import PRINTED, add_counts, add_losses, add_memory, add_rates
from hpc_gpt.reader.runs.rules import (
    Known,
    check_flops,
    check_rates,
    flag_contradictions,
    outdated,
    solve,
    step_tokens,
)
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.reader.runs.sockets import OF_NETWORK, OVER_SOCKETS
from hpc_gpt.reader.runs.times import add_times

_NO_STEPS = StepTable()
NOT_KNOWN = "has no line that a reader knows"
# Fields that are not written as they are stated.
_APART = ("engine", "steps_planned", "job_id", "params", "params_active", "params_of_rank", "save_s", *PRINTED)
_COUNT_TEXT = ("tokens_per_s", "tokens_per_s_gpu", "consumed_tokens")
_KEYS = tuple(entry.name for entry in fields(Record))
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
    if as_one:
        runs = join_as_one(runs)
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


def join_as_one(runs: list[RunParts]) -> list[RunParts]:
    """Joins logs that belong to one run, if at most one of them has steps."""
    if sum(run.has_steps for run in runs) > 1 or not runs:
        return runs
    main, *others = sorted(runs, key=lambda run: not run.has_steps)
    for run in others:
        main.attempts[-1] += run.parts
        main.names += run.names
    return [main]


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
    facts = facts_of(parts)
    # The arguments of the last attempt, and those that only earlier attempts print.
    arguments = {key: text for part in reversed(parts) for key, (text, _) in part.arguments.items()}
    steps = _steps_of(run, facts)
    add_measured(facts, steps)
    dialect = _dialect(steps, parts)
    draft = facts.draft(*_APART, *outdated(facts))
    known = Known(draft, arguments, facts)
    _add_planned(draft, facts, steps)
    _add_engine(draft, facts, dialect, parts)
    solve(known)
    flag_contradictions(draft)
    if (program := dialects_by_name().get(dialect or "")) is not None:
        draft.infer("dtype", program.dtype, f"{program.name} trains in {program.dtype} by default")
    add_vocab(draft, arguments)
    add_params(known)
    step_s = add_times(known, steps, parts)
    add_losses(draft, steps, parts)
    add_counts(known, steps, parts)
    add_rates(known, steps)
    add_memory(draft, parts, arguments)
    causes = add_ends(known, run, steps)
    _add_name(draft, run)
    _add_flags(draft, parts, dialect, left_out or {})
    record = _record(draft, name, dialect, arguments, parts)
    figures, flags = figures_of(record, foreign=True)
    flags += [*check_rates(record, figures, steps), *check_flops(record, figures)]
    if len(steps) or any(part.progress for part in parts):
        flags += _absent(record, figures, [*record.flags, *flags], draft)
    record = with_figures(record, figures, flags)
    failures = [failure for cause in reversed(causes) for failure in cause.ordered]
    return RunRead(record, steps_to_show(steps, step_s, parts, step_tokens(draft)), failures, run.files, causes=causes)


def _steps_of(run: RunParts, facts: Facts) -> LogSteps:
    planned, epochs = facts.whole("steps_planned"), facts.whole("epochs")
    epoch_steps = planned / epochs if planned and epochs else None
    interval, batch, seq = (facts.whole(name) for name in ("log_interval", "global_batch", "seq"))
    steps = run_steps(run.attempts, interval, epoch_steps, batch, seq)
    if DIFFUSION in facts.of:
        steps.columns = {name: column for name, column in steps.columns.items() if name not in _COUNT_TEXT}
    return steps


def _add_planned(draft: Draft, facts: Facts, steps: LogSteps) -> None:
    """Adds the number of planned steps. One that is that of an epoch is multiplied by the epochs; it is not the run's
    if their number is unknown and the steps go on."""
    planned, epochs, stated = facts.whole("steps_planned"), facts.whole("epochs"), facts.best("steps_planned")
    if stated is None:
        return
    if not planned or planned != facts.whole("epoch_steps"):
        draft.set("steps_planned", stated.value, stated.where)
    elif epochs:
        draft.set("steps_planned", planned * epochs, f"{stated.where} x {epochs} epochs")
    elif not (steps["step"] > planned).any():
        draft.set("steps_planned", planned, stated.where)


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


def _add_engine(draft: Draft, facts: Facts, dialect: str | None, parts: Sequence[Part]) -> None:
    """Adds the engine: what the log states, else the program's; and with DeepSpeed, if that runs it."""
    present = {candidate.name: candidate for part in parts for candidate in dialects_of(part)}
    program, stated = present.get(dialect or ""), facts.best("engine")
    engine, source = (stated.value, stated.where) if stated is not None else (None, "")
    # If a program that nobody knows has the lines of steps, other programs in the log did not train.
    if engine is None and not (program is not None and program.last_resort):
        trains = [each for each in (program, *present.values()) if each is not None and each.engine is not None]
        if trains:
            lines = "the lines are" if trains[0] is program else "lines are"
            engine, source = trains[0].engine, f"inferred: {lines} {trains[0].name}'s"
        elif program is not None and program.name != BARS:  # many programs print bars
            engine, source = program.name, "inferred: the program that printed these lines"
    deepspeed = [each for each in present if each.startswith("deepspeed")]
    stage = draft.get("zero_stage") or 0
    why = f"{deepspeed[0]}'s lines" if deepspeed else f"ZeRO stage {stage}"
    pipes = ((draft.whole("pp") or 1) > 1 or "deepspeed_pipe" in deepspeed) and stage < 2
    if engine == "hf" and (deepspeed or stage >= 1):
        draft.set("engine", "hf-deepspeed", f"inferred: a Trainer's log with {why}")
    elif engine in engines() and deepspeed and (other := engines()[engine].engine_with_deepspeed(pipes)):
        pipeline = "a pipeline" if pipes else "no pipeline"
        draft.set("engine", other, f"inferred: Megatron's log with {why}, {pipeline}")
    elif engine is not None:
        draft.set("engine", engine, source)


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
    """The record of a draft, without the figures that follow from it."""
    values = {name: draft.values[name] for name in _KEYS if name in draft}
    sources = {name: draft.sources[name] for name in _KEYS if name in draft.sources}
    if values.get("ep") == 1 and "experts" not in draft:
        del values["ep"], sources["ep"]  # a dense model's dump of arguments has it, too
    settings: dict[str, Any] = {"arguments": dict(sorted(arguments.items()))} if arguments else {}
    timers: dict[str, list[float]] = {}
    for part in parts:
        for timer, (total, count) in part.timers_s.items():
            total_and_count = timers.setdefault(timer, [0.0, 0.0])
            total_and_count[0] += total
            total_and_count[1] += count
    if timers:
        settings["timers_ms"] = {timer: 1e3 * total / count for timer, (total, count) in timers.items() if count}
    settings |= {name: draft.values[name] for name in _SETTINGS if name in draft and name not in draft.solved}
    versions = {short: str(draft.get(name)) for name, short in _VERSIONS.items() if name in draft}
    return Record(
        **values,
        run=run,
        dialect=dialect,
        settings=without_secrets(settings),
        versions=versions,
        flags=draft.flags,
        sources=sources,
    )


# {figure: the figures that give it if the program does not print it}
_FOLLOWS_FROM: Mapping[str, tuple[str, ...]] = {
    "step_s": (),
    "global_batch": ("micro_batch", "micro_batches", "dp"),
    "seq": (),
    "tokens_per_s": ("global_batch", "seq", "step_s"),
    "params": ("hidden", "layers", "heads", "vocab"),
    "tflops_hardware": ("step_s", "global_batch", "seq", "gpus", "layers", "hidden", "vocab", "recompute"),
}
_NOT_PRINTED = dict.fromkeys(_FOLLOWS_FROM, "no line states it") | {"step_s": "no line gives the time of steps alone"}
_INPUTS = {*_FOLLOWS_FROM}.union(*_FOLLOWS_FROM.values())
_BY_KIND = ("tokens_per_s", "tflops_hardware")  # figures that another statement can contradict


def _absent(record: Record, figures: Figures, flags: Sequence[str], draft: Draft) -> list[Flag]:
    """A flag for each main figure that is null: the unknown inputs, or the statement that contradicts it."""
    known = {name: getattr(record, name) for name in _INPUTS} | {name: value for name, (value, _) in figures.items()}
    sources = {**record.sources, **{name: source for name, (_, source) in figures.items()}}
    of_text = () if DIFFUSION in draft else ("seq", "tokens_per_s", "params", "tflops_hardware")
    found = []
    for name in (
        each for each in _FOLLOWS_FROM if known[each] is None and each in ("step_s", "global_batch", *of_text)
    ):
        of_tokens = name == "global_batch" and draft.whole("global_batch_tokens")
        missing = [each for each in (("seq",) if of_tokens else _FOLLOWS_FROM[name]) if known[each] is None]
        reasons = [f"{', '.join(missing)} not known"] if missing else []
        source = sources.get("tflops_hardware" if name == "params" and not missing else name, "")
        if source.startswith("null: "):
            reasons.append(source.removeprefix("null: "))
        if not reasons and name in _BY_KIND:
            reasons += [flag for flag in flags if getattr(flag, "kind", "") in ("disagrees", "absurd")][-1:]
        found.append(Flag(f"{name} is null: {'; '.join(reasons) or _NOT_PRINTED[name]}", ABSENT))
    return found
