"""Run folders as a trainer leaves them, made without one."""

import json
import os
import zlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.files import logs_dir, write_once
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, create_run
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import find_sweep, load_experiment
from hpc_gpt.launcher.render import render_script
from hpc_gpt.reader.runs.own_run import read_own

STARTED = 1_700_000_000.0


def read_run(run: RunFolder) -> Record:
    """The record of a run, as `report` reads it."""
    return read_own(run).record


def make_run(
    logs: Path,
    cluster: str = "local",
    experiment: str = "demo",
    submit: bool = True,
    row: str | None = None,
    **overrides,
) -> RunFolder:
    """A run that was submitted as job 4711 and has not started; with `row`, of that row of a sweep."""
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    resolved = resolve(load_experiment(experiment, settings, row), load_profile(cluster))
    if row is not None and (sweep := find_sweep(experiment)) is not None:
        resolved = replace(resolved, sweep=sweep.name, row=row)
    run = create_run(logs, resolved, render_script(resolved), f"name = '{experiment}'\n", {})
    if submit:
        run.add_submission({"scheduler": resolved.cluster.scheduler, "job_id": "4711", "refused": None})
    return run


def unsubmitted_run(cluster: str = "local", **overrides) -> RunFolder:
    """A run in the test's own logs folder that no scheduler knows of."""
    return make_run(logs_dir(), cluster, submit=False, **overrides)


def a_run(
    steps: int | None = 1,
    ended: str | None = "done",
    *,
    saved: Collection[int] = (),
    damaged: Collection[int] = (),
    cluster: str = "local",
    job: str | None = None,
    cause: str | None = None,
    **settings,
) -> RunFolder:
    """A run in the test's own logs whose one attempt made so many steps and ended so, with checkpoints of the steps
    `saved`, and `damaged` ones. `steps` None: it has not begun. `job`: of that job of Slurm's; else no scheduler knows
    of it."""
    run = unsubmitted_run(cluster, **settings)
    if job is not None:
        with_job(run, job)
    if steps is not None:
        add_attempt(run, steps, ended, cause=cause, job_id=job or "4711")
    return with_checkpoints(run, *saved, damaged=damaged)


def metrics_line(step: int, **values) -> dict:
    """One line of metrics.jsonl: half a second a step, a loss that falls from 6 towards 2."""
    line = {
        "step": step,
        "loss": 2 + 4 / step,
        "loss_eval": None,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "step_s": 5.0 if step == 1 else 0.5,
        "tokens_per_s": 1.0,
        "tokens": 4096,
        "skipped": False,
        "memory_allocated_gib": None,
        "memory_reserved_gib": None,
        "save_s": None,
        "time": STARTED + step,
    }
    return {**line, **values}


def add_attempt(run: RunFolder, lines, ended: str | None = "done", **more) -> Attempt:
    """A start of the run that wrote `lines` (objects, or text as it stands; a number: of so many steps) and ended so;
    None: no ended.json."""
    if isinstance(lines, int):
        lines = [metrics_line(step) for step in range(1, lines + 1)]
    attempt = run.new_attempt()
    job_id = more.get("job_id", "4711")
    start = {"attempt": attempt.number, "job_id": job_id, "node_list": more.get("node_list")}
    start["restart"] = more.get("restart", sum(other.job_id == job_id for other in run.before(attempt)))
    start |= {"in_job": more["in_job"]} if "in_job" in more else {}
    started = more.get("started", STARTED)
    write_once(attempt.folder / "attempt.json", json.dumps({**start, "started": started}))
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    if text:
        attempt.metrics.write_text(text)
    trainer = {key: more[key] for key in ("device", "resumed_step") if key in more}
    if trainer:
        write_once(attempt.folder / "trainer.json", json.dumps(trainer))
    if ended:
        end = {"ended": ended, "cause": more.get("cause"), "step": 0, "time": more.get("time", started + 3600)}
        write_once(attempt.folder / "ended.json", json.dumps({**end, "requeue": more.get("requeue", False)}))
    return attempt


def add_checkpoint(run: RunFolder, step: int, damaged: bool = False) -> Path:
    """A checkpoint of one file, complete; its file cut off if it is to be `damaged`."""
    (place := run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    weights = b"weights" * 100
    files = {"weights": {"bytes": len(weights), "crc32": zlib.crc32(weights)}}
    (place / "weights").write_bytes(weights[: 300 if damaged else None])
    (place / "complete.json").write_text(json.dumps({"schema": 1, "step": step, "data": "random", "files": files}))
    return place


def with_job(run: RunFolder, job_id: str, **more) -> RunFolder:
    """The run, once Slurm has taken a job of it."""
    run.add_submission({"scheduler": "slurm", "job_id": job_id, "refused": None, **more})
    return run


def with_attempt(run: RunFolder, lines, ended: str | None = "done", **more) -> RunFolder:
    """The run, after an `add_attempt`."""
    add_attempt(run, lines, ended, **more)
    return run


def with_checkpoints(run: RunFolder, *steps: int, damaged: Collection[int] = ()) -> RunFolder:
    """The run with checkpoints of these steps, of which some are `damaged`."""
    for step in (*steps, *damaged):
        add_checkpoint(run, step, step in damaged)
    return run


def make_old(folder: Path) -> None:
    """Its files and folders are a day older."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (path.stat().st_mtime - 86_400,) * 2)
