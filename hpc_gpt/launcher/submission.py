"""Submit a run: make missing data, write the run folder, call the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.checkpoints.shared_checkpoints import runs_of_same_files, shared_pattern
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, JobRefused, RunFolderError, SlurmUnreachable, UserError, check_package
from hpc_gpt.core.format import counted
from hpc_gpt.core.process import MAX_ARGUMENT_BYTES
from hpc_gpt.core.runs.code_archive import CODE_KEY
from hpc_gpt.core.runs.provenance import collect, weights_of
from hpc_gpt.core.runs.run_folder import (
    DATA_BESIDE,
    EXPERIMENT_FILE,
    PREDICTED,
    RESUMED_FROM,
    RunFolder,
    SharedFile,
    check_writable,
    create_run,
)
from hpc_gpt.core.runs.snapshot import check_path
from hpc_gpt.core.secrets import is_secret
from hpc_gpt.core.settings.program_text import check_file_text, fill_line
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.settings.sweep_rows import faults_of_rows
from hpc_gpt.core.slurm.clients import check_output_path
from hpc_gpt.core.slurm.environment import GIVEN, given_environment, has_sbatch, job_python
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.start_check import ExpectedStart, NeverStarts, ask_start, check_reachable
from hpc_gpt.core.tables import flat
from hpc_gpt.launcher.notes import NOTES, standing_lines
from hpc_gpt.launcher.prepared import Copies, PreparedRun
from hpc_gpt.trainer.tokens.run_data import ensure_data

_POINTER_BYTES = 8
_SPARE_BYTES = 16 << 10  # for the variables and words that a job adds

if TYPE_CHECKING:
    from hpc_gpt.core.checkpoints.lineage import Parent


@dataclass(frozen=True)
class SubmittedRun:
    """A run, its settings and the id of its job; `jobs` are all jobs of its chain, if several were submitted at once.
    `waits`: the reason why Slurm cannot start it now, empty if it can. `cluster`: of Slurm, if one of several was
    chosen."""

    run: RunFolder
    resolved: Resolved
    job_id: str
    jobs: tuple[str, ...] = ()
    waits: str = ""
    cluster: str | None = None


def submit_run(prepared: PreparedRun, logs: Path, parent: Parent | None = None, now: bool = False) -> SubmittedRun:
    """Checks that the scheduler answers, makes missing data, writes the run folder, submits. The folder names the
    `parent` from which it resumes. `now`: as for `start_run`.

    Everything but sbatch itself refuses before the folder exists. Raises SlurmUnreachable, ConfigError, DataError,
    RunFolderError, JobRefused.
    """
    provenance = check_submission([prepared], logs, begins=parent is None)
    if provenance.get("gpus_fault") and not now:  # GPUs of this machine that cannot be listed
        from hpc_gpt.launcher.local.gpus import choice

        choice(bool(prepared.resolved.asked_gpus))
    waits = check_start(prepared.resolved, prepared.script)
    options = prepared.job_script.options if prepared.job_script is not None else ()
    run = write_run(prepared, logs, provenance, parent=parent)
    submitted = start_run(run, prepared.resolved, prepared.jobs, options, now)
    return replace(submitted, waits=waits or submitted.waits)


def check_submission(rows: Sequence[PreparedRun], logs: Path, dry: bool = False, begins: bool = True) -> dict[str, Any]:
    """Checks every run before a folder is written, makes missing data, and returns the provenance.

    All runs are for one cluster. Raises as submit_run does; for the rows of a sweep RowFaults with all faults. `dry`:
    nothing is made, and an unreachable Slurm is not a fault. `begins`: False for a run that resumes, which does not
    need train.init any more.
    """
    check_path(logs)
    for path, text in {row.file: row.text for row in rows if row.file is not None}.items():
        check_file_text(path, text)
    for row in rows:
        check_values(row.resolved)
        check_sizes(row.resolved)
        for line in (row.resolved.program.run, row.resolved.program.resume) if runs_program(row.resolved) else ():
            if isinstance(line, str):
                fill_line(line, {"run": str(logs.absolute())}, alone=True)  # refuses a path that bash reads in quotes
        if not row.force:
            check_shared_checkpoints(row.resolved, logs)
    cluster = rows[0].resolved.cluster
    if cluster.scheduler == "local":
        for resolved in [row.resolved for row in rows if row.resolved.script is None]:
            if resolved.job.dependency is not None:
                raise ConfigError(
                    f"job.dependency is {resolved.job.dependency!r}, which is for Slurm; this machine has none",
                    "hpc-gpt submit FIRST --wait && hpc-gpt submit NEXT starts a run after one that ends well",
                )
    if cluster.scheduler == "slurm":
        check_output_path(logs)
        for row in rows:
            requeue_of(row.resolved.cluster).check(row.resolved)
        if not dry:
            check_reachable(keep=True)
    for folder in {logs / row.resolved.slug for row in rows}:
        check_writable(folder)
    provenance = {**collect(cluster.scheduler == "local"), CODE_KEY: rows[0].copies.code.sha256}
    faults: dict[str, UserError] = {}
    for row in rows:
        try:
            has_gpu = bool(provenance["gpus"] or provenance.get("gpus_fault"))
            check_inputs(row.resolved, row.data_beside, has_gpu, not dry, begins, row.copies)
        except UserError as fault:
            if len(rows) == 1:
                raise
            faults[str(row.resolved.row)] = fault
    if faults:
        raise faults_of_rows(faults, len(rows))
    return provenance


def check_shared_checkpoints(resolved: Resolved, logs: Path, run: RunFolder | None = None) -> None:
    """Raises RunFolderError if the checkpoints of a program are the files of another run in `logs` than `run` that is
    queued or running."""
    if (pattern := shared_pattern(resolved.command)) is None:
        return
    from hpc_gpt.launcher.watch.status import read_status

    others = [other for other in runs_of_same_files(pattern, logs) if run is None or other.path != run.path]
    for status in read_status(others):
        if status.state in LIVE:
            message = f"run {status.run} is {status.state}, and its checkpoints are the same files: {pattern}"
            hint = "wait for its end, or submit it in another folder; --force lets both write and resume from them"
            raise RunFolderError(message, hint)


def check_values(resolved: Resolved) -> None:
    """Raises ConfigError for a value that has the format of a secret, such as a URL with a password."""
    for key, value in flat(resolved.to_tables()).items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and is_secret("", text):
                message = f"{key} looks like a secret, and the run folder would keep it"
                raise ConfigError(message, "export it in the shell that submits: jobs have its variables")


def check_sizes(resolved: Resolved) -> None:
    """Raises ConfigError for what no process can be started with: an argument or a variable above MAX_ARGUMENT_BYTES,
    or an environment that with the longest command is above the system's limit of both."""
    program, given = resolved.command, {}
    if resolved.cluster.scheduler == "local" and resolved.script is not None:
        given = given_environment(os.environb)
    variables = {**os.environ, **resolved.cluster.environment, **given}
    commands = {"notify.command": _words(resolved.notify.command)}
    if program is not None:
        lines = ["\n".join([*program.setup, program.run])] if isinstance(program.run, str) else program.run
        commands |= {"command.run": list(lines or ()), "command.args": list(program.args)}
    sizes = [(key, len(os.fsencode(word)) + 1) for key, words in commands.items() for word in words]
    sizes += [(f"variable {name}", len(os.fsencode(f"{name}={value}")) + 1) for name, value in variables.items()]
    for what, size in sizes:
        if size > MAX_ARGUMENT_BYTES:
            packed = f"variable {GIVEN}" == what
            raise ConfigError(
                f"{'the environment, packed for the script,' if packed else what} has {size:,} bytes, and no "
                f"argument or variable of a process may have more than {MAX_ARGUMENT_BYTES:,}",
                "put it into a file, and name that" if what in commands else "unset what the run does not need",
            )
    total, limit = sum(size + _POINTER_BYTES for _, size in sizes), os.sysconf("SC_ARG_MAX") - _SPARE_BYTES
    if total > limit:
        raise ConfigError(
            f"environment and commands have {total:,} bytes, and a process takes at most {limit:,}",
            "unset what the run does not need",
        )


def _words(command: str | Sequence[str] | None) -> list[str]:
    return [command] if isinstance(command, str) else list(command or ())


def check_requirements(resolved: Resolved, has_gpu: bool) -> None:
    """Raises ConfigError if this machine, on which the ranks will run, lacks a package or a GPU that they need."""
    facts = engine_named(resolved.engine.name)
    if resolved.train.dtype == "fp16" and not has_gpu and not facts.trains_fp16_on_cpu:
        raise ConfigError(
            "train.dtype is fp16, but this machine has no GPU, and DeepSpeed does not train in fp16 on a CPU",
            "use --set train.dtype=fp32 or bf16, or --engine ddp or fsdp",
        )
    check_packages(resolved)
    if resolved.train.init is not None:
        check_package("safetensors", "train.init")


def check_packages(resolved: Resolved) -> None:
    """Raises ConfigError if this installation lacks a package of the run's engine."""
    for package in engine_named(resolved.engine.name).packages:
        check_package(package, f"engine {resolved.engine.name}")


def runs_this_python(resolved: Resolved) -> bool:
    """Whether a Slurm job's ranks surely run the Python of this process, with its packages alone."""
    cluster = resolved.cluster
    may_add = cluster.modules or cluster.setup or cluster.archive or "PYTHONPATH" in cluster.environment
    return cluster.scheduler == "slurm" and bool(job_python(resolved)) and not may_add


def check_inputs(
    resolved: Resolved,
    data_beside: Path | None,
    has_gpu: bool,
    make: bool = False,
    begins: bool = True,
    copies: Copies | None = None,
) -> Path | None:
    """Checks a run's packages if it runs by this Python, its open files if on this machine, its Megatron-LM checkout,
    the weights if it `begins` from them, and its data. Returns the path of the data, None for random tokens. `make`:
    build the standard library's data. Raises ConfigError, DataError."""
    if resolved.cluster.scheduler == "local":
        from hpc_gpt.core.network import check_open_files

        check_requirements(resolved, has_gpu)
        if not runs_program(resolved):
            check_open_files(resolved.gpus)
        archive = resolved.cluster.archive
        if archive is not None and not os.access(archive, os.R_OK):
            raise ConfigError(f"stage is {archive}, which cannot be read", "give the path of a tar on this machine")
    elif make and runs_this_python(resolved):
        check_packages(resolved)
    if resolved.track.is_asked:
        from hpc_gpt.launcher.services import check_track

        check_track(resolved)
    if resolved.cluster.scheduler == "slurm" and resolved.job.preflight:
        from hpc_gpt.trainer.preflight.verdict import preflight_limit_s

        preflight_limit_s()
    engine_named(resolved.engine.name).check_program(resolved, os.environ)
    (copies or Copies()).work(resolved)
    if begins and resolved.train.init is not None:
        from hpc_gpt.core.weights.folder import check_weights, read_folder

        check_weights(read_folder(Path(resolved.train.init)), resolved.model)
    return ensure_data(resolved, make, data_beside, sums=True)


def write_run(
    prepared: PreparedRun,
    logs: Path,
    provenance: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    parent: Parent | None = None,
    text: SharedFile | None = None,
) -> RunFolder:
    """Writes the run folder, with all that is known before the job starts. `text`: the experiment's text, if a sweep's
    runs share it. Raises RunFolderError."""
    resolved = prepared.resolved
    if prepared.file is not None:
        provenance = {**provenance, EXPERIMENT_FILE: os.path.abspath(prepared.file)}
    own_keys: dict[str, Any] = {DATA_BESIDE: str(prepared.data_beside)} if prepared.data_beside is not None else {}
    if parent is None:
        own_keys |= weights_of(resolved)
    if resolved.cluster.archive is not None:
        own_keys |= prepared.copies.stage_sum(resolved)
    if prepared.job_script is not None:
        own_keys |= prepared.job_script.provenance
    if (work := prepared.copies.work(resolved)) is not None:
        from hpc_gpt.core.runs.work_archive import WORK_KEY

        own_keys[WORK_KEY] = work.sha256
    own_keys |= {NOTES: standing} if (standing := standing_lines(prepared)) else {}
    tables = {
        **engine_named(resolved.engine.name).config_files(resolved),
        "provenance.json": {**provenance, **own_keys},
        RESUMED_FROM: parent.note if parent is not None else None,
        "sweep.json": sweep,
        PREDICTED: prepared.prediction.tables if prepared.prediction else None,
    }
    archives = [part for part in (prepared.copies.code, work, prepared.hold, text) if part is not None]
    return create_run(logs, resolved, prepared.script, prepared.text if text is None else None, tables, archives)


def start_run(
    run: RunFolder, resolved: Resolved, jobs: int = 1, options: Sequence[str] = (), now: bool = False
) -> SubmittedRun:
    """Submits a run's job.sh to the scheduler of its profile, as a chain of so many `jobs` that wait for each other. A
    script of the user's own has `options` on sbatch's command line. `now`: on this machine it does not wait for a GPU.

    Raises JobRefused, SlurmUnreachable, RunFolderError.
    """
    if resolved.cluster.scheduler == "slurm":
        from hpc_gpt.launcher.executor import submit_to_slurm

        ids, cluster = submit_to_slurm(run, resolved, jobs, options)
        return SubmittedRun(run, resolved, ids[0], tuple(ids), cluster=cluster)
    from hpc_gpt.launcher.local.queue import start_here

    try:
        job_id, waits = start_here(run, resolved, now)
    except JobRefused as fault:
        if not run.attempts():
            run.add_submission({"scheduler": "local", "job_id": None, "refused": str(fault)})
        raise
    return SubmittedRun(run, resolved, job_id, waits=waits)


def check_start(resolved: Resolved, script: str) -> str:
    """The reason why Slurm cannot start a job now; empty if it can. Raises NeverStarts, SlurmUnreachable.

    A refusal of the run itself is left to sbatch, whose message the run's folder notes.
    """
    if resolved.cluster.scheduler != "slurm":
        return ""
    try:
        return ask_start(resolved, script).waits
    except NeverStarts:
        raise
    except JobRefused:
        return ""


def dry_run(resolved: Resolved, script: str) -> ExpectedStart:
    """The scheduler's answer to a script that is not submitted, or why it cannot be asked. Writes nothing. Raises
    JobRefused, also for a job that would never start."""
    if resolved.cluster.scheduler != "slurm":
        return ExpectedStart(f"would start {counted(resolved.tasks, 'rank')} on this machine")
    if not has_sbatch():
        return ExpectedStart("no sbatch here to ask: this is what would be submitted")
    try:
        check_reachable()  # without this, sbatch would retry for 18 s
        return ask_start(resolved, script)
    except SlurmUnreachable as fault:
        return ExpectedStart(f"{fault}: it was not asked; the script is as it would be submitted")
