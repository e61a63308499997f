"""Our own run folders as records: resolved.json says what ran, `attempts/` what came of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from hpc_gpt.readers.runs.attempts import AttemptRead, attempt_tables, epoch, iso, read_attempt, source_of_state
from hpc_gpt.readers.runs.metrics import Metrics
from hpc_gpt.readers.runs.run_read import RunRead, add_figures
from hpc_gpt.readers.steps import RULE, StepTable, StepTimes, steps_that_count, time_steps
from hpc_gpt.runs.lineage import RESUMED_FROM
from hpc_gpt.runs.record import Record
from hpc_gpt.runs.run_folder import PREDICTED, RunFolder, job_ids
from hpc_gpt.runs.standing import read_standing, words_between
from hpc_gpt.secrets import hide_secrets, without_secrets
from hpc_gpt.settings.cluster import device_named
from hpc_gpt.settings.ds_config import zero_stage
from hpc_gpt.settings.engines import has_zero
from hpc_gpt.settings.resolve import Resolved, config_hash
from hpc_gpt.small_files import read_json

DIALECT = "hpc-gpt"


def read_run(run: RunFolder) -> Record:
    """The record of one run; raises as `read_own`."""
    return read_own(run).record


def read_own(run: RunFolder) -> RunRead:
    """One run, whatever state it is in, with its steps.

    Raises ConfigError or RunFolderError if resolved.json cannot be read; anything else that is missing or half written
    is left null.
    """
    resolved = run.resolved()
    attempts = [read_attempt(attempt) for attempt in run.attempts()]
    metrics = Metrics.joined([read.metrics for read in attempts])
    steps = metrics.steps
    first_steps = {read.attempt.number: read.first_step for read in attempts}
    steps.counts = steps_that_count(steps["step"], steps.attempt, first_steps)
    # Our clock starts anew after an evaluation or a save, so that no step's time holds one.
    times = time_steps(steps, steps["step_s"], steps.is_skipped | ~np.isfinite(steps["loss"]))
    evaluated = steps.counts & ~np.isnan(steps["loss_eval"])
    steps.eval_step, steps.eval_loss = steps["step"][evaluated], steps["loss_eval"][evaluated]
    provenance = read_json(run.path / "provenance.json")
    record = _from_settings(run, resolved)
    record = _with_prediction(record, run)
    record = _with_device(record, attempts)
    record = _with_measurements(record, attempts)
    record = _with_steps(record, steps.take(steps.counts), metrics.peaks, times)
    record = _with_attempts(record, run, resolved, attempts)
    versions = provenance.get("versions")
    record = replace(
        record,
        versions={"hpc-gpt": resolved.version, **(versions if isinstance(versions, dict) else {})},
        sources={**record.sources, "versions": "provenance.json" if versions else "resolved.json"},
    )
    if damaged := metrics.damaged:
        flag = f"{damaged} line{'s' if damaged > 1 else ''} of metrics.jsonl cannot be read and were left out"
        record = replace(record, flags=[*record.flags, flag])
    files = tuple(path for read in attempts for path in (read.attempt.metrics, read.attempt.log) if path.is_file())
    return RunRead(add_figures(record), steps, files=files, folder=run.path)


def figures_asked(resolved: Resolved) -> dict[str, Any]:
    """What a record says of the engine, the layout, the batch and the model that a run asks for, however it ends."""
    model, layout, batch = resolved.model, resolved.layout, resolved.batch
    return {
        "engine": resolved.engine.name,
        "gpus": resolved.gpus,
        "nodes": resolved.nodes,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.micro_batches,
        "global_batch": batch.global_batch,
        "seq": model.seq,
        "hidden": model.hidden,
        "layers": model.layers,
        "heads": model.heads,
        "vocab": model.vocab,
        "params": model.params,
        "recompute": resolved.engine.recompute,
        "dtype": resolved.train.dtype,
    }


def _from_settings(run: RunFolder, resolved: Resolved) -> Record:
    model, train = resolved.model, resolved.train
    settings = {name: asdict(getattr(resolved, name)) for name in ("engine", "train", "data")}
    settings["model"] = {"tied": model.tied, "vocab_multiple": model.vocab_multiple, "preset": resolved.preset}
    if parent := read_json(run.path / RESUMED_FROM):
        settings["resumed_from"] = {"run": parent.get("run"), "step": parent.get("step")}
    if resolved.sweep is not None:
        settings["sweep"] = {"name": resolved.sweep, "row": resolved.row}
    record = Record(
        run=run.run_id,
        name=resolved.name,
        dialect=DIALECT,
        device=resolved.cluster.device,
        zero_stage=zero_stage(resolved) if has_zero(resolved.engine.name) else None,
        **figures_asked(resolved),
        settings=without_secrets(settings),
        config_hash=config_hash(resolved),
    )
    given = [key for key, value in record.to_tables().items() if value is not None and value not in ([], {})]
    sources = {key: "resolved.json" for key in given if key not in ("schema", "run", "dialect")}
    if record.zero_stage is not None and record.zero_stage != resolved.engine.zero_stage:
        sources["zero_stage"] = "resolved.json, by ds_config's rule"
        flag = f"engine.zero_stage is {resolved.engine.zero_stage}, but {train.dtype} runs ZeRO {record.zero_stage}"
        record = replace(record, flags=[flag])
    sources["params"] = "from the shape in resolved.json, the tied embedding once"
    sources["config_hash"] = "sha256 of the settings in resolved.json that decide weights and speed"
    return replace(record, sources=sources)


def _with_prediction(record: Record, run: RunFolder) -> Record:
    """With what the plan predicted at submission: the memory of each stage and the step time; null if there was no
    plan, or the file is damaged."""
    tables = read_json(run.path / PREDICTED)
    sources = dict(record.sources)
    stages = _table(tables.get("memory_gib")).get("stages")
    allocated = [_size(_table(stage).get("allocated")) for stage in (stages if isinstance(stages, list) else [])]
    memory = [figure for figure in allocated if figure is not None]
    step_s = _size(_table(tables.get("step")).get("step_s"))
    if memory and len(memory) == len(allocated):
        record = replace(record, predicted_memory_gib=memory)
        sources["predicted_memory_gib"] = f"{PREDICTED}, allocated at the peak"
    if step_s is not None:
        by = "the profile's calibration" if tables.get("calibrated") is True else "data sheets"
        record = replace(record, predicted_step_s=step_s)
        sources["predicted_step_s"] = f"{PREDICTED}, by {by}"
    return replace(record, sources=sources)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(value: Any) -> float | None:
    """A figure above 0, as JSON has it."""
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
    return float(value) if sound else None


def _with_device(record: Record, attempts: list[AttemptRead]) -> Record:
    """The device that the ranks found, null for a CPU; the profile's if no attempt says one."""
    # provenance.json is of the machine that submits, so under Slurm it says nothing about the nodes.
    for read in reversed(attempts):
        where = f"attempts/{read.attempt.number}/trainer.json"
        found = read.trainer.get("device")
        if not isinstance(found, str):
            continue
        name = None if found == "cpu" else device_named(found) or found
        flags = list(record.flags)
        if record.device and name != record.device and found != record.device:
            flags.append(f"the profile says device {record.device}, the run found {name or 'no GPU'}")
        where += "" if name else ": the ranks ran on CPU"
        return replace(record, device=name, flags=flags, sources={**record.sources, "device": where})
    return record


# Keys of an attempt's measured.json that a record takes over.
_RATES = ("matmul_tflops_before", "matmul_tflops_after")
_MEASURED = ("gpu_util_mean", "gpu_util_spread", "sm_clock_mhz", "power_w", "compile_s", "allocator_retries", *_RATES)


def _with_measurements(record: Record, attempts: list[AttemptRead]) -> Record:
    """What the last attempt that measured something says about its GPUs, compiler and kernels; null without one."""
    found: dict[str, Any] = {}
    sources = dict(record.sources)
    for read in attempts:
        for name, tables, keys in (
            ("trainer", read.trainer, ("attention_used",)),
            ("measured", read.measured, _MEASURED),
        ):
            given = {key: tables[key] for key in keys if tables.get(key) is not None}
            found |= given
            where = f"attempts/{read.attempt.number}/{name}.json"
            sources |= dict.fromkeys(given, where)
            product = f"{where}: {tables.get('matmul')}, the slowest rank's"
            sources |= dict.fromkeys(given.keys() & _RATES, product)
    # The count goes through all attempts, as the streams' positions do.
    counts = (read.measured.get("skipped_shards") for read in attempts[::-1])
    skipped = next((count for count in counts if isinstance(count, int)), 0)
    words = f"{skipped} damaged shard{'s' if skipped > 1 else ''} of the data skipped"
    flags = [*record.flags, words] if skipped else record.flags
    return replace(record, **found, sources=sources, flags=flags)


def _with_steps(record: Record, steps: StepTable, peaks: dict[str, list[float]], times: StepTimes | None) -> Record:
    """With what the steps that count say, and the peaks of memory of all."""
    if not len(steps):
        return record
    assert record.global_batch
    assert record.seq
    sources, flags = dict(record.sources), list(record.flags)
    skips = np.nan_to_num(steps["skipped"])
    # A trainer may write NaN as null: then only a skip explains it.
    has_loss = np.isfinite(steps["loss"])
    nan = np.flatnonzero(~has_loss & (skips == 0))
    losses = np.flatnonzero(has_loss)
    evaluated = np.flatnonzero(~np.isnan(steps["loss_eval"]))
    saves = steps["save_s"][~np.isnan(steps["save_s"])]
    if len(losses):
        sources["loss_first"], sources["loss_last"] = steps.place(losses[0]), steps.place(losses[-1])
        if len(losses) > 1 and steps["loss"][losses[-1]] >= steps["loss"][losses[0]]:
            flags.append("the loss did not fall")
    if len(evaluated):
        sources["loss_eval"] = steps.place(evaluated[-1])
    if len(nan):
        flags.append(f"{len(nan)} steps with a loss that is no number, the first at {steps.place(nan[0])}")
    if np.all(skips > 0):
        flags.append("every step was skipped: step_s holds forward and backward only")
    sources["skipped_steps"] = sources["nan_steps"] = sources["save_s"] = "metrics.jsonl of the attempts"
    sources |= dict.fromkeys(peaks, "metrics.jsonl of the attempts, the highest of each stage")
    sources["tokens_total"] = "tokens of the lines that count; a step trained again counts once"
    if times:
        chosen = f"{times.used} of {len(steps)} steps ({times.warmup} warm-up, {times.apart} set apart)"
        sources["step_s"] = f"metrics.jsonl of the attempts, median of {chosen}; {RULE}"
        sources["step_s_p10"] = sources["step_s_p90"] = "10th and 90th percentile of the same steps"
        sources["step_s_mean"] = "mean of the same steps"
        sources["steps_used"] = sources["warmup_steps"] = "counts of the steps that step_s is from"
        flags += times.flags
    # A line of another program is of several steps; ours of one.
    tokens = np.nan_to_num(steps["tokens"])
    return replace(
        record,
        step_s=times.step_s if times else None,
        step_s_p10=times.p10 if times else None,
        step_s_p90=times.p90 if times else None,
        step_s_mean=times.mean if times else None,
        steps_used=times.used if times else 0,
        warmup_steps=times.warmup if times else 0,
        tokens_total=int(np.where(tokens > 0, tokens, record.global_batch * record.seq).sum()),
        memory_allocated_gib=peaks.get("memory_allocated_gib"),
        memory_reserved_gib=peaks.get("memory_reserved_gib"),
        loss_first=float(steps["loss"][losses[0]]) if len(losses) else None,
        loss_last=float(steps["loss"][losses[-1]]) if len(losses) else None,
        loss_eval=float(steps["loss_eval"][evaluated[-1]]) if len(evaluated) else None,
        skipped_steps=int(skips.sum()),
        nan_steps=len(nan),
        save_s=float(np.median(saves)) if len(saves) else None,
        sources=sources,
        flags=flags,
    )


def _with_attempts(record: Record, run: RunFolder, resolved: Resolved, attempts: list[AttemptRead]) -> Record:
    standing = read_standing(run, resolved.train.log_every)
    state, end, waiting = standing.state.ended, standing.end, standing.waits
    where = source_of_state(standing)
    sources = {**record.sources, "ended": where, "cause": where, "attempts": "attempts/*/"}
    ids = job_ids(run)
    number = standing.attempt.number if standing.attempt else None
    last = next((read for read in attempts if read.attempt.number == number), None)
    started = str(last.started["job_id"]) if last and last.started.get("job_id") else None
    submissions = run.submissions()
    cause = end.why if end and not waiting else None
    if state == "pending" and last and (words := words_between(last.attempt)):
        cause = words
    if state == "error" and last and not last.ended:
        cause = "its process is gone and left no word"
    if state == "refused" and standing.state.by == "submission":
        cause = submissions[-1].get("refused")
    over = last is not None and state not in ("running", "pending", "unknown")
    first = next((read for read in attempts if read.start_s), None)
    sources |= {
        "job_id": _of_attempt(last) if last and started and not waiting else "the submissions",
        "started": _of_attempt(first) if first else "the submissions",
        "ended_at": _end_of(last) if last else "null: no attempt",
        "node_list": _of_attempt(last) if last else "null: no attempt",
    }
    record = replace(
        record,
        job_id=(standing.job_id if waiting else started) or (ids[-1] if ids else None),
        started=iso(first.start_s if first else epoch(submissions[0].get("time")) if submissions else None),
        ended_at=iso(last.end_s) if over and last else None,
        node_list=str(last.started["node_list"]) if last and last.started.get("node_list") else None,
        gpu_hours=_gpu_hours(record, resolved, attempts, sources),
        attempts=attempt_tables(run, attempts, standing),
        ended=state,
        cause=None if cause is None else hide_secrets(str(cause)),
    )
    return replace(record, sources=sources)


def _of_attempt(read: AttemptRead) -> str:
    return f"attempts/{read.attempt.number}/attempt.json"


def _end_of(read: AttemptRead) -> str:
    folder = f"attempts/{read.attempt.number}"
    return f"{folder}/ended.json" if read.ended else f"inferred: the last time that {folder} tells"


def _gpu_hours(
    record: Record, resolved: Resolved, attempts: list[AttemptRead], sources: dict[str, str]
) -> float | None:
    """GPUs x hours over all attempts, each from its start to its end, or to its last step if nothing says its end.

    None for ranks that ran on CPU: a local run none of whose steps measured GPU memory.
    """
    if record.memory_allocated_gib is None and resolved.cluster.scheduler == "local":
        sources["gpu_hours"] = "null: no GPU was seen"
        return None
    spans = [read.end_s - read.start_s for read in attempts if read.start_s and read.end_s]
    sources["gpu_hours"] = f"gpus x the time of {len(spans)} of {len(attempts)} attempts"
    return sum(spans) * resolved.gpus / 3600 if spans else None
