"""Whole records of runs of ours in each state, with where each figure is from: `own_records.txt`.

A block has the name of a run of RUNS and what is read of it, but for the settings that any run has, and what the first
block has as well. A source in words that an earlier block has is not said again. Changed by hand.
"""

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.files import write_once
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.reader.runs.own_run import read_own
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, read_run, with_attempt, with_job
from tests.reader.test_printed import pairs, said_record

TABLE = Path(__file__).with_name("own_records.txt")
# What every run has, or what another test holds.
APART = ("engine", "train", "data")
BARE = {"schema", "run", "dialect", "settings", "flags", "flag_kinds", "sources"}
# What differs each time.
CHANGES = (
    (r"\d+ s ago", "N s ago"),
    (r"20(?!23)\d\d-[\dT:-]+Z", "NOW"),
    (r"on \d{4}-\d\d-\d\d at \d\d:\d\d", "on DAY"),
    (rf"\b{os.getpid()}\b", "PID"),
)
SIX = [metrics_line(step) for step in range(1, 7)]
LOCAL = {"scheduler": "local", "job_id": str(os.getpid()), "host": platform.node(), **process_identity(os.getpid())}


def ran(
    logs: Path, lines: Any = SIX, ended: str | None = "done", cluster: str = "local", submit: bool = True, **more: Any
) -> RunFolder:
    return with_attempt(make_run(logs, cluster, submit=submit), lines, ended, **more)


def aged(run: RunFolder, seconds: float) -> RunFolder:
    """The run, of whose attempts nothing was written for so long."""
    for attempt in run.attempts():
        for path in (attempt.metrics, attempt.folder):
            os.utime(path, (time.time() - seconds,) * 2)
    return run


def put(run: RunFolder, **tables: Any) -> RunFolder:
    """The run with these files of its last attempt."""
    for name, table in tables.items():
        write_once(run.attempts()[-1].folder / f"{name}.json", json.dumps(table))
    return run


def cancelled(run: RunFolder, job_id: str = "4711", **note: Any) -> RunFolder:
    run.cancelled_mark(job_id).write_text(json.dumps(note) if note else "")
    return run


def of_process(logs: Path, **changed: Any) -> RunFolder:
    run = make_run(logs, submit=False)
    run.add_submission({**LOCAL, **changed})
    return with_attempt(run, SIX, None, job_id=str(os.getpid()))


def refused(logs: Path) -> RunFolder:
    words = "sbatch: error: Invalid feature specification"
    (run := make_run(logs, submit=False)).add_submission({"scheduler": "slurm", "job_id": None, "refused": words})
    return run


def chain(logs: Path, *attempts: tuple[str, str | None]) -> RunFolder:
    """A chain of three jobs, and a fourth that Slurm refused; with attempts of these jobs that ended so."""
    run = make_run(logs, submit=False)
    for number in (1, 2, 3):
        with_job(run, str(70 + number), link=number)
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "too many jobs", "link": 4})
    for number, (job_id, ended) in enumerate(attempts, 1):
        add_attempt(run, [metrics_line(number)], ended, job_id=job_id)
    return run


def skipped_and_nan() -> list[dict[str, Any]]:
    lines = [metrics_line(step) for step in range(1, 21)]
    lines[5].update(skipped=True, step_s=0.1)
    lines[-1].update(loss=math.nan, step_s=0.1)
    return lines


def measured(logs: Path) -> RunFolder:
    """All that may be measured, in two attempts, of which the second trained some steps again."""
    run = make_run(logs, "jean-zay-v100-32g", "gpt2-meg-ds-3d", layout__micro_batch=4)
    write_once(
        run.path / RESUMED_FROM, json.dumps({"run": "before", "path": "/logs/before", "step": 40, "branch": True})
    )
    stages = {"stages": [{"allocated": 20.5}, {"allocated": 19.5}]}
    write_once(run.path / "predicted.json", json.dumps({"memory_gib": stages, "step": {"step_s": 140.0}}))
    write_once(run.path / "provenance.json", json.dumps({"versions": {"torch": "2.9.0"}}))
    memory = {"memory_allocated_gib": [20.0, 18.5], "memory_reserved_gib": [25.0, 24.0]}
    lines = [metrics_line(step, **memory, save_s=1.5 if step == 4 else None, step_s=146.0) for step in range(1, 11)]
    add_attempt(run, lines, "walltime", requeue=True, device="Tesla V100-SXM2-32GB", node_list="r6i4n[0-15]")
    put(run, measured={"gpu_util_mean": 50.0, "power_w": 250.0, "allocator_retries": 3, "skipped_shards": 1})
    again = [metrics_line(step, loss=1 + step / 1000, tokens=None, step_s=146.0) for step in range(9, 13)]
    again[2].update(loss_eval=2.5, loss_eval_by={"web": 2.4, "code": 2.6}, memory_allocated_gib=[19.0, 18.75])
    add_attempt(run, [*again, '{"step": 13, "lo\n'], cause="no error", started=STARTED + 7200, node_list="r6i4n[0-15]")
    failed = {"cudnn": "no kernel; token=hf_abcdefghijklmnopqrstu"}
    found = {"device": "Tesla V100-SXM2-16GB", "resumed_step": 8}
    put(run, trainer={**found, "attention_used": "flash", "attention_failed": failed})
    figures = {"gpu_util_spread": 22.0, "sm_clock_mhz": 1380, "compile_s": 3.5, "tenth_step_s": 0.75}
    rates = {"matmul": "bf16", "matmul_tflops_before": 101.5, "matmul_tflops_after": 99.5}
    put(run, measured={"attention_used": "math", "skipped_shards": 4, **figures, **rates})
    return put(run, start={"start_s": 15.0, "start_parts": {"script": 4.0, "imports": 11.0}})


def other_program(logs: Path) -> RunFolder:
    """Megatron-LM's, which prints a loss now and then, and none in its last lines."""
    lines = [metrics_line(step, loss=3.5 - step / 10 if step % 3 == 2 else None) for step in range(1, 12)]
    return with_attempt(make_run(logs, engine__name="megatron-lm"), [*lines, metrics_line(12, loss=None)])


def verdict(**more: Any) -> dict[str, Any]:
    return {"attempt_ended": "node_failure", "cause": "n3 is gone", "time": STARTED + 3700, **more}


RUNS: dict[str, Callable[[Path], RunFolder]] = {
    "submitted": make_run,
    "neither submitted nor started": lambda at: make_run(at, submit=False),
    "refused by sbatch": refused,
    "refused, and then taken": lambda at: with_job(refused(at), "4711", time=STARTED),
    "cancelled before it started": lambda at: cancelled(make_run(at), user="ada", time=STARTED),
    "it writes": lambda at: ran(at, SIX, None, node_list="n[1-4]"),
    "it is silent": lambda at: aged(ran(at, SIX, None), 3600),
    "a process that runs": of_process,
    "a process that is gone": lambda at: of_process(at, pid_start="another"),
    "a process elsewhere": lambda at: of_process(at, pid_start="another", host="elsewhere"),
    "done": lambda at: ran(at, 100),
    "failed": lambda at: ran(at, SIX, "error", cause="exit code 137 of rank 3"),
    "cancelled and killed": lambda at: cancelled(ran(at, SIX, None)),
    "in the queue again": lambda at: ran(at, SIX, "walltime", requeue=True),
    "cancelled in the queue": lambda at: cancelled(ran(at, SIX, "walltime", requeue=True)),
    "to be tried again": lambda at: put(ran(at, SIX, None), next=verdict(go_on=True)),
    "given up": lambda at: put(ran(at, SIX, None), next=verdict(go_on=False, ended="no_progress", why="3 in a row")),
    "submitted again": lambda at: with_job(ran(at, SIX, "stopped", cause="Ctrl-C"), "4712"),
    "submitted again, and cancelled": lambda at: cancelled(with_job(ran(at, SIX, "stopped"), "4712"), "4712"),
    "of its third job": lambda at: with_attempt(with_job(ran(at, SIX, None), "4712"), [metrics_line(2)], job_id="4712"),
    "a chain that waits": chain,
    "a chain's first job": lambda at: chain(at, ("71", None)),
    "a chain's second job": lambda at: chain(at, ("71", None), ("72", "done")),
    "requeued without a word": lambda at: with_attempt(
        with_attempt(ran(at, SIX, None), [metrics_line(2)], None, job_id="4712"), [metrics_line(3)], job_id="4712"
    ),
    "requeued by SIGTERM": lambda at: with_attempt(
        with_attempt(ran(at, SIX, "cancelled", cause="SIGTERM"), SIX, "cancelled", cause="SIGTERM"), SIX, job_id="4712"
    ),
    "a job waits after an attempt without a word": lambda at: with_job(ran(at, SIX, None), "4712"),
    "submitted, then plain sbatch": lambda at: with_job(
        ran(at, ended="stopped", submit=False, job_id="99"), "4712", time=STARTED - 9
    ),
    "plain sbatch, then submitted": lambda at: with_job(
        ran(at, ended="stopped", submit=False, job_id="99"), "4712", time=STARTED + 9
    ),
    "a resume threw steps away": lambda at: with_attempt(
        ran(at, 30, None), [], "error", resumed_step=20, cause="exit code 1"
    ),
    "skipped and NaN steps": lambda at: ran(at, skipped_and_nan(), "nan", cause="loss is NaN"),
    "all steps skipped": lambda at: ran(at, [metrics_line(step, skipped=True) for step in range(1, 11)]),
    "a loss that rises": lambda at: ran(at, [metrics_line(1, loss=3.0), metrics_line(2, loss=3.5)]),
    "damaged lines": lambda at: ran(
        at, [metrics_line(1), '{"step": 2, "lo\n', "\x00\x00\n", "[]\n", "\n", metrics_line(3)]
    ),
    "lines that lack keys": lambda at: ran(
        at, [{"step": 1}, {"step": 2, "loss": None, "step_s": None}, {"step": 3, "loss": 3.0, "step_s": 0.5}]
    ),
    "evaluations between steps": lambda at: ran(
        at, [metrics_line(step, loss_eval=3.5, save_s=1.5) for step in range(1, 21)]
    ),
    "another ZeRO stage": lambda at: make_run(at, engine__zero_stage=0, train__dtype="bf16"),
    "of a sweep": lambda at: make_run(at, experiment="memory-ladder", row=find_sweep("memory-ladder").possible[0].name),
    "on CPUs": lambda at: ran(at, SIX, device="cpu", node_list="host"),
    "on CPUs of a node with GPUs": lambda at: ran(at, cluster="jean-zay-v100-32g", device="cpu"),
    "on other GPUs": lambda at: ran(at, cluster="jean-zay-v100-32g", device="NVIDIA Nobody 9"),
    "another program's": other_program,
    "all that is measured": measured,
}


def said_run(run: RunFolder, first: Record, said: set[str]) -> Iterator[str]:
    read = read_own(run)
    there = {key for key, value in read.record.to_tables().items() if value not in (None, [], {})}
    assert there - set(read.record.sources) <= BARE, "every figure says where it is from"
    settings = {key: value for key, value in read.record.settings.items() if key not in APART}
    versions = {key: value for key, value in read.record.versions.items() if key != "hpc-gpt"}
    known = {key: None for key in RECORD_KEYS if said and getattr(read.record, key) == getattr(first, key) is not None}
    apart = {"run": "run", "settings": settings, "versions": versions, "config_hash": None}
    kept = {key: getattr(read.record, key) for key in ("attempts", "sources", "flags", "flag_kinds")}
    for line in said_record(replace(read, record=replace(read.record, **{**known, **apart, **kept})), said):
        if line.startswith(("run: ", "flag", "from: ")) or line not in said:
            yield line.rstrip()
            said.add(line)
    for attempt in read.record.attempts[-1:]:
        yield "the last attempt: " + pairs({key: value for key, value in attempt.items() if value is not None})


def test_the_whole_record_in_each_state(logs: Path) -> None:
    # Always said when it started: some were submitted in the first one's second, others in the next.
    first, said = replace(read_run(make_run(logs / "first")), started=None), set()
    blocks = ""
    for name, make in RUNS.items():
        lines = [f"# {name}", *said_run(make(logs / name.replace(" ", "-")), first, said)]
        text = "\n".join(lines)
        for words, instead in (*CHANGES, (re.escape(str(logs)), "LOGS")):
            text = re.sub(words, instead, text)
        blocks += f"{text}\n"
    assert blocks.split("\n# ") == TABLE.read_text(encoding="utf-8").split("\n# ")
