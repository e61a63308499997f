"""Submit a run: make missing data, write the run folder, call the scheduler. For `submit --dry-run`: describe the run
and its request in a screen of lines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable, UserError
from hpc_gpt.core.files import from_here
from hpc_gpt.core.format import Line, counted, show_bytes
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.code_archive import CODE_KEY
from hpc_gpt.core.runs.disk_space import checkpoint_bytes, free_gib, space_needed_gib
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
from hpc_gpt.core.runs.work_archive import WORK_KEY, describe_copy
from hpc_gpt.core.secrets import hide_words, is_secret
from hpc_gpt.core.settings.program_text import check_file_text
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import run_rows, runs_program
from hpc_gpt.core.settings.sweep_rows import faults_of_rows
from hpc_gpt.core.slurm.clients import check_output_path, has_sbatch
from hpc_gpt.core.slurm.directives import options_of, script_directives
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.sbatch_words import read_call, read_options, split_directive
from hpc_gpt.core.slurm.start_check import ExpectedStart, NeverStarts, ask_after, ask_start, check_reachable
from hpc_gpt.core.tables import flat
from hpc_gpt.launcher.prepared import NOTES, Copies, PreparedRun
from hpc_gpt.launcher.services import check_track, python_lines, service_lines
from hpc_gpt.trainer.tokens.description import describe_data
from hpc_gpt.trainer.tokens.run_data import ensure_data, located

if TYPE_CHECKING:
    from hpc_gpt.core.runs.lineage import Parent


def overview(prepared: PreparedRun, logs: Path) -> list[tuple[str, str]]:
    """The (label, text) rows on a prepared run, for its user to read before the submission."""
    run = prepared.resolved
    rows = [("run", f"{run.name}, in {from_here(logs / run.slug)}/<run id>"), *summary_rows(run)]
    if run.cluster.scheduler == "slurm" and prepared.job_script is None:
        rows += [line.under("python") for line in python_lines(run.cluster)]
    rows += [("copy", line) for line in describe_copy(run, prepared.copies.work(run))]
    rows += [line.under("data") for line in data_lines(run, prepared.data_beside)]
    rows += [line.under("checkpoints") for line in checkpoint_lines(run, logs)]
    rows += [(line.label, line.text) for line in service_lines(run)]
    if (predicted := prepared.prediction) is not None:
        rows.append(("predicted", predicted.line.text if predicted.is_known else f"nothing: {predicted.line.text}"))
    if prepared.forecast is not None:
        rows += [("forecast", text) for text in prepared.forecast.texts]
    budget = run.job.max_gpu_hours
    rows += [("budget", "none" if budget is None else f"{budget:g} GPU-hours")]
    command = _command(prepared)
    requested = _requested_by(prepared.script, command)
    rows += [("asks Slurm", shlex.join(hide_words(requested)))] if requested else []
    rows += [("output", text) for text in _outputs(run, array=bool(prepared.job_script and prepared.job_script.array))]
    return [*rows, ("would run", command)]


def _command(prepared: PreparedRun) -> str:
    """The command that would submit it, as text."""
    run, script = prepared.resolved, prepared.job_script
    if run.cluster.scheduler != "slurm":
        return f"bash job.sh, for each of {counted(run.tasks, 'rank')}"
    output = "--output=logs/…/slurm-%j.out"
    if script is not None:
        files = output if not script.array else "--output=logs/…/%a/slurm-%A_%a.out"
        files_of_run = ("output", "error", "open-mode")
        options = [option for option in read_options(script.options) if option.name not in files_of_run]
        line = shlex.join(["sbatch", *hide_words(word for option in options for word in option.argv)])
        return f"{line} {files} {files.replace('output', 'error')} job.sh RUN"
    chained = requeue_of(run.cluster).shown
    command = f"sbatch --chdir=. {output} {chained}--export=ALL job.sh, with HPC_GPT_RUN"
    return command + (f", {prepared.jobs} times" if prepared.jobs > 1 else "")


def _requested_by(script: str, command: str) -> list[str]:
    """The directives of a script that count: the last one per option, without options that the command line has."""
    directives = [word for line in script_directives(script) for word in split_directive(line)]
    on_line, _ = read_call(shlex.split(command)[1:], options_of("sbatch"))
    options = {option.name: option for option in read_options(directives)}
    return [word for name, option in options.items() if name not in on_line for word in option.argv]


def _outputs(run: Resolved, array: bool) -> list[str]:
    """The files that get the output of a run: its log, and the files that a job script names, by sbatch's patterns."""
    log, script = "attempts/<n>/log in the run's folder", run.script
    default = None if run.cluster.scheduler == "local" else "slurm-%A_%a.out" if array else "slurm-%j.out"
    log += f"; before its first line, {default} there" if default is not None else ""
    if script is None:
        return [log]
    folder, output = Path(run.program.workdir), script.output or default
    files = [f"{folder / output}, and {log}" if output is not None else log]
    if script.error is not None and script.error != output:
        files.append(f"errors in {folder / script.error}, and attempts/<n>/err")
    return files


def data_rows(prepared: PreparedRun) -> list[Line]:
    """The lines on the files that a run copies and reads, for the user after its submission."""
    run = prepared.resolved
    copied = describe_copy(run, prepared.copies.work(run))
    return [*(Line("copy", text) for text in copied), *data_lines(run, prepared.data_beside)]


def data_lines(resolved: Resolved, data_beside: Path | None) -> tuple[Line, ...]:
    """The lines on a run's data. Relative paths are looked up in the folder `data_beside` first."""
    return describe_data(located(resolved, data_beside))


def prediction_lines(prepared: PreparedRun, logs: Path) -> list[str]:
    """The lines on a run's copies, data, checkpoints and predictions."""
    lines = [*data_rows(prepared), *checkpoint_lines(prepared.resolved, logs)]
    return [*map(str, lines), *prepared.predictions]


def summary_rows(run: Resolved) -> list[tuple[str, str]]:
    """The rows on a run's model, layout, batch and engine, or on the command that it starts."""
    gpus = "no GPU requested," if run.asked_gpus is None else counted(run.asked_gpus, "GPU")
    where = f"{gpus} on {counted(run.nodes, 'node')} of {run.cluster.name}"
    return list(run_rows(run, where))


def checkpoint_lines(run: Resolved, logs: Path) -> list[Line]:
    """The lines on the times of a run's saves, the kept checkpoints and their space; empty if another program saves."""
    train = run.train
    if runs_program(run):
        return []
    when = [f"every {train.save_minutes:g} min"] if train.save_minutes else []
    when += [f"every {counted(train.save_every, 'step')}"] if train.save_every else []
    when += [f"after step {', '.join(map(str, sorted(set(train.save_at))))}"] if train.save_at else []
    when += ["at the end"] if train.save_last else []
    if not when:
        return [Line("checkpoints", "none: train.save_last is false")]
    keeping = f", the newest {train.keep_last} kept" if train.keep_last else ""
    one, (_, every) = checkpoint_bytes(run), space_needed_gib(run)
    sizes = f"about {show_bytes(one)} each, {show_bytes(every * GIB)} in all"
    free = free_gib(logs)
    room = f", {show_bytes(free * GIB)} free" if free is not None else ""
    lines = [Line("checkpoints", f"{' and '.join(when)}{keeping}: {sizes}{room}")]
    if train.save_minutes and free is not None and free * GIB < 2 * one:
        text = "two do not fit in the free space: saves by train.save_minutes are left out until they do"
        lines.append(Line("checkpoints", text))
    if free is not None and free < every:
        fit = int(free * GIB // one) if one else 0
        means = "the next one does not fit" if not fit else f"{counted(fit, 'checkpoint')} fit"
        way = "train.keep_last = 3 keeps the newest three" if not train.keep_last else "save less often"
        text = f"all checkpoints take more than is free: {means}; {way}, HPC_GPT_LOGS names another disk"
        lines.append(Line("warning", text))
    return lines


@dataclass(frozen=True)
class SubmittedRun:
    """A run and the id of its job; `jobs` are all jobs of its chain, if several were submitted at once. `waits`: the
    reason why Slurm cannot start it now, empty if it can."""

    run: RunFolder
    scheduler: str
    job_id: str
    jobs: tuple[str, ...] = ()
    waits: str = ""


def submit_run(prepared: PreparedRun, logs: Path, parent: Parent | None = None, now: bool = False) -> SubmittedRun:
    """Checks that the scheduler answers, makes missing data, writes the run folder, submits. The folder names the
    `parent` from which it resumes. `now`: as for `start_run`.

    Everything but sbatch itself refuses before the folder exists. Raises SlurmUnreachable, ConfigError, DataError,
    RunFolderError, JobRefused.
    """
    provenance = check_submission([prepared], logs, begins=parent is None)
    if provenance.get("gpus_fault") and not now:
        _check_gpus(prepared.resolved)
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
    cluster = rows[0].resolved.cluster
    if cluster.scheduler == "local":
        for row in rows:
            _check_turn(row.resolved, logs)
    if cluster.scheduler == "slurm":
        check_output_path(logs)
        for row in rows:
            requeue_of(row.resolved.cluster).check(row.resolved)
        if not dry:
            check_reachable(dry)
    for folder in {logs / row.resolved.slug for row in rows}:
        check_writable(folder)
    provenance = {**collect(), CODE_KEY: rows[0].copies.code.sha256}
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
        raise faults_of_rows(faults)
    return provenance


def check_values(resolved: Resolved) -> None:
    """Raises ConfigError for a value that has the format of a secret, such as a URL with a password."""
    for key, value in flat(resolved.to_tables()).items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and is_secret("", text):
                message = f"{key} looks like a secret, and the run folder would keep it"
                raise ConfigError(message, "export it in the shell that submits: jobs have its variables")


def check_inputs(
    resolved: Resolved,
    data_beside: Path | None,
    has_gpu: bool,
    make: bool = False,
    begins: bool = True,
    copies: Copies | None = None,
) -> Path | None:
    """Checks a run's packages and open files if it runs on this machine, its Megatron-LM checkout, the weights if it
    `begins` from them, and its data. Returns the path of the data, None for random tokens. `make`: build the standard
    library's data. Raises ConfigError, DataError."""
    if resolved.cluster.scheduler == "local":
        from hpc_gpt.core.network import check_open_files
        from hpc_gpt.core.settings.requirements import check_requirements

        check_requirements(resolved, has_gpu)
        if not runs_program(resolved):
            check_open_files(resolved.gpus)
        archive = resolved.cluster.archive
        if archive is not None and not os.access(archive, os.R_OK):
            raise ConfigError(f"stage is {archive}, which cannot be read", "give the path of a tar on this machine")
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
    own_keys |= prepared.copies.stage_sum(resolved)
    if prepared.job_script is not None:
        own_keys |= prepared.job_script.provenance
    if (work := prepared.copies.work(resolved)) is not None:
        own_keys[WORK_KEY] = work.sha256
    own_keys |= {NOTES: prepared.standing} if prepared.standing else {}
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
        from hpc_gpt.core.slurm.executor import submit_to_slurm

        ids = submit_to_slurm(run, resolved, jobs, options)
        return SubmittedRun(run, "slurm", ids[0], tuple(ids))
    from hpc_gpt.launcher.local.queue import start_here

    try:
        job_id, waits = start_here(run, resolved, now)
    except JobRefused as fault:
        if not run.attempts():
            run.add_submission({"scheduler": "local", "job_id": None, "refused": str(fault)})
        raise
    return SubmittedRun(run, "local", job_id, waits=waits)


def _check_turn(resolved: Resolved, logs: Path) -> None:
    """Raises for a dependency that can never be satisfied."""
    if resolved.job.dependency is not None:
        from hpc_gpt.launcher.local.queue import unmet

        unmet(resolved, logs)


def _check_gpus(resolved: Resolved) -> None:
    """Raises JobRefused if the run needs GPUs of this machine, but they cannot be listed."""
    if resolved.cluster.scheduler == "local":
        from hpc_gpt.launcher.local.gpus import choice

        choice(bool(resolved.asked_gpus))


def check_start(resolved: Resolved, script: str) -> str:
    """The reason why Slurm cannot start a job now; empty if it can. Raises NeverStarts, SlurmUnreachable; JobRefused
    for jobs of `[after]` that it would refuse for good.

    A refusal of the run itself is left to sbatch, whose message the run's folder notes.
    """
    if resolved.cluster.scheduler != "slurm":
        return ""
    if resolved.after.is_asked:
        ask_after(resolved)
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
        start = ask_start(resolved, script)
        of_after = ask_after(resolved) if resolved.after.is_asked else ""
        return replace(start, answer=f"{start.answer}\n{of_after}") if of_after else start
    except SlurmUnreachable as fault:
        return ExpectedStart(f"{fault}: it was not asked; the script is as it would be submitted")
