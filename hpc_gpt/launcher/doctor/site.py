"""Reads a site from Slurm (partitions, nodes, the user's accounts and qos), and writes a cluster profile from it.

Also lists the nodes that earlier runs found slow or broken.
"""

import contextlib
import getpass
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable, UserError
from hpc_gpt.core.format import counted, plain
from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.processes.slow_ranks import slow_ranks
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.slurm.clients import ask, default_account, sacctmgr_rows, slurm_config
from hpc_gpt.core.slurm.start_check import check_is_slurm, node_settings, usable_cpus
from hpc_gpt.core.tables import close_matches

_GRES = re.compile(r"\bgpu(?::([^:(),]+))?:(\d+)")
_PAIR = re.compile(r"(\w[\w:]*)=(\S*)")
# Names of devices in Slurm's gres or features that are not the device's own.
_SHORT = {"gh": "gh200", "mi250": "mi250x"}
_OF_CRAY = ("mi250x",)
_SLINGSHOT = re.compile(r"slingshot|cxi|hsn")
# The longest time that a profile gets: shorter jobs start sooner, and a job chain resumes by itself.
_LONGEST_S = 24 * 3600


@dataclass(frozen=True)
class NodeKind:
    """A kind of nodes: the number of GPUs and their type in gres, CPUs, memory and features."""

    gpus: int
    gpu_type: str | None
    cpus: int
    memory_mib: int
    features: tuple[str, ...]

    @property
    def text(self) -> str:
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        features = f", features {','.join(self.features)}" if self.features else ""
        return f"{self.gpus}{kind} GPUs, {self.cpus} CPUs, {self.memory_mib / 1024:,.0f} GiB{features}"


@dataclass(frozen=True)
class SlurmPartition:
    """One partition: its settings in `scontrol show partition`, and its nodes by kind, the most frequent kind
    first."""

    name: str
    settings: dict[str, str]
    kinds: dict[NodeKind, list[str]]

    @property
    def is_default(self) -> bool:
        return self.settings.get("Default") == "YES"

    @property
    def is_up(self) -> bool:
        return self.settings.get("State") == "UP"

    @property
    def gpu_nodes(self) -> int:
        return sum(len(nodes) for kind, nodes in self.kinds.items() if kind.gpus)

    def allowed(self, what: str, names: Sequence[str]) -> list[str]:
        """Selects the `names` that the partition's AllowAccounts or AllowQos (`what`) allows."""
        allow = self.settings.get(what, "ALL").split(",")
        return [name for name in names if allow == ["ALL"] or name in allow]


@dataclass(frozen=True)
class Site:
    """A Slurm cluster as its user sees it. `accounts`, `qos`: the default first; empty without accounting."""

    name: str
    config: dict[str, str]
    partitions: dict[str, SlurmPartition]
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()

    def is_slingshot(self, kind: NodeKind | None) -> bool:
        """Whether Slurm's switch plugin or a feature of the nodes names Slingshot or its cards."""
        features = kind.features if kind is not None else ()
        return any(_SLINGSHOT.search(text.lower()) for text in (self.config.get("SwitchType", ""), *features))


def read_site() -> Site:
    """Reads the site by scontrol, sinfo and sacctmgr. Raises SlurmUnreachable or JobRefused if they do not answer."""
    check_is_slurm()
    config = slurm_config()
    kinds: dict[str, dict[NodeKind, list[str]]] = {}
    features: set[str] = set()
    for line in _answer("sinfo", "-h", "-N", "-o", "%N|%R|%c|%m|%G|%f").splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6:
            node, partition, cpus, memory, gres, offered = fields
            kind = _kind(cpus, memory, gres, offered)
            features |= set(kind.features)
            kinds.setdefault(partition, {}).setdefault(kind, []).append(node)
    partitions = {}
    for line in _answer("scontrol", "--oneliner", "show", "partition").splitlines():
        settings = dict(_PAIR.findall(line))
        name = settings.get("PartitionName")
        if name:
            most_first = sorted(kinds.get(name, {}).items(), key=lambda kind_nodes: -len(kind_nodes[1]))
            partitions[name] = SlurmPartition(name, settings, dict(most_first))
    name = config.get("ClusterName", "cluster")
    accounts, qos = _of_user(name)
    return Site(name, config, partitions, accounts, qos, frozenset(features))


def _kind(cpus: str, memory: str, gres: str, features: str) -> NodeKind:
    counts: Counter[str | None] = Counter()
    for kind, count in _GRES.findall(gres):
        counts[kind or None] += int(count)
    gpu_type = counts.most_common(1)[0][0] if counts else None
    offered = () if features == "(null)" else tuple(sorted(features.split(",")))
    return NodeKind(counts[gpu_type], gpu_type, _number(cpus), _number(memory), offered)


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _of_user(cluster: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reads the user's (accounts, qos) on the cluster, defaults first; empty without accounting."""
    if shutil.which("sacctmgr") is None:
        return (), ()
    user, of = getpass.getuser(), f"cluster={cluster}"
    listed = sacctmgr_rows("assoc", of, f"user={user}", columns=("Account", "QOS", "DefaultQOS"))
    accounts = [default_account(user, of)] if listed else []
    qos: list[str] = []
    for account, usable, default_qos in listed:
        accounts.append(account)
        qos = [name for name in [default_qos, *qos, *usable.split(",")] if name]
    return tuple(dict.fromkeys(filter(None, accounts))), tuple(dict.fromkeys(qos))


def _answer(*command: str) -> str:
    answer = ask(list(command))
    if answer.code != 0:
        text = f"{command[0]}: {answer.sentence}"
        if answer.unreachable:
            raise SlurmUnreachable(text, "is slurmctld up?")
        raise JobRefused(text, "is Slurm set up?")
    return answer.stdout


# --- a commented cluster profile --------------------------------------------------------------------------------------


def choose_partition(site: Site, name: str | None) -> SlurmPartition:
    """Returns the named partition; without a name the default if it has GPUs, else the one with the most GPU nodes.

    Raises ConfigError for an unknown name, or if there is no partition.
    """
    if name is not None and name not in site.partitions:
        hint = close_matches(name, site.partitions) or f"known: {', '.join(site.partitions)}"
        raise ConfigError(f"no partition {name!r} on {site.name}", hint)
    if name is not None:
        return site.partitions[name]
    if not site.partitions:
        raise ConfigError(f"{site.name} has no partition that you may see", "ask its administrators")
    return max(
        site.partitions.values(),
        key=lambda choice: (choice.is_up, choice.is_default and bool(choice.gpu_nodes), choice.gpu_nodes),
    )


def choose_kind(partition: SlurmPartition) -> NodeKind | None:
    """The most frequent kind of node with GPUs, else the most frequent kind; None if the partition has no node."""
    return next((kind for kind in partition.kinds if kind.gpus), next(iter(partition.kinds), None))


def count_gpus(partition: SlurmPartition, gpus_per_node: int) -> int:
    """The most GPUs, or ranks, that one job can have on the partition's chosen kind of nodes."""
    kind = choose_kind(partition)
    most = partition.settings.get("MaxNodes", "")
    nodes = len(partition.kinds[kind]) if kind is not None else 0
    return gpus_per_node * (min(nodes, int(most)) if most.isdigit() else nodes)


def guess_device(kind: NodeKind, slingshot: bool = False) -> list[str]:
    """The known devices that a node's GPU type or features name; several if these do not tell the memory. `slingshot`:
    the nodes are HPE Cray EX, whose MI250 are all MI250X."""
    parts = set(re.split(r"[^a-z0-9]+", " ".join([kind.gpu_type or "", *kind.features]).lower()))
    for short, name in _SHORT.items():
        if short in parts and (slingshot or name not in _OF_CRAY):
            parts = parts - {short} | {name}
    of_family = [name for name, device in DEVICES.items() if not device.nominal and name.partition("-")[0] in parts]
    cards = {"pcie", "nvl"}
    of_family = [name for name in of_family if cards & {*name.split("-")} == cards & parts]
    for name in of_family:
        memory = re.search(r"-(\d+)g", name)
        if memory and any(re.fullmatch(rf"(hbm)?{memory[1]}(g|gb|go)?", part) for part in parts):
            return [name]
    return of_family


def choice_lines(site: Site, partition: SlurmPartition) -> list[str]:
    """Lines that name the chosen partition and kind of node, and the alternatives; empty if there are none."""
    lines = []
    others = [name for name, other in site.partitions.items() if name != partition.name and other.kinds]
    if others:
        lines.append(f"partition {partition.name}; --partition takes another: {', '.join(others)}")
    if len(partition.kinds) > 1:
        chosen = choose_kind(partition)
        lines.append(
            f"{partition.name} has {len(partition.kinds)} kinds of nodes; the profile is for the first one with GPUs:"
        )
        for kind, nodes in partition.kinds.items():
            lines.append(f"  {'*' if kind == chosen else ' '} {counted(len(nodes), 'node')}: {kind.text}")
    return lines


def profile_text(site: Site, partition: SlurmPartition) -> str:
    """Writes the profile's TOML, each key with its source in Slurm. Raises ConfigError if the partition has no
    nodes."""
    kind = choose_kind(partition)
    if kind is None:
        raise ConfigError(f"partition {partition.name} has no nodes", "name another with --partition")
    nodes = partition.kinds[kind]
    lines = [
        f"# {plain(site.name)}, partition {plain(partition.name)}, as sinfo, scontrol and sacctmgr describe it.",
        "# `hpc-gpt help profile` lists every key; `hpc-gpt doctor` checks this file against the cluster.",
        "",
        f"description = {_text(f'{site.name}, partition {partition.name}: {kind.text}')}",
        *_devices(site, kind),
        *_asking(kind, nodes[0]),
        *_partition(site, partition, kind),
        *_user(site, partition),
        *_time(partition),
        *_chain(site),
        "",
        "# Slurm does not say how a job gets its Python.",
        '# modules = ["pytorch"]',
        '# venv = "/path/to/venv"',
        '# node_suffix = "-ib0"  # if the network knows a node by another name than Slurm\'s',
        "# preflight = true      # probe every node before the ranks start",
        "",
        "# Slurm does not know the following either, and plan and init need it: correct it and remove the #.",
        *(f"# {line}" for line in lines_to_fill_in(site, partition)),
    ]
    return "\n".join(lines) + "\n"


def _devices(site: Site, kind: NodeKind) -> Iterable[str]:
    guessed = guess_device(kind, site.is_slingshot(kind))
    if len(guessed) == 1:
        yield f"device = {_text(guessed[0])}  # guessed from {plain(kind.gpu_type or ','.join(kind.features))}"
    elif not kind.gpus:
        yield 'device = "cpu"  # these nodes have no GPU'


def lines_to_fill_in(site: Site, partition: SlurmPartition) -> list[str]:
    """The lines of a partition's profile that its user must write, each with an example as its value."""
    kind = choose_kind(partition)
    is_slingshot = site.is_slingshot(kind)
    guessed = guess_device(kind, is_slingshot) if kind is not None else []
    fabric = "slingshot" if is_slingshot else "infiniband"
    lines = [f'fabric = "{fabric} 4x200G"  # ports of a node x Gbit/s; "nvlink" if every job has one node']
    if len(guessed) > 1:
        lines.insert(0, f"device = {_text(guessed[0])}  # or {', '.join(guessed[1:])}")
    elif not guessed and kind is not None and kind.gpus:
        lines.insert(0, f'device = "h100-80g"  # one of {", ".join(DEVICES)}')
    return lines


def _asking(kind: NodeKind, node: str) -> Iterable[str]:
    if kind.gpus:
        yield f"gpus_per_node = {kind.gpus}"
        yield 'gpu_flag = "gres"  # --gres=gpu:N; "gpus-per-node" if the site prefers that, "none" if it gives all'
    else:
        yield "gpus_per_node = 1  # ranks a node: these have no GPU"
        yield 'gpu_flag = "none"'
    if kind.gpu_type:
        yield f"gpu_type = {_text(kind.gpu_type)}"
    settings = node_settings([node]).get(node, {})
    cpus, threads = usable_cpus(settings) or kind.cpus, _number(settings.get("ThreadsPerCore", ""))
    yield f"cpus_per_node = {cpus}" + (f"  # of {kind.cpus}: the others are the system's" if cpus < kind.cpus else "")
    if threads > 1:
        with_hint = f"with it cpus_per_node = {cpus // threads}"
        yield f'# sbatch = ["--hint=nomultithread"]  # Slurm counts {threads} threads per core as CPUs; {with_hint}'
    yield f"# mem = \"0\"  # all of a node's {kind.memory_mib / 1024:,.0f} GiB, if the site's own default is less"


def _partition(site: Site, partition: SlurmPartition, kind: NodeKind) -> Iterable[str]:
    yield f"partition = {_text(partition.name)}{'  # the default' if partition.is_default else ''}"
    others = [name for name in site.partitions if name != partition.name]
    if others:
        yield f"# other partitions: {plain(', '.join(others))}"
    alike = [other_kind for other_kind in partition.kinds if other_kind != kind and other_kind.gpus]
    own_features = [
        feature for feature in kind.features if not any(feature in other_kind.features for other_kind in alike)
    ]
    if alike and own_features:
        yield f"constraint = {_text(own_features[0])}  # no other kind of GPU node in the partition has it"
    elif alike:
        yield f"# other kinds of GPU nodes in this partition: {len(alike)}; no feature tells this kind from them"
    elif kind.features:
        yield f"# constraint: its nodes offer {plain(', '.join(kind.features))}"
    if partition.settings.get("OverSubscribe") == "EXCLUSIVE":
        yield "exclusive = true  # the partition gives whole nodes"


def _user(site: Site, partition: SlurmPartition) -> Iterable[str]:
    for key, names, allow in (("account", site.accounts, "AllowAccounts"), ("qos", site.qos, "AllowQos")):
        usable = partition.allowed(allow, names)
        if not names:
            yield f"# {key}: not known, as Slurm has no accounting"
        elif not usable:
            yield f"# {key}: none of yours ({plain(', '.join(names))}) may use this partition"
        else:
            alternatives = f"  # or {plain(', '.join(usable[1:]))}" if usable[1:] else ""
            yield f"{key} = {_text(usable[0])}{alternatives}"


def _time(partition: SlurmPartition) -> Iterable[str]:
    most = partition.settings.get("MaxTime", "UNLIMITED")
    limit = None
    with contextlib.suppress(ConfigError):  # a form that sbatch does not take
        limit = limit_s(most)
    chosen = most if limit is not None and limit <= _LONGEST_S else "24:00:00"
    yield f"time = {_text(chosen)}  # the partition allows {plain(most)}; a QOS may allow less"


def _chain(site: Site) -> Iterable[str]:
    size = site.config.get("MaxArraySize")
    if site.config.get("JobRequeue") == "1":
        yield 'chain = "requeue"  # JobRequeue = 1'
        yield '# Use "singleton" if compute nodes may not call scontrol requeue; that cannot be checked here.'
    else:
        yield 'chain = "singleton"  # JobRequeue = 0: a job cannot be requeued, so all jobs of the chain are submitted'
        yield '# Use "none" if compute nodes may not call sbatch and scancel; that cannot be checked here.'
    if size:
        yield f"# MaxArraySize = {plain(size)}: a larger sweep is split"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)


_NEWEST_RUNS = 20


@dataclass(frozen=True)
class SlowNodeOfRun:
    """A node that a run found slow or broken, and the finding."""

    node: str
    run: str
    words: str


def slow_nodes_of_runs(logs: Path, cluster: str) -> list[SlowNodeOfRun]:
    """The slow nodes in heartbeats and preflights of the newest 20 runs on a cluster, each with its newest
    finding."""
    newest: dict[str, SlowNodeOfRun] = {}
    for run in _runs_on(logs, cluster):
        for attempt in run.attempts():
            for node, slow in slow_ranks(read_heartbeats(attempt.heartbeats)).nodes.items():
                newest[node] = SlowNodeOfRun(node, run.run_id, str(slow))
            for finding in read_stored(attempt.preflight).get("findings") or []:
                if node := finding.get("node"):
                    newest[node] = SlowNodeOfRun(node, run.run_id, f"preflight: {finding.get('words')}")
    return sorted(newest.values(), key=lambda slow_node: slow_node.node)


def _runs_on(logs: Path, cluster: str) -> list[RunFolder]:
    """The newest 20 runs on a cluster, oldest first."""

    def is_on(run: RunFolder) -> bool:
        try:
            return run.resolved().cluster.name == cluster
        except UserError:
            return False

    return [*islice(filter(is_on, reversed(list_runs(logs))), _NEWEST_RUNS)][::-1]
