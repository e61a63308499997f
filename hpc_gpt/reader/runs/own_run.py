"""Reads our run folders as records: resolved.json has the settings, `attempts/` the results."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from hpc_gpt.core import output
from hpc_gpt.core.checkpoints.find_checkpoints import begun_note, checkpoint_note
from hpc_gpt.core.checkpoints.shared_checkpoints import foreign_start_note
from hpc_gpt.core.ends.began_again import RESUME_LINES, describe_begin_again
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.run_state import (
    ENDED_BEFORE,
    GONE,
    RunState,
    attempt_classes,
    cancel_cause,
    cause_of_attempt,
    mark_of,
    moved_note,
    read_run_state,
    retry_note,
    silent_s,
)
from hpc_gpt.core.ends.state import class_of
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.ds_config import DS_CONFIG
from hpc_gpt.core.format import counted
from hpc_gpt.core.processes.heartbeats import end_time_of, gpu_time, idle_s, read_heartbeats
from hpc_gpt.core.processes.slow_ranks import SLOW_RANK, slow_ranks
from hpc_gpt.core.runs.record import ON_CPU, RECORD_KEYS, Record
from hpc_gpt.core.runs.run_folder import PREDICTED, RESUMED_FROM, Attempt, CachedRun, RunFolder, job_ids
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.secrets import hide_secrets, without_secrets
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.settings.sized import Sized, model_table, program_tables, unknown_figures
from hpc_gpt.reader.lines.steps import RULE, StepTable, StepTimes, steps_that_count, time_steps
from hpc_gpt.reader.runs.attempts import AttemptRead, MetricsLines, epoch, iso, read_attempt
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.reader.runs.goodput import add_gpu_hours
from hpc_gpt.reader.runs.log_steps import log_interval
from hpc_gpt.reader.runs.program_run import lay_over, read_program_logs
from hpc_gpt.reader.runs.results import add_first_and_last_loss, add_mixture
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.reader.runs.sockets import OF_NETWORK, OVER_SOCKETS, says_sockets

DIALECT = "hpc-gpt"
# The kind of the flag on a program's checkpoints; `why` shows flags of this kind, too.
OF_CHECKPOINTS = "checkpoints"


def read_own(run: RunFolder, ends_only: bool = False) -> RunRead:
    """Reads one run, in any state, with its steps. `ends_only`: only its end, without figures of its steps, in a time
    that does not grow with them.

    Raises ConfigError or RunFolderError if resolved.json cannot be read. If another file is missing or half
    written, the figures that follow from it are null.
    """
    output.working_on = str(run.path)
    run = CachedRun(run.path)
    resolved = run.resolved()
    # Our trainer may write NaN as null; another program may print its loss now and then, so all its lines are read.
    has_each_loss = engine_named(resolved.engine.name).writes_metrics
    attempts = [read_attempt(attempt, ends_only and has_each_loss) for attempt in run.attempts()]
    metrics = MetricsLines.joined([read.metrics for read in attempts])
    steps = metrics.steps
    first_steps = {read.attempt.number: read.first_step for read in attempts}
    steps.counts = steps_that_count(steps["step"], steps.attempt, first_steps)
    steps.mark_nan(1 if has_each_loss else log_interval(steps), always=has_each_loss)
    # Our clock restarts after an evaluation or a save: no step time includes one.
    times = time_steps(steps, steps["step_s"], steps.is_skipped | steps.nan)
    if times is not None and (has_each_loss or np.isfinite(steps["step_s"]).all()):
        times = times.exact()  # else the moments at which lines of a program's log came give some
    eval_loss = steps["loss_eval"]
    evaluated = steps.counts & ~np.isnan(eval_loss)
    steps.eval_step, steps.eval_loss = steps["step"][evaluated], eval_loss[evaluated]
    draft = Draft()
    _add_settings(draft, run, resolved)
    _add_prediction(draft, run)
    _add_device(draft, None if resolved.asked_gpus is None else resolved.cluster.device, attempts)
    _add_measurements(draft, attempts)
    if ends_only:
        add_mixture(draft, steps)
    else:
        _add_steps(draft, steps.take(steps.counts), metrics.peaks, times)
    state = _add_attempts(draft, run, resolved, attempts, steps)
    for note in filter(None, (checkpoint_note(run), begun_note(run), foreign_start_note(run))):
        draft.flag(note, OF_CHECKPOINTS)
    sentences = (describe_begin_again(run, read.attempt) for read in attempts) if not has_each_loss else ()
    for sentence in filter(None, sentences):
        draft.flag(f"{sentence}; to resume, write in the script: {'; '.join(RESUME_LINES)}", OF_CHECKPOINTS)
    for read in attempts:
        for line in slow_ranks(read_heartbeats(read.attempt.heartbeats)).lines:
            draft.flag(f"attempt {read.attempt.number}: {line}" if len(attempts) > 1 else line, SLOW_RANK)
    last = attempts[-1].attempt.logs if attempts and resolved.cluster.is_slingshot else ()
    if any(log.is_file() and says_sockets(log) for log in last):
        draft.flag(OVER_SOCKETS, OF_NETWORK)
    versions = read_stored(run.path / "provenance.json").get("versions") or {}
    draft.set("versions", {"hpc-gpt": resolved.version, **versions}, "provenance.json" if versions else "resolved.json")
    if damaged := metrics.damaged:
        draft.flag(f"{counted(damaged, 'line')} of metrics.jsonl cannot be read and were left out")
    logged = None if has_each_loss or ends_only else read_program_logs(run, attempts)
    if logged is not None:
        lay_over(draft, logged, steps)
    record = Record(run=run.run_id, dialect=DIALECT, **draft.values, flags=draft.flags, sources=draft.sources)
    files = tuple(path for read in attempts for path in (read.attempt.metrics, *read.attempt.logs) if path.is_file())
    record = add_figures(record, is_foreign=logged is not None)
    return RunRead(record, steps, files=files, folder=run.path, is_settled=state.is_settled)


def figures_asked(resolved: Sized) -> dict[str, Any]:
    """A record's keys of the engine, layout, batch and model that a run requests; None for figures of another program
    that its experiment does not state."""
    model, layout, batch = resolved.model, resolved.layout, resolved.batch
    figures: dict[str, Any] = {
        "engine": resolved.engine.name,
        "gpus": resolved.asked_gpus,
        "nodes": resolved.nodes,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "dp": layout.dp,
        "ep": layout.ep if model.is_mixture else None,
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.micro_batches,
        "global_batch": batch.global_batch,
        "seq": model.seq,
        "hidden": model.hidden,
        "layers": model.layers,
        "heads": model.heads,
        "vocab": model.vocab,
        "params": model.params,
        "params_active": model.params_active if model.is_mixture else None,
        "recompute": resolved.engine.recompute,
        "dtype": resolved.train.dtype,
        "matmul": None if (matmul := resolved.train.matmul) == "none" else matmul,
    }
    return figures | dict.fromkeys(unknown_figures(resolved))


def _add_settings(draft: Draft, run: RunFolder, resolved: Resolved) -> None:
    tables = program_tables(resolved) or {name: asdict(getattr(resolved, name)) for name in ("engine", "train", "data")}
    settings = json.loads(json.dumps(tables))
    figures = figures_asked(resolved)
    if layout := {key: size for key, size in vars(resolved.layout).items() if size is not None and key not in figures}:
        settings["layout"] = layout
    if table := model_table(resolved):
        model = {key: value for key, value in table.items() if key not in figures}
        settings["model"] = {**model, "preset": resolved.preset}
    if parent := read_stored(run.path / RESUMED_FROM):
        settings["resumed_from"] = {key: parent[key] for key in ("run", "step", "branch") if key in parent}
    if resolved.data_from:
        settings["data_from"] = resolved.data_from
    if resolved.sweep is not None:
        varied = read_stored(run.path / "sweep.json").get("varied")
        settings["sweep"] = {"name": resolved.sweep, "row": resolved.row} | ({"varied": varied} if varied else {})
    facts = engine_named(resolved.engine.name)
    # Version 0.4 ran stage 0 in fp32.
    config = read_stored(run.path / DS_CONFIG).get("zero_optimization") or {}
    stage_that_runs = config.get("stage", facts.stage_that_runs(resolved.engine.zero_stage or 0))
    values = {
        **figures,
        "name": resolved.name,
        "zero_stage": stage_that_runs if facts.has_zero else None,
        "settings": without_secrets(settings),
        "config_hash": config_hash(resolved),
    }
    for key in RECORD_KEYS:
        if values.get(key) is not None:
            draft.set(key, values[key], "resolved.json")
    stage = values["zero_stage"]
    if stage is not None and stage != resolved.engine.zero_stage:
        draft.sources["zero_stage"] = "resolved.json, by ds_config's rule"
        draft.flag(f"engine.zero_stage is {resolved.engine.zero_stage}, which runs as ZeRO {stage}")
    if values["params"] is not None:
        draft.sources["params"] = "from the shape in resolved.json, the tied embedding once"
    if values["params_active"] is not None:
        draft.sources["params_active"] = "from the shape in resolved.json, without experts that a token is not sent to"
    draft.sources["config_hash"] = "sha256 of the settings in resolved.json that decide weights and speed"


def _add_prediction(draft: Draft, run: RunFolder) -> None:
    """Adds the plan's predictions at submission, if there are any: the memory of each stage and the step time."""
    tables = read_stored(run.path / PREDICTED)
    allocated = [stage.get("allocated") for stage in (tables.get("memory_gib") or {}).get("stages") or []]
    if allocated and all(allocated):
        draft.set("predicted_memory_gib", allocated, f"{PREDICTED}, allocated at the peak")
    if step_s := (tables.get("step") or {}).get("step_s"):
        by = "the profile's calibration" if tables.get("calibrated") else "data sheets"
        draft.set("predicted_step_s", step_s, f"{PREDICTED}, by {by}")


def _add_device(draft: Draft, requested: str | None, attempts: list[AttemptRead]) -> None:
    """Adds the device that the ranks found, null for a CPU; without an attempt the profile's."""
    # provenance.json describes the submitting machine: under Slurm it says nothing about the nodes.
    for read in reversed(attempts):
        device = read.trainer.get("device")
        if device is not None:
            name = None if device == "cpu" else device_named(device) or device
            if requested and requested not in (name, device):
                draft.flag(f"the profile says device {requested}, the run found {name or 'no GPU'}", "device")
            where = f"attempts/{read.attempt.number}/trainer.json"
            return draft.set("device", name, where if name else f"{where}: {ON_CPU}")
    if requested is not None:
        draft.set("device", requested, "resolved.json")
    return None


# Keys of measured.json that go into the record.
_RATES = ("matmul_tflops_before", "matmul_tflops_after")
_MEASURED = (
    "attention_used",
    "gpu_util_mean",
    "gpu_util_spread",
    "sm_clock_mhz",
    "power_w",
    "compile_s",
    "allocator_retries",
    *_RATES,
)


def _add_measurements(draft: Draft, attempts: list[AttemptRead]) -> None:
    """Adds the measurements of GPUs, compiler and kernels, each from the last attempt that has it."""
    last: dict[str, tuple[Any, str]] = {}  # of the last attempt that measured it
    for read in attempts:
        for kernel, reason in (read.trainer.get("attention_failed") or {}).items():
            draft.flag(f"attention: {kernel} failed in a trial, so the next kernel ran: {_text(reason)}", "attention")
        if why := read.trainer.get("experts_by_loop"):
            draft.flag(f"experts are multiplied one by one: {_text(why)}", "experts")
        for name, tables, keys in (
            ("trainer", read.trainer, ("attention_used",)),
            ("measured", read.measured, _MEASURED),
            ("start", read.measured, ("start_s", "start_parts")),
        ):
            where = f"attempts/{read.attempt.number}/{name}.json"
            for key in keys:
                if tables.get(key) is not None:
                    if key == "attention_used" and read.trainer.get(key) not in (None, tables[key]):
                        draft.flag(f"attention: torch chose {read.trainer[key]}, but {tables[key]} ran", "attention")
                    rate = f": {tables.get('matmul')}, the slowest rank's" if key in _RATES else ""
                    last[key] = (tables[key], where + rate)
    for key, (value, where) in last.items():
        draft.set(key, value, where)
    # The count continues over all attempts, like the positions of the streams.
    counts = (read.measured.get("skipped_shards") for read in attempts[::-1])
    if skipped := next((count for count in counts if count), 0):
        draft.flag(f"skipped {counted(skipped, 'damaged shard')} of the data")


def _add_steps(draft: Draft, steps: StepTable, peaks: dict[str, list[float]], times: StepTimes | None) -> None:
    """Adds the figures of the steps that count, and the peaks of memory."""
    if not len(steps):
        return
    _add_losses(draft, steps)
    nan, skipped = np.flatnonzero(steps.nan), steps.is_skipped
    if len(nan):
        where = steps.place(int(nan[0]))
        draft.flag(
            f"{counted(len(nan), 'step')} with a loss or a gradient that is not a number, the first at {where}", "nan"
        )
    if skipped.all():
        draft.flag("every step was skipped: step_s includes forward and backward only", "all_skipped")
    where = "metrics.jsonl of the attempts"
    saves = steps["save_s"]
    saves = saves[~np.isnan(saves)]
    draft.set("skipped_steps", int(steps["skipped"].sum(where=skipped)), where)
    draft.set("nan_steps", len(nan), where)
    draft.set("save_s", float(np.median(saves)) if len(saves) else None, where)
    for key, stages in peaks.items():
        draft.set(key, stages, f"{where}, the highest of each stage")
    step_tokens = (draft.get("global_batch") or 0) * (draft.get("seq") or 0)
    has_tokens = (tokens := steps["tokens"]) > 0
    total = int(tokens.sum(where=has_tokens)) + step_tokens * int((~has_tokens).sum())
    draft.set(
        "tokens_total",
        total if total or step_tokens else None,
        "tokens of the lines that count; a step trained again counts once",
    )
    rates = np.zeros(0) if step_tokens else steps["tokens_per_s"]
    if len(rates := rates[np.isfinite(rates)]):
        draft.set("tokens_per_s", float(np.median(rates)), f"{where}, median of the program's own figures")
    _add_times(draft, times, len(steps), where)


def _add_losses(draft: Draft, steps: StepTable) -> None:
    """Adds the first and the last loss, and the loss of the last evaluation."""
    add_first_and_last_loss(draft, steps)
    eval_loss = steps["loss_eval"]
    evaluated = np.flatnonzero(~np.isnan(eval_loss))
    if len(evaluated):
        last = evaluated[-1]
        draft.set("loss_eval", float(eval_loss[last]), steps.place(last))
        bits = {"bpb": float(steps["bpb"][last])} if np.isfinite(steps["bpb"][last]) else {}
        for key, figure in (bits | steps.eval_by.get(int(steps["step"][last]), {})).items():
            draft.set(key, figure, steps.place(last))
    add_mixture(draft, steps)


def _add_times(draft: Draft, times: StepTimes | None, steps: int, where: str) -> None:
    """Adds the step time and its counts. `steps`: the number of steps that count; `where`: their source."""
    if times is None:
        draft.values |= {"steps_used": 0, "warmup_steps": 0}
        return
    chosen = f"{times.used} of {steps} steps ({times.warmup} warm-up, {times.apart} set apart)"
    for name, value, source in (
        ("step_s", times.step_s, f"{where}, median of {chosen}; {RULE}"),
        ("step_s_p10", times.p10, "10th and 90th percentile of the same steps"),
        ("step_s_p90", times.p90, "10th and 90th percentile of the same steps"),
        ("step_s_mean", times.mean, "mean of the same steps"),
        ("steps_used", times.used, "steps in the median"),
        ("warmup_steps", times.warmup, "steps left out as warm-up"),
    ):
        draft.set(name, value, source)
    for flag in times.flags:
        draft.flag(flag)


def _add_attempts(
    draft: Draft, run: RunFolder, resolved: Resolved, attempts: list[AttemptRead], steps: StepTable
) -> RunState:
    run_state = read_run_state(run, resolved.train.log_every)
    state, end, waiting = run_state.state.ended, run_state.end, run_state.waits
    ids = job_ids(run)
    number = run_state.attempt.number if run_state.attempt else None
    last = next((read for read in attempts if read.attempt.number == number), None)
    submissions = run.submissions()
    cause = end.why if end and not waiting else None
    if state == "pending" and last and (note := retry_note(last.attempt, why=True)):
        cause = note
    if cancelled := cancel_cause(run, run_state):
        cause = cancelled
    if state in ("error", "user_error") and last and not last.ended:
        cause = moved_note(run_state) or GONE
    if state == "refused" and run_state.state.by == "submission":
        cause = submissions[-1].get("refused")
    where = _source_of_state(run_state)
    draft.set("ended", state, where)
    if state == "done" and last and (note := _text(last.ended.get("note"))):
        draft.flag(note)
    draft.set("cause", _since(steps, number, state, _text(cause)), where)
    tables = _attempt_tables(run, attempts, run_state, steps)
    add_gpu_hours(draft, resolved, attempts, steps, tables)
    draft.set("attempts", tables, "attempts/*/")
    folder = f"attempts/{number}"
    job_id = _text((last.started.get("job_id") if last else None) or None)
    draft.set(
        "job_id",
        (run_state.job_id if waiting else job_id) or (ids[-1] if ids else None),
        f"{folder}/attempt.json" if job_id and not waiting else "the submissions",
    )
    first = next((read for read in attempts if read.start_s), None)
    submitted = epoch(submissions[0].get("time")) if submissions else None
    begun_in = f"attempts/{first.attempt.number}/attempt.json" if first else "the submissions"
    draft.set("started", iso(first.start_s if first else submitted), begun_in)
    if last is None:
        ended_at, node_list = None, None
        ended_in = listed_in = "null: no attempt"
    else:
        over = state not in (*LIVE, "unknown")
        ended_at, node_list = iso(last.end_s) if over else None, last.started.get("node_list") or None
        ended_in = f"{folder}/ended.json" if last.ended else f"inferred: the last time in {folder}"
        listed_in = f"{folder}/attempt.json"
    draft.set("ended_at", ended_at, ended_in)
    draft.set("node_list", None if node_list is None else str(node_list), listed_in)
    return run_state


def _since(steps: StepTable, attempt: int | None, ended: str, cause: str | None) -> str | None:
    """The cause of an attempt's end; for NaN, with the step from which on all losses are NaN."""
    since = steps.nan_since(attempt) if attempt is not None and ended == "nan" else None
    nan_note = None if since is None else f"nan since step {steps['step'][since]:.0f}"
    return cause if nan_note is None or nan_note in (cause or "") else f"{nan_note}; {cause}" if cause else nan_note


def _attempt_tables(
    run: RunFolder, attempts: list[AttemptRead], run_state: RunState, steps: StepTable
) -> list[dict[str, Any]]:
    """The record's key `attempts`, one object per attempt."""
    classes = attempt_classes(run, [read.attempt for read in attempts], run_state)
    return [
        {
            "attempt": read.attempt.number,
            "job_id": _text(read.started.get("job_id")),
            "started": iso(read.start_s),
            "ended_at": iso(epoch(read.ended.get("time"))),
            "ended": ended,
            "cause": _since(
                steps,
                read.attempt.number,
                ended,
                _text(cause_of_attempt(run, read.attempt, ended) or _moved(read, run_state)),
            ),
            "first_step": int(read.steps["step"][0]) if len(read.steps) else None,
            "last_step": int(read.steps["step"][-1]) if len(read.steps) else None,
            "note": _text(read.ended.get("note")),
            "node": _text(read.ended.get("node")),
            "node_list": _text(read.started.get("node_list")),
            "tenth_step_s": _figure(read.measured.get("tenth_step_s")),
            "in_job": read.attempt.restarts_in_job or None,
            "pause_s": _pause_s(run, read.attempt),
        }
        for read, ended in zip(attempts, classes, strict=True)
    ]


def _pause_s(run: RunFolder, attempt: Attempt) -> float | None:
    """Seconds between the end of the attempt before and the start of this one, if its job has restarted it; else
    None."""
    before = run.before_in_job(attempt)[-1:] if attempt.restarts_in_job else []
    spans = [(one, gpu_time(one, 1, end_time_of(one))[1]) for one in before]
    return next((round(idle_s(one, span_s, attempt), 3) for one, span_s in spans), None)


def _moved(read: AttemptRead, run_state: RunState) -> str | None:
    """The cause of an attempt whose run folder was moved while it ran; None for others."""
    decides = (
        run_state.attempt is not None and read.attempt.number == run_state.attempt.number and run_state.facts.began
    )
    return moved_note(run_state) or None if decides and run_state.state.ended == "user_error" else None


def _source_of_state(run_state: RunState) -> str:
    """The file that decides the state of the run, with a reason: the source of `ended`."""
    state, line, attempt = run_state.state, run_state.line, run_state.attempt
    if state.by == "submission":
        return "submissions.jsonl"
    if state.by == "mark":
        return f"cancelled.{mark_of(line) or run_state.job_id}"
    if run_state.facts.queued:
        waits = state.ended == "pending"
        return f"submissions.jsonl: {'waits for its turn' if waits else ENDED_BEFORE}"
    if run_state.waits and state.by == "queue":
        return f"submissions.jsonl: job {run_state.job_id} has made no attempt yet"
    if state.by == "process" and state.ended == "running":
        return f"submissions.jsonl: process {line.get('pid')}"
    where = f"attempts/{attempt.number}" if attempt is not None else "no attempt yet"
    if state.by == "process":
        return f"{where} has no ended.json, and process {line.get('pid')} of submissions.jsonl is gone"
    if attempt is None:
        return where
    if state.by in ("next", "ended"):
        ended = f": {class_of(run_state.facts)}, continues" if state.ended == "pending" else ""
        return f"{where}/{state.by}.json{ended}"
    if state.ended == "running":
        return f"{where} was written to {silent_s(attempt):.0f} s ago"
    return f"{where} has no ended.json and was last written to {silent_s(attempt):.0f} s ago"


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return None if value is None else hide_secrets(str(value))
