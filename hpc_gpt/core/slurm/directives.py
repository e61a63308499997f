"""The options of sbatch and srun, and the `#SBATCH` lines of a job: their texts, the values that they cannot hold, and
the lines of a given script.

The options are those of Slurm 22.05, and newer ones that ask for GPUs. A profile, an experiment or a user's own script
may have any of them. Code that refuses, ignores or translates an option says so itself.
"""

import contextlib
import functools
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hpc_gpt.core.errors import Fault, gathered
from hpc_gpt.core.files import read_start
from hpc_gpt.core.secrets import hide_secrets, hide_words
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Job, limit_s
from hpc_gpt.core.settings.resolved import JOB_NAME_BYTES, Resolved
from hpc_gpt.core.slurm.requeue import requeue_of

# Names with their letters, in three lists: options with a value, with an optional value, without a value.
_BOTH = (
    """account/A acctg-freq bb bbf begin/b chdir/D clusters/M cluster-constraint comment constraint/C container context
    core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot dependency/d distribution/m
    error/e exclude/x export extra-node-info/B gid gpu-bind gpu-freq gpus/G gpus-per-node gpus-per-socket gpus-per-task
    gres gres-flags hint input/i job-name/J licenses/L mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nodefile/F nodelist/w nodes/N ntasks/n ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket ntasks-per-tres open-mode output/o partition/p power prefer priority profile qos/q reservation
    segment signal sockets-per-node switches thread-spec threads-per-core time/t time-min tmp tres-bind tres-per-node
    tres-per-task uid wckey""",
    "exclusive nice no-kill/k propagate x11",
    """contiguous help hold/H overcommit/O oversubscribe/s quiet/Q reboot spread-job usage use-min-nodes verbose/v
    version/V""",
)
_OPTIONS = {
    "sbatch": (
        _BOTH[0] + " array/a batch export-file kill-on-invalid-dep wait-all-nodes wrap",
        _BOTH[1] + " get-user-env",
        _BOTH[2] + " ignore-pbs no-requeue parsable requeue test-only wait/W",
    ),
    "srun": (
        _BOTH[0] + " accel-bind bcast bcast-exclude cpu-bind epilog het-group jobid mpi msg-timeout prolog relative/r"
        " slurmd-debug task-epilog task-prolog threads/T wait/W",
        _BOTH[1] + " compress immediate/I kill-on-bad-exit/K resv-ports send-libs",
        _BOTH[2] + " debugger-test disable-status/X exact interactive label/l multi-prog no-allocate/Z overlap"
        " preserve-env/E pty quit-on-interrupt test-only unbuffered/u whole",
    ),
}
# {other name that getopt accepts: the option}.
_ALIASES = {
    "cluster": "clusters", "tasks-per-node": "ntasks-per-node", "cpu_bind": "cpu-bind", "pack-group": "het-group",
}  # fmt: skip
# {key of [job]: the option of sbatch with the same text}, in the order of a script's directives.
OF_JOB = {
    "name": "job-name",
    **{key: key for key in ("account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude",
                            "comment", "dependency", "mem", "time")},
}  # fmt: skip
# The keys among them that depend on the site: they are keys of a profile, too.
OF_SITE = ("partition", "account", "qos", "constraint", "reservation", "mem", "time")
OptionKind = Literal["valued", "optional", "plain"]


class Options(NamedTuple):
    """The options of a command: {long name: whether it takes a value}, and {letter: long name}."""

    kinds: dict[str, OptionKind]
    letters: dict[str, str]

    def named(self, name: str) -> str:
        """The long name for which `name` is an alias or an unambiguous abbreviation, by getopt; else `name` itself.

        >>> sbatch = options_of("sbatch")
        >>> sbatch.named("part"), sbatch.named("ntask"), sbatch.named("cluster")
        ('partition', 'ntask', 'clusters')
        """
        if name in self.kinds or name in _ALIASES:
            return _ALIASES.get(name, name)
        longer = {_ALIASES.get(long, long) for long in (*self.kinds, *_ALIASES) if name and long.startswith(name)}
        return min(longer & set(self.kinds)) if len(longer) == 1 and longer <= set(self.kinds) else name


def options_table(valued: str, optional: str, plain: str) -> Options:
    """The options in three lists, each with words `name` or `name/letter`."""
    options = Options({}, {})
    kinds: tuple[tuple[OptionKind, str], ...] = (("valued", valued), ("optional", optional), ("plain", plain))
    for kind, entries in kinds:
        for entry in entries.split():
            name, _, letter = entry.partition("/")
            options.kinds[name] = kind
            if letter:
                options.letters[letter] = name
    return options


@functools.cache
def options_of(command: Literal["sbatch", "srun"]) -> Options:
    """The options of sbatch or of srun."""
    return options_table(*_OPTIONS[command])


def is_job_script(path: Path) -> bool:
    """Whether a file begins with `#!`."""
    with contextlib.suppress(OSError, ValueError):
        return read_start(path, 2) == b"#!"
    return False


_ASKS_FOR_GPUS = re.compile(r"^#SBATCH\s.*?(?:--gpus\b|--gpus-per-|--gres[= ]\S*gpu|-G\s?\d)", re.MULTILINE)


def asks_for_gpus(script: Path) -> bool:
    """Whether a job script has a directive for GPUs; False if it cannot be read."""
    try:
        return _ASKS_FOR_GPUS.search(script.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


_FLAG = re.compile(r"-[A-Za-z]|-[A-Za-z].+|--[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# {flag that the script sets itself: the key that sets its value, None without one}.
_OWNED_SBATCH = {
    **{option: f"job.{key}" for key, option in OF_JOB.items()},
    "cpus-per-task": "job.cpus_per_task", "nodes": "layout.nodes", "gpus": "layout.gpus",
    **dict.fromkeys(("gres", "gpus-per-node"), "the profile's gpu_flag and gpu_type"), "signal": "job.signal_lead_s",
    **dict.fromkeys(("requeue", "no-requeue"), "the profile's chain"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus-per-task", "output", "error", "open-mode", "export", "wrap",
                     "array", "wait", "parsable", "quiet", "test-only")),
}  # fmt: skip
_OWNED_SRUN = dict.fromkeys(("ntasks", "nodes", "ntasks-per-node", "export", "kill-on-bad-exit"))
_GPUS_OF_A_TASK = re.compile(r"--gpus-per-task=(?:\w+:)?(\d+)")
# {flag without such a key: why it cannot be added}.
_WHY = {
    "gpus-per-task": "--ntasks-per-node already starts one task per GPU; if a rank is to see its own GPU alone, give "
    "srun the option",
    **dict.fromkeys(("output", "error"), "all output goes to attempts/<n>/log"),
    "export": "the ranks need the whole environment of the job",
}  # fmt: skip
# These directives come after those of the size.
_LATER = ("mem", "time")
DIRECTIVE = "#SBATCH"
BLANKS = " \t\n\v\f\r"  # C's isspace
JOB_NAME = "--job-name="


def job_faults(job: Job, profile: ClusterProfile, has_forecast: bool = True) -> Iterator[Fault]:
    """The faults of values that a directive, a file pattern or the script cannot hold. `job`: [job] over the profile's
    values. Before the run `has_forecast`, a time limit is not compared with the signal's lead, of which that says more.
    """
    messages = [*_text_faults(job, profile), *_owned_faults("job.sbatch", "sbatch", job.sbatch, _OWNED_SBATCH)]
    messages += [*_owned_faults("job.srun", "srun", job.srun, _OWNED_SRUN), *_environment_faults(profile)]
    of_time, limit, lead, spares = list[Fault](), None, job.signal_lead_s, job.spare_nodes or 0
    with gathered(of_time):
        limit = limit_s(job.time)
    messages += [fault.message for fault in of_time]
    if lead is not None and lead < 1:
        messages.append(f"job.signal_lead_s is {lead}, but must be at least 1")
    elif has_forecast and limit is not None and lead is not None and lead >= limit:
        messages.append(
            f"job.signal_lead_s {lead} s leaves nothing of job.time {job.time} ({limit} s): "
            "the job would save and go back to the queue at once"
        )
    if spares < 0:
        messages.append(f"job.spare_nodes is {spares}, but must not be negative")
    elif spares and not job.preflight and profile.scheduler == "slurm":
        messages.append(f"job.spare_nodes is {spares}, but job.preflight is off, which alone finds nodes to replace")
    if job.cpus_per_task is not None and job.cpus_per_task < 1:
        messages.append(f"job.cpus_per_task is {job.cpus_per_task}, but must be at least 1")
    hint = "change the key in the experiment, the cluster profile or with --set"
    for message in messages:
        yield Fault(message, hint)


def sbatch_directives(resolved: Resolved) -> list[str]:
    """The text after `#SBATCH` in each line, quoted. Without the faults of `job_faults`."""
    job, profile = resolved.job, resolved.cluster
    lines: list[str] = []
    texts = {key: f"--{option}={quote_directive(value)}" for key, option in OF_JOB.items()
             if (value := getattr(job, key)) is not None}  # fmt: skip
    lines += [text for key, text in texts.items() if key not in _LATER]
    lines += [f"--nodes={allocated_nodes(resolved)}", f"--ntasks-per-node={resolved.ranks_per_node}"]
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpu_flag == "gres":
        lines.append("--gres=" + quote_directive(f"gpu:{kind}{resolved.ranks_per_node}"))
    elif profile.gpu_flag == "gpus-per-node":
        lines.append("--gpus-per-node=" + quote_directive(f"{kind}{resolved.ranks_per_node}"))
    cpus = cpus_per_task(resolved)
    if cpus is not None:
        lines.append(f"--cpus-per-task={cpus}")
    lines += [text for key, text in texts.items() if key in _LATER]
    if job.exclusive:
        lines.append("--exclusive")
    lines += [requeue_of(profile).flag, *(["--no-kill"] if outlives_nodes(resolved) else []), "--open-mode=append"]
    # Without job.time the partition's limit counts, and Slurm sends the signal before that.
    if job.signal_lead_s is not None and (job.time is None or limit_s(job.time) is not None):
        lines.append(f"--signal=USR2@{job.signal_lead_s}")
    # Not in the run folder, which may not exist yet: a job whose output cannot be opened dies without a message.
    lines.append("--output=%x-%j.out")
    lines += [quote_directive(flag) for flag in job.sbatch]
    return lines


def restarts_in_job(resolved: Resolved) -> bool:
    """Whether the run's failed attempts may be retried in their job."""
    wanted = resolved.job.restart_in_job
    return resolved.script is None if wanted is None else wanted


def outlives_nodes(resolved: Resolved) -> bool:
    """Whether the job continues without a dead node: a spare takes its place in the next attempt. If the script's node
    is dead, `scontrol requeue` is needed, and Slurm's clients on the other nodes; else the job ends."""
    profile = resolved.cluster
    return bool(
        resolved.job.spare_nodes and restarts_in_job(resolved) and profile.chain == "requeue" and not profile.container
    )


def allocated_nodes(resolved: Resolved) -> int:
    """The number of nodes to request: the layout's and the spare nodes."""
    return resolved.nodes + (resolved.job.spare_nodes or 0)


def quote_directive(text: str) -> str:
    """Quotes a value of a directive. sbatch reads quotes like a shell, but removes a backslash even within them."""
    return shlex.quote(text.replace("\\", "\\\\"))


def cpus_per_task(resolved: Resolved) -> int | None:
    """The CPUs per rank: as requested, else a GPU's share of the node, else None."""
    if resolved.job.cpus_per_task is not None:
        return resolved.job.cpus_per_task
    if resolved.cluster.cpus_per_node is None:
        return None
    return max(1, resolved.cluster.cpus_per_node // resolved.cluster.gpus_per_node)


def _text_faults(job: Job, profile: ClusterProfile) -> Iterator[str]:
    texts: dict[str, str | None] = {f"job.{name}": getattr(job, name) for name in OF_JOB}
    texts |= {f"job.sbatch[{i}]": flag for i, flag in enumerate(job.sbatch)}
    texts |= {f"job.srun[{i}]": flag for i, flag in enumerate(job.srun)}
    where = f"cluster profile {profile.name}"
    texts |= {f"{where}: {name}": getattr(profile, name) for name in ("gpu_type", "venv", "python", "node_suffix")}
    for name in ("setup", "modules"):
        texts |= {f"{where}: {name}[{i}]": line for i, line in enumerate(getattr(profile, name))}
    if profile.container is not None:
        texts[f"{where}: container.image"] = profile.container.image
        texts |= {f"{where}: container.mounts[{i}]": mount for i, mount in enumerate(profile.container.mounts)}
    for key, flags in {"job.sbatch": job.sbatch, "job.srun": job.srun}.items():
        if hide_words(flags) != list(flags):
            yield f"{key} holds what looks like a secret, which job.sh and the run folder would keep"
    for key, text in texts.items():
        if text is None:
            continue
        if hide_secrets(text) != text:
            yield f"{key} holds what looks like a secret, which job.sh and the run folder would keep"
        if bad := _control_character(text):
            yield f"{key} holds {bad}, which a line of the script cannot carry: {text!r}"
        elif text == "" and key not in (f"{where}: node_suffix", "job.comment"):
            yield f"{key} is empty; leave it out instead"
    if job.name and (bad_chars := sorted(set(job.name) & set("%\\/"))):
        yield (
            f"job.name {job.name!r} holds {' and '.join(bad_chars)}, which the output's name %x-%j.out cannot carry "
            "(job.name is the experiment's name unless set)"
        )
    if job.name and (size := len(job.name.encode("utf-8", "surrogatepass"))) > JOB_NAME_BYTES:
        yield f"job.name has {size} bytes, but the output's name %x-%j.out carries {JOB_NAME_BYTES} of it"
    if profile.container is not None and profile.scheduler == "local":
        yield f"{where} is this machine, where ranks run without a container"
    if profile.container is not None and profile.container.kind == "environment" and profile.container.mounts:
        yield f"{where}: container.mounts is not for kind environment, whose EDF has the mounts"
    if profile.container is not None and profile.container.kind == "pyxis":
        for i, mount in enumerate(profile.container.mounts):
            if "," in mount:
                yield f"{where}: container.mounts[{i}] {mount!r} holds a comma, which separates mounts in pyxis"


def _control_character(text: str) -> str:
    """A description of the first character that no directive can carry; empty without one."""
    for char in text:
        if char == "\n":
            return "a newline"
        if char == "\0":
            return "a NUL"
        if ord(char) < 32 or ord(char) == 127:
            return f"the control character {char!r}"
        if 0xD800 <= ord(char) <= 0xDFFF:
            return "bytes that are not UTF-8"
    return ""


def _owned_faults(
    where: str, command: Literal["sbatch", "srun"], flags: Sequence[str], owned: Mapping[str, str | None]
) -> Iterator[str]:
    letters = options_of(command).letters
    for i, flag in enumerate(flags):
        key = f"{where}[{i}]"
        if not _FLAG.fullmatch(flag):
            yield f"{key} {hide_secrets(flag)!r} is not a flag of {command}: write one --name or --name=value each"
            continue
        name = flag[2:].partition("=")[0] if flag.startswith("--") else letters.get(flag[1], flag[1])
        gpus = _GPUS_OF_A_TASK.fullmatch(flag)
        if name == "gpus-per-task" and name not in owned and (gpus is None or gpus[1] != "1"):
            yield f"{key} {hide_secrets(flag)!r} is not for you to add: a rank has one GPU, --gpus-per-task=1"
        if name in owned:
            yield f"{key} {hide_secrets(flag)!r} is not for you to add: {_why_owned(name, owned)}"


def hides_gpus(flag: str) -> bool:
    """Whether an option of srun shows each task some of the job's GPUs only: one of a node's ranks does with its own
    GPU, and the one task of a node does not.

    >>> hides_gpus("--gpus-per-task=1"), hides_gpus("--gpu-bind=closest"), hides_gpus("--gpu-bind=none")
    (True, True, False)
    """
    name, _, value = flag.partition("=")
    return name in ("--gpus-per-task", "--gpu-bind", "--tres-bind") and value.rpartition(":")[2] != "none"


def _why_owned(name: str, owned: Mapping[str, str | None]) -> str:
    return f"set {owned[name]}" if owned[name] else _WHY.get(name, "the script decides it itself")


def why_not_added(name: str) -> str:
    """The reason why an option of sbatch, by its long name, cannot be added to our scripts; empty if it can."""
    return _why_owned(name, _OWNED_SBATCH) if name in _OWNED_SBATCH else ""


def _environment_faults(profile: ClusterProfile) -> Iterator[str]:
    for name, value in profile.environment.items():
        where = f"cluster profile {profile.name}: environment.{name}"
        if not _NAME.fullmatch(name):
            yield f"{where!r} is not a valid name of a variable"
        elif "\0" in value:
            yield f"{where} holds a NUL, which no variable can carry"


def is_command(line: str) -> bool:
    """Whether sbatch stops reading directives at a line: its first character that is not a blank is not `#`."""
    text = line.strip(BLANKS)
    return bool(text) and not text.startswith("#")


def script_directives(script: str) -> list[str]:
    """The directives of a script: the text after `#SBATCH`, up to the first command, at which sbatch stops reading.

    >>> script_directives("#!/bin/bash\\n#SBATCH --nodes=2\\n  # more\\n#SBATCH-n4\\ntrue\\n#SBATCH --nodes=3\\n")
    ['--nodes=2', '-n4']
    """
    head = itertools.takewhile(lambda line: not is_command(line), script.split("\n"))
    return [line.removeprefix(DIRECTIVE).strip(BLANKS) for line in head if line.startswith(DIRECTIVE)]


def directives_but_name(script: str) -> list[str]:
    """The directives without the job's name; scripts with equal ones can become one array."""
    return [line for line in script_directives(script) if not line.startswith(JOB_NAME)]
