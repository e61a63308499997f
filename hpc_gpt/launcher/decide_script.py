"""Prepare a run of a job script of the user's own, which runs as it is."""

import contextlib
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, Fault, raise_faults
from hpc_gpt.core.runs.provenance import git_state
from hpc_gpt.core.secrets import hide_secrets, hide_words
from hpc_gpt.core.settings.cluster import ClusterProfile, user_default
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, Job, LayoutRequest, ScriptFacts, limit_s, with_keys
from hpc_gpt.core.settings.experiment_file import ExperimentFile
from hpc_gpt.core.settings.program_text import command_faults
from hpc_gpt.core.settings.resolved import Resolved, folder_name
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.stored import experiment_text
from hpc_gpt.core.slurm.directives import OF_JOB, OF_SITE, quote_directive
from hpc_gpt.core.slurm.requeue import is_not_requeued, requeue_of
from hpc_gpt.core.slurm.sbatch_words import Option, Sizes, array_numbers, options_of_variables, read_options, sizes_of
from hpc_gpt.core.slurm.script_lines import directives_of_srun
from hpc_gpt.core.slurm.start_check import whole_node_partition
from hpc_gpt.core.tables import close_matches
from hpc_gpt.core.typed_tables import check_tables, read_tables
from hpc_gpt.launcher.prepared import PreparedRun, SbatchRequest
from hpc_gpt.launcher.render import render_job_script
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.script_variables import hash_variables
from hpc_gpt.planner.prediction import Prediction
from hpc_gpt.trainer.program.job_script import (
    LEFT_OUT,
    JobScript,
    check_options,
    find_resume,
    last_values,
    read_job_script,
    scan,
    submits_itself,
    without_suffix,
    without_waits,
)
from hpc_gpt.trainer.program.script_steps import gpus_of_steps

_OF_FLUX = re.compile(rb"^#[ \t]*flux:", re.MULTILINE | re.IGNORECASE)
# {key of [job]: the option of sbatch that it is}.
_OPTION_OF = {**OF_JOB, "cpus_per_task": "cpus-per-task"}
# {option of a profile: options that request the same}; the profile adds it unless the script or the command line has
# one of them, or the option itself.
_SAME_REQUEST = {"mem": ("mem-per-cpu", "mem-per-gpu"), "exclusive": ("oversubscribe",)}
_SIZES = {"layout.nodes": "nodes", "layout.gpus": "gpus"}
_TRAIN_KEYS = ("train.steps", "train.hang_multiple", "train.hang_floor_s", "train.minutes")
# Tables with keys that a job script takes.
_TABLES = ("job", "command", *SERVICES)


def prepare_script_of_file(
    request: Request, profile: ClusterProfile, file: ExperimentFile, experiment: Experiment, given_keys: Collection[str]
) -> PreparedRun:
    """The run of an experiment from a file that names a script in `command.script`. Its keys of [job] and [layout]
    count as options of the command line."""
    if request.smoke:
        engine_named(experiment.engine.name).refuse_program("it cannot be made small from here", "submit it")
    command = experiment.command
    assert command.script is not None
    raise_faults(command_faults("command.args", command.args))
    call = ScriptRequest(Path(command.script), command.args)
    ours = [key for key in given_keys if key.partition(".")[0] in _TABLES or key in (*_SIZES, *_TRAIN_KEYS)]
    stated = {key: getattr(getattr(experiment, key.partition(".")[0]), key.partition(".")[2]) for key in ours}
    whole = replace(request, overrides=stated | request.overrides)
    return _prepare_script(whole, profile, call, file, experiment.name)


def prepare_script_of_line(request: Request, profile: ClusterProfile, call: ScriptRequest) -> PreparedRun:
    """The run of a script that the command line names. Raises ConfigError."""
    return _prepare_script(request, profile, call)


def _prepare_script(
    request: Request,
    profile: ClusterProfile,
    call: ScriptRequest,
    file: ExperimentFile | None = None,
    name: str | None = None,
) -> PreparedRun:
    """The run of a script. If the `file` of an experiment names the script, the run has the experiment's `name`. Raises
    ConfigError."""
    script = read_job_script(call.path)
    tables, faults = _keys(request.overrides)
    job, of_profile = tables["job"], tables.pop("profile")
    checked, of_values = read_tables({**of_profile, "name": profile.name}, ClusterProfile, "--set")
    raise_faults([*faults, *of_values])
    profile = replace(profile, **{key: getattr(checked, key) for key in of_profile})
    is_local = profile.scheduler == "local"
    by_variable = [] if is_local else options_of_variables(os.environ)
    on_line = [*by_variable, *_sbatch_options(job, request.overrides), *job.get("sbatch", ()), *call.options]
    options = list(read_options(on_line))
    check_options(options, "the command line")
    left_out = [*script.left_out, *(option for option in options if option not in without_waits(options))]
    options = without_waits(options)
    if not (script.options or options):
        raise _without_request(script, call)
    no_profile = request.cluster is None and user_default() is None
    added = [] if is_local or no_profile else _added_by(profile, last_values(script.options, options))
    values = last_values(list(read_options(added)), script.options, options)
    sizes, counted_by = _with_gpus(sizes_of(values), values, script, profile, no_profile)
    chain = profile.chain
    for option in (*script.options, *options):
        chain = profile.chain if option.name == "requeue" else "none" if option.name == "no-requeue" else chain
    title = values.get("job-name") or call.path.name
    if "job-name" not in values:
        options.append(Option("job-name", title, (f"--job-name={title}",)))
    values = {**values, "job-name": title}
    on_line = [word for option in options for word in option.argv]
    experiment = _experiment(name or folder_name(without_suffix(title)), tables, values, sizes, call)
    lead = _lead(experiment.job, profile, values.get("time"))
    experiment = with_keys(experiment, {"job.signal_lead_s": lead})
    resolved = _resolve(experiment, replace(profile, chain=chain), sizes, values, script)
    owned = ["--output=%x-%j.out", "--error=%x-%j.out", "--open-mode=append", requeue_of(resolved.cluster).flag]
    directives = [*map(quote_directive, added), *script.directives]
    directives += [" ".join(map(quote_directive, option.argv)) for option in options]  # an option a line
    directives += owned if is_local or values.get("signal") or lead is None else [*owned, f"--signal=B:USR2@{lead}"]
    text = render_job_script(resolved, script.data, call.arguments, directives)
    array = _array(values.get("array"))
    findings = _findings(script, resolved, call.arguments, left_out, values)
    return PreparedRun(
        resolved,
        text,
        file.text if file is not None else experiment_text(resolved, f"From {call.path.name}, which runs as it is."),
        (*(f"note: {finding}" for finding in findings), *counted_by, *_notes(resolved, script, added, bool(array))),
        Prediction("a script of your own"),
        file=file.path if file is not None else None,
        job_script=SbatchRequest(tuple(on_line), tuple(array), _provenance(script)),
        copies=request.copies,
        force=request.force,
    )


def _without_request(script: JobScript, call: ScriptRequest) -> ConfigError:
    """The refusal of a script that requests nothing, as the command line does."""
    if (line := submits_itself(script)) is not None:
        return ConfigError(
            f"{call.path} submits a job itself, in line {line.line}: {line.text}; it has no #SBATCH lines itself",
            "name the script that it submits, or start it with bash",
        )
    hint = "if it is a job script, give its size: hpc-gpt submit --nodes=1 …"
    if of_srun := directives_of_srun(script.data.decode(errors="replace")):
        hint = "\n".join(["its srun would ask for a job of its own: write its sizes below the first line", *of_srun])
    if _OF_FLUX.search(script.data):
        hint = "its #flux lines are for flux batch: write them as #SBATCH lines, or submit it with flux"
    return ConfigError(f"{call.path} has no #SBATCH lines, and the command line no options of sbatch", hint)


def _keys(overrides: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Fault]]:
    """Returns (the overrides as keys of `job`, `command`, `train` and of the `profile`; the fault of each key that a
    script does not use)."""
    faults = list[Fault]()
    tables: dict[str, dict[str, Any]] = {
        "job": {},
        "command": {},
        "train": {},
        "profile": {},
        **{name: {} for name in SERVICES},
    }
    of_profile = [entry.name for entry in fields(ClusterProfile)]
    for key, value in overrides.items():
        table, dot, name = key.partition(".")
        if key in _SIZES or value is None:
            continue
        if not dot and key in of_profile:
            tables["profile"][key] = value
        elif table in _TABLES or key in _TRAIN_KEYS:
            tables[table][name] = value
        else:
            taken = "--set takes keys of [job], [command], [notify], train.steps, and the profile's"
            hint = close_matches(key, of_profile) or taken
            faults.append(Fault(f"{key} is not for a job script, which runs as it is", hint, keys=(key,)))
    for name in ("run", "per", "setup", "resume", "snapshot", "link"):
        if name in tables["command"]:
            faults.append(Fault(f"command.{name} is not for a job script, which runs as it is", "leave it out"))
    return tables, faults


def _sbatch_options(job: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """The keys of [job] and [layout] as options of sbatch."""
    options = [f"--{option}={job[key]}" for key, option in _OPTION_OF.items() if key in job]
    options += ["--exclusive"] if job.get("exclusive") else []
    return options + [f"--{name}={overrides[key]}" for key, name in _SIZES.items() if overrides.get(key) is not None]


def _added_by(profile: ClusterProfile, present: Mapping[str, str | None]) -> list[str]:
    """The options of a profile that are not `present` in the script or on the command line."""
    options = []
    for name in (*OF_SITE, "exclusive"):
        value = getattr(profile, name)
        if value and not {name, *_SAME_REQUEST.get(name, ())} & set(present):
            options.append(f"--{name}" if value is True else f"--{name}={value}")
    for option in without_waits(read_options(profile.sbatch)):
        if option.name not in present:
            options += option.argv
    return options


def _experiment(
    name: str, keys: Mapping[str, Any], values: Mapping[str, str | None], sizes: Sizes, call: ScriptRequest
) -> Experiment:
    """The experiment that stands for the script. Values that Slurm alone decides are not checked."""
    job, command = keys["job"], keys["command"]
    texts = {key: hide_secrets(text) for key, option in OF_JOB.items() if (text := values.get(option))}
    of_chain = {key: value for key, value in job.items() if key not in (*_OPTION_OF, "exclusive", "sbatch")}
    folder = Path(values.get("chdir") or command.get("workdir") or ".").expanduser().absolute()
    arguments = hide_words(call.arguments)
    where = {"script": str(call.path.absolute()), "workdir": str(folder), "snapshot": False, "args": arguments}
    tables = {"command": {**command, **where}, "job": {**texts, **of_chain}, "train": {"steps": 0, **keys["train"]}}
    tables |= {table: keys[table] for table in SERVICES}
    checked = check_tables({"name": name, **tables}, Experiment, call.path.name)
    layout = LayoutRequest(gpus=max(1, sizes.gpus) * sizes.nodes, nodes=sizes.nodes)
    job_kept = replace(checked.job, exclusive="exclusive" in values or None)
    return replace(checked, engine=Engine(name="command"), layout=layout, job=job_kept)


def _with_gpus(
    sizes: Sizes, values: Mapping[str, str | None], script: JobScript, profile: ClusterProfile, no_profile: bool
) -> tuple[Sizes, tuple[str, ...]]:
    """(the sizes with the GPUs that a job without a request for GPUs has, a note on them): the GPUs of its srun lines,
    else the profile's of a node, if the job gets whole nodes."""
    if sizes.gpus or profile.scheduler == "local":
        return sizes, ()
    gpus, line = gpus_of_steps(script.data.decode(errors="replace"), values)
    by = f"by srun in line {line}"
    has_gpus = not no_profile and profile.device not in (None, "cpu")
    if not gpus and has_gpus and (whole := _whole_nodes(values)):
        gpus, by = profile.gpus_per_node, f"by profile {profile.name}, as {whole} gives whole nodes"
    if not gpus:
        return sizes, ()
    return replace(sizes, gpus=gpus), (f"note: counts {gpus} GPUs on each node, {by}",)


def _whole_nodes(values: Mapping[str, str | None]) -> str:
    """The option or the partition that gives a job whole nodes; empty if none does, or Slurm does not answer."""
    if "exclusive" in values:
        return "" if values["exclusive"] in ("user", "mcs", "topo") else "--exclusive"
    return whole_node_partition(values.get("partition"), values.get("clusters"))


def _resolve(
    experiment: Experiment,
    profile: ClusterProfile,
    sizes: Sizes,
    values: Mapping[str, str | None],
    script: JobScript,
) -> Resolved:
    """The settings of the run. Only the profile's keys for the job chain count, not its modules or variables."""
    bare = ClusterProfile(
        name=profile.name,
        scheduler=profile.scheduler,
        device=profile.device,
        gpus_per_node=max(1, sizes.gpus),
        gpu_flag="gres" if sizes.gpus else "none",
        chain=profile.chain,
        signal_lead_s=profile.signal_lead_s,
        retry_pause_s=profile.retry_pause_s,
        bad_node_hours=profile.bad_node_hours,
        python=profile.python,
    )
    if profile.scheduler == "local" and sizes.nodes > 1:
        raise ConfigError(f"the script requests {sizes.nodes} nodes, but this is one machine", "add --nodes=1")
    options = {key: values.get(key.replace("_", "-")) for key in ("signal", "output", "error", "open_mode")}
    return resolve(experiment, bare, script=ScriptFacts(script.body_hash, sizes.tasks, **options))


def _lead(job: Job, profile: ClusterProfile, time: str | None) -> int | None:
    """Seconds of the signal before the time limit; None if the job is too short for a signal."""
    lead, limit = profile.signal_lead_s if job.signal_lead_s is None else job.signal_lead_s, None
    with contextlib.suppress(ConfigError):
        limit = limit_s(time)
    if limit is not None and lead >= limit and job.signal_lead_s is not None:
        raise ConfigError(f"job.signal_lead_s {lead} s takes all of the time limit {time}", "use less")
    return None if lead < 1 or (limit is not None and lead >= limit) else lead


def _array(text: str | None) -> list[int]:
    if text is None:
        return []
    if not (numbers := array_numbers(text)):
        raise ConfigError(f"--array={text} is not a list of numbers", "for example --array=0-9%4")
    return numbers


def _findings(
    script: JobScript,
    resolved: Resolved,
    arguments: Sequence[str],
    left_out: Sequence[Option],
    values: Mapping[str, str | None],
) -> tuple[str, ...]:
    """The notes for the user on lines of the script and on the command line."""
    findings = [f"{script.path.name}: {finding}" for finding in scan(script)]
    for option in script.options:
        folder = os.path.dirname(option.value or "") if option.name in ("output", "error") else ""
        if folder and "%" not in folder and not Path(resolved.program.workdir, folder).is_dir():
            where = f"{folder}, the folder of --{option.name}, does not exist"
            findings.append(f"{where}: with plain sbatch the job would die at once; the run's own log has the output")
    if (image := values.get("environment")) and resolved.cluster.scheduler == "slurm":
        findings.append(
            f"--environment={hide_secrets(image)} starts the whole job in that image, and the job chain with it, which "
            "needs Slurm's commands and this Python there: give --environment to srun in the script instead"
        )
    limit, lead_s = values.get("time"), resolved.cluster.signal_lead_s
    if limit and resolved.job.signal_lead_s is None and values.get("signal") is None and lead_s > 0:
        findings.append(
            f"--time={limit} is not above signal_lead_s, {lead_s} s: the script gets no signal before it is killed"
        )
    if resolved.cluster.scheduler == "local" and values.get("array"):
        findings.append("the elements of the array run one after the other, and submit waits for the last one")
    if ours := [word for word in arguments if word in ("--wait", "--checkpoints", "--set")]:
        findings.append(f"{ours[0]} is after {script.path.name}, so it goes to the script")
    findings += [f"{option.argv[0]} is left out: {LEFT_OUT[option.name]}" for option in left_out]
    return tuple(findings)


def _notes(resolved: Resolved, script: JobScript, added: Sequence[str], is_array: bool) -> tuple[str, ...]:
    """The notes on the options that the profile adds to the script, and on the signs of progress for the job chain."""
    notes = [f"note: profile {resolved.cluster.name} adds {shlex.join(hide_words(added))}"] if added else []
    if is_not_requeued(resolved):
        notes.append(
            "note: no job follows this one, which has --no-requeue: its time limit, a preemption or a dead node "
            "ends the run"
        )
    pattern = resolved.program.checkpoints
    if pattern is not None and (inside := _checkpoints_inside(Path(resolved.program.workdir, pattern))):
        notes.append(f"note: {pattern} is a folder, which shows no progress; --checkpoints '{pattern}/{inside}' does")
    elif pattern is not None:
        notes.append(f"note: the job chain sees progress by the checkpoints {pattern}")
        if is_array and "%a" not in pattern:
            notes.append(
                "note: HPC_GPT_RESUME_FROM is not set, as all elements of the array share these checkpoints: %a in the "
                "pattern is the element's index"
            )
    elif not requeue_of(resolved.cluster).why_not(resolved.cluster):
        seen = "progress is seen by the printed steps, or by --checkpoints 'out/step-*'"
        if (resume := find_resume(script)) is not None:
            notes.append(f"note: line {resume[0]} resumes by {resume[1]}, if that loads the newest checkpoint; {seen}")
        else:
            none = "no line of it resumes: if the program does not load by itself, each start begins at step 0"
            notes.append(f"note: {none}; {seen}")
    return tuple(notes)


def _checkpoints_inside(folder: Path) -> str:
    """The pattern of the numbered names in a folder, if several names differ in a number alone; else empty."""
    try:
        patterns = Counter(re.sub(r"\d+(?=\D*$)", "*", name) for name in os.listdir(folder) if re.search(r"\d", name))
    except OSError:
        return ""
    ((pattern, count),) = patterns.most_common(1) or [("", 0)]
    return pattern if count > 1 else ""


def _provenance(script: JobScript) -> dict[str, Any]:
    """The table of the script, and of its folder, which is not copied: the commit, and the files that differ from
    it."""
    folder = Path.cwd()
    sha, changed = git_state(folder, ".")
    table: dict[str, Any] = {"path": str(script.path.absolute()), "body": script.body_hash, "folder": str(folder)}
    table |= {"git_sha": sha, "git_dirty": changed}
    table["variables"] = hash_variables(script.data.decode(errors="replace"), os.environ)
    if changed:
        table["changes"] = _changes(folder)
    return {"script": table}


def _changes(folder: Path) -> list[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [hide_secrets(line) for line in done.stdout.splitlines()[:100]]
