"""The checks of `hpc-gpt doctor` on this machine. Each returns results: ok, warn or fail, and what to do.

Also runs the preflight of a run on this machine.
"""

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TextIO

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable, UserError
from hpc_gpt.core.files import data_dir, logs_folder, state_dir, write_once
from hpc_gpt.core.format import counted
from hpc_gpt.core.machine.find_gpus import ask_gpus, has_gpus
from hpc_gpt.core.network import GLOO, HSN, NCCL, check_open_files, describe_interfaces
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.clients import ask
from hpc_gpt.core.slurm.environment import has_sbatch
from hpc_gpt.core.slurm.start_check import check_reachable
from hpc_gpt.core.tables import close_matches
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.doctor.site import Site, SlurmPartition, read_site
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.services import build_fault, lacking_packages
from hpc_gpt.launcher.submission import dry_run
from hpc_gpt.trainer.preflight.nodes import Preflight
from hpc_gpt.trainer.preflight.verdict import SKEW_BAD_S, SKEW_WARN_S

Level = Literal["ok", "warn", "fail"]
_FEATURE = re.compile(r"[A-Za-z_][\w.+-]*")
# File systems that belong to one machine.
_OWN_DISKS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Check:
    """The result of a check. `hint`: what to do if the level is not ok."""

    name: str
    level: Level
    words: str
    hint: str = ""


def check_all(request: Request, profile: ClusterProfile, probe: bool) -> list[Check]:
    """Makes every check of the site for what `request` would submit. `probe`: also starts the ranks on this machine."""
    logs = logs_folder()
    checks = []
    script, resolved = "", None
    try:
        prepared = prepare(request)
    except UserError as fault:
        checks.append(Check("experiment", "fail", " ".join(str(fault).split()), fault.hint))
    else:
        resolved, script = prepared.resolved, prepared.script
        nodes = counted(resolved.nodes, "node")
        what = "its job script as it is" if resolved.script is not None else str(resolved.layout)
        checks.append(Check("experiment", "ok", f"{resolved.name}: {what} on {nodes} of {profile.name}"))
        lacking = "; ".join(f"{key}: {text}" for key, text in profile.lacks(resolved.job).items())
        if lacking and resolved.script is None:
            hint = f'give an option of submit, or the key in a profile of your own with extends = "{profile.name}"'
            checks.append(Check("profile", "warn", f"from documentation, not tried there; it lacks {lacking}", hint))
    checks += _check_scheduler(resolved, script, profile)
    checks += check_versions(profile, resolved)
    if resolved is not None:
        checks += [*check_gpus_here(resolved), check_network(resolved), *check_files(resolved)]
        if resolved.train.init is not None:
            checks.append(check_init(resolved))
    folders = {"logs": logs, "data": data_dir(), "state": state_dir()}
    checks += check_folders(folders, shared=profile.scheduler == "slurm")
    checks += guarded("clock", lambda: check_clock(logs))
    if resolved is not None and profile.scheduler == "local" and (probe or has_gpus()):
        checks += guarded("probe", lambda: probe_here(resolved, logs, sys.stderr))
    elif probe:
        hint = "a job probes the nodes of a cluster: --set job.preflight=true, or preflight = true in the profile"
        checks.append(Check("probe", "warn", "this machine cannot probe the nodes of a cluster", hint))
    return checks


def _check_scheduler(resolved: Resolved | None, script: str, profile: ClusterProfile) -> list[Check]:
    """Checks that Slurm answers, has what the job asks for, and would take the script."""
    if profile.scheduler != "slurm":
        return [Check("slurm", "ok", f"profile {profile.name} is this machine and needs no Slurm")]

    def reach() -> list[Check]:
        try:
            check_reachable()
        except SlurmUnreachable as fault:
            fault.hint = _where_to_run() if has_sbatch() else fault.hint
            raise
        return [Check("slurm", "ok", f"slurmctld answers, {ask(['sbatch', '--version']).stdout.strip()}")]

    answers = guarded("slurm", reach)
    if answers[0].level == "fail" or resolved is None:
        return answers

    def compare() -> list[Check]:
        site = read_site()
        return [*check_profile(resolved, site), *check_signals(site.config)]

    start = guarded("sbatch", lambda: [_check_start(resolved, script)])
    return [*answers, *guarded("profile", compare), *start]


def _where_to_run() -> str:
    """The advice if there is an sbatch here, but no controller answers."""
    config = os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")
    if not Path(config).is_file():
        return f"{config} is missing: run doctor on a login node, or name the cluster's file in SLURM_CONF"
    return f"run doctor on a login node of the cluster of {config}, once scontrol ping says that slurmctld is UP"


def check_signals(config: Mapping[str, str]) -> list[Check]:
    """Warns if a signal for an attempt can reach the next one; `config` is the answer of `scontrol show config`.

    If a signal gets no answer within MessageTimeout, slurmctld repeats it 60 s later. A step that is being ended
    answers after KillWait at most, and a requeued job, which has the same step, waits cred_expire seconds before it
    starts.
    """
    patterns = {"KillWait": r"(\d+)", "MessageTimeout": r"(\d+)", "AuthInfo": r"cred_expire=(\d+)"}
    matches = [re.search(pattern, config.get(key, "")) for key, pattern in patterns.items()]
    if not all(matches):  # without a value cred_expire is 120, which is long enough
        return []
    kill_wait, timeout, expires = (int(match[1]) for match in matches if match)
    if kill_wait <= timeout or expires >= timeout + 60:
        return []
    message = (
        f"cred_expire is {expires} s and KillWait {kill_wait} s is above MessageTimeout {timeout} s: Slurm can repeat "
        "an attempt's signal when the next one already runs, which then goes back to the queue once more"
    )
    hint = f"ask for cred_expire={timeout + 60} or more, or a MessageTimeout above KillWait"
    return [Check("signals", "warn", message, hint)]


def _check_start(resolved: Resolved, script: str) -> Check:
    start = dry_run(resolved, script)
    answer = " ".join(start.answer.split())
    if start.waits:
        return Check("sbatch", "warn", f"{answer}; it cannot start now", start.waits)
    return Check("sbatch", "ok", answer)


def guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Makes a check and returns its results; a UserError or OSError becomes a result."""
    try:
        return check()
    except UserError as fault:
        return [Check(name, "fail", " ".join(str(fault).split()), fault.hint)]
    except OSError as fault:
        return [Check(name, "fail", f"{fault.filename or name}: {fault.strerror}", "can you read and write there?")]


def check_versions(profile: ClusterProfile, resolved: Resolved | None) -> list[Check]:
    """Checks that the Python of the jobs has what the run's engine needs, and warns if its PyTorch is not a build for
    the profile's device."""
    packages = engine_named(resolved.engine.name).packages if resolved is not None else ()
    python, lacking = lacking_packages(profile, packages)
    if lacking:
        return [Check("versions", "fail", f"{lacking[0]} is missing in {python}", "pip install 'hpc-gpt[train]' there")]
    fault = build_fault(profile) if profile.scheduler == "slurm" else ""
    hint = "install that build in the environment of the jobs, or name another in "
    return [Check("torch", "warn", fault, f"{hint}the profile")] if fault else []


def check_gpus_here(resolved: Resolved) -> list[Check]:
    gpus, fault = ask_gpus()
    if fault and resolved.cluster.scheduler == "local":
        refused = "a run on this machine is refused until that is known, unless --now starts it"
        return [Check("gpus", "warn", f"it is not known which GPUs are here: {fault}", refused)]
    if gpus:
        kinds = [(gpu["name"], "" if gpu["memory_gib"] is None else f" {gpu['memory_gib']} GiB") for gpu in gpus]
        names = ", ".join(dict.fromkeys(name + memory for name, memory in kinds))
        return [Check("gpus", "ok", f"{len(gpus)} here: {names}")]
    if resolved.cluster.scheduler == "local" and resolved.cluster.device not in (None, "cpu"):
        device = resolved.cluster.device
        tool = "nvidia-smi" if device not in DEVICES or DEVICES[device].cuda else "amd-smi"
        return [Check("gpus", "fail", f"none here, but the profile is for {device}", f"see {tool}")]
    where = "ranks run on CPU" if resolved.cluster.scheduler == "local" else "a login node needs none"
    return [Check("gpus", "ok", f"none here; {where}")]


def check_network(resolved: Resolved) -> Check:
    """Reports what gloo and NCCL will use. Only the nodes know their interfaces, so the run's log has them."""
    variables = resolved.cluster.environment
    chosen = {GLOO: "lo" if resolved.cluster.scheduler == "local" else "each node's interface to the first node"}
    chosen |= {NCCL: HSN} if resolved.cluster.is_slingshot else {}
    return Check("network", "ok", describe_interfaces({**chosen, **variables}))


def check_files(resolved: Resolved) -> list[Check]:
    """Checks that rank 0 may open as many files as it needs; it is not known how many another program needs."""
    if runs_program(resolved):
        return []
    try:
        return [Check("files", "ok", check_open_files(resolved.gpus))]
    except ConfigError as fault:
        # The limit of the job's first node counts, where it is checked again.
        level: Level = "warn" if resolved.cluster.scheduler == "slurm" else "fail"
        return [Check("files", level, str(fault), fault.hint)]


def check_init(resolved: Resolved) -> Check:
    """Checks that our model and transformers' compute the same logits from the folder that the run begins from."""
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        return Check("weights", "warn", f"not compared: no {missing[0]} here", "pip install 'hpc-gpt[train]'")
    # Both models in fp32, and 1 GiB for torch.
    needed_gib = (2 * 4 * resolved.model.params + 2**30) / 2**30
    free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if needed_gib > free_gib:
        message = f"not compared: two models in fp32 need {needed_gib:.0f} GiB, {free_gib:.0f} are free"
        return Check("weights", "warn", message, "run doctor on a machine with more memory")
    command = [sys.executable, "-m", "hpc_gpt.trainer.compare_init"]
    done = subprocess.run(command, input=resolved.to_json(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("weights", "fail", f"the comparison with transformers failed: {last[:200]}", "see hpc_gpt.trainer")
    return Check("weights", **json.loads(done.stdout.splitlines()[-1]))


def check_folders(folders: Mapping[str, Path], shared: bool) -> list[Check]:
    """Checks that each folder can be written and, if nodes must share it, is not on a file system of this machine
    alone."""
    checks = []
    for name, folder in folders.items():
        try:
            _write_in(_nearest_existing(folder))
        except OSError as fault:
            hint = "set HPC_GPT_LOGS, HPC_GPT_DATA or HPC_GPT_STATE to a folder that you can write"
            checks.append(Check(name, "fail", f"{folder} cannot be written: {fault.strerror}", hint))
            continue
        asks = ["stat", "--file-system", "--format=%T", str(_nearest_existing(folder))]
        kind = subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip()
        if shared and kind in _OWN_DISKS:
            hint = "no node sees it: choose a folder on a shared file system"
            checks.append(Check(name, "warn", f"{folder} is on a {kind} of this machine", hint))
        else:
            checks.append(Check(name, "ok", f"{folder} can be written ({kind or 'unknown file system'})"))
    return checks


def check_clock(folder: Path) -> list[Check]:
    """Compares this machine's clock with the clock of the file server, which stamps files as they are written."""
    place = _nearest_existing(folder)
    before = time.time()
    stamp = _write_in(place)
    off = max(before - stamp, stamp - time.time(), 0.0)
    text = f"within {max(off, 0.1):.1f} s of the clock of the file system at {place}"
    if off < SKEW_WARN_S:
        return [Check("clock", "ok", text)]
    level: Level = "fail" if off >= SKEW_BAD_S else "warn"
    return [Check("clock", level, text, "is chronyd or ntpd running here and on the file server?")]


def check_profile(resolved: Resolved, site: Site) -> list[Check]:
    """Checks that the partition, account, qos, features and GPUs per node that the job asks for exist."""
    job, checks = resolved.job, []
    names = [name for name in (job.partition or "").split(",") if name]
    for name in names:
        checks.append(_check_name("partition", name, list(site.partitions)))
    partitions = [site.partitions[name] for name in names if name in site.partitions]
    partitions = partitions or [choice for choice in site.partitions.values() if choice.is_default]
    for partition in partitions:
        if not partition.is_up:
            state = partition.settings.get("State", "unknown")
            checks.append(Check("partition", "fail", f"{partition.name} is {state}", "choose another with --partition"))
    for key, value, existing in (("account", job.account, site.accounts), ("qos", job.qos, site.qos)):
        if value is not None and existing:
            checks.append(_check_name(key, value, list(existing)))
    for feature in _FEATURE.findall(job.constraint or ""):
        checks.append(_check_name("constraint", feature, sorted(site.features)))
    return checks + _check_gpus_asked(resolved, partitions)


def _check_gpus_asked(resolved: Resolved, partitions: list[SlurmPartition]) -> list[Check]:
    profile = resolved.cluster
    kinds = [kind for partition in partitions for kind in partition.kinds]
    if profile.gpu_flag == "none" or not kinds:
        return []
    most = max(kind.gpus for kind in kinds)
    if most < resolved.ranks_per_node:
        text = f"asks for {counted(resolved.ranks_per_node, 'GPU')} on a node, and the nodes have {most}"
        hint = f"set gpus_per_node = {most} in the profile" if most else "choose another with --partition"
        return [Check("gpus_per_node", "fail", text, hint)]
    types = sorted({kind.gpu_type for kind in kinds if kind.gpu_type})
    if profile.gpu_type and profile.gpu_type not in types:
        gpu_types = ", ".join(types) or "none"
        return [Check("gpu_type", "fail", f"no node has {profile.gpu_type}", f"known here: {gpu_types}")]
    return [Check("gpus_per_node", "ok", f"asks for {resolved.ranks_per_node} of the {most} GPUs of a node")]


def _check_name(what: str, name: str, existing: list[str]) -> Check:
    if name in existing:
        return Check(what, "ok", name)
    hint = close_matches(name, existing) or f"known: {', '.join(existing) or 'none'}"
    return Check(what, "fail", f"no {what} {name!r} for you here", hint)


def _nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _write_in(folder: Path) -> float:
    """Writes a file and deletes it; returns the time that the file system gave it."""
    path = folder / f".hpc-gpt-doctor.{os.getpid()}.{secrets.token_hex(2)}"
    try:
        with open(path, "xb") as file:
            file.write(b"doctor\n")
            file.flush()
            os.fsync(file.fileno())
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def probe_here(resolved: Resolved, logs: Path, out: TextIO) -> list[Check]:
    """Runs the preflight of a run on this machine: starts its ranks for some seconds and measures them.

    Its folder under `logs` is removed at the end. Writes the figures to `out` as a table. Raises OSError if the folder
    cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=".hpc-gpt-doctor-", dir=_nearest_existing(logs)))
    try:
        write_once(folder / "resolved.json", resolved.to_json())
        run = RunFolder(folder)
        attempt = run.new_attempt()
        node = platform.node()
        command = [
            "env", f"HPC_GPT_RUN={folder}", f"HPC_GPT_ATTEMPT={attempt.number}", "GLOO_SOCKET_IFNAME=lo",
            sys.executable, "-m", "hpc_gpt.trainer.preflight.probe", node, str(resolved.ranks_per_node),
            sys.executable, "-m", "hpc_gpt.trainer.preflight.rank",
        ]  # fmt: skip
        preflight = Preflight(run, attempt.number, [node], command, host="127.0.0.1")
        preflight.judge()
        preflight.write_table(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not preflight.findings:
        ranks = counted(resolved.ranks_per_node, "rank")
        return [Check("probe", "ok", f"{ranks} measured here in {preflight.took_s:.1f} s")]
    return [
        Check("probe", "fail" if finding.node or finding.ended else "warn", finding.words, "see the table")
        for finding in preflight.findings
    ]
