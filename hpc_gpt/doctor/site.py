"""What Slurm says of a site: its partitions and nodes, and what the user may charge and use."""

from __future__ import annotations

import getpass
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.errors import JobRefused, SlurmUnreachable
from hpc_gpt.launch.slurm.scheduler import ask

_GRES = re.compile(r"\bgpu(?::([^:(),]+))?:(\d+)")
_PAIR = re.compile(r"(\w[\w:]*)=(\S*)")


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike: their GPUs and the type that gres gives them, CPUs, memory and features."""

    gpus: int
    gpu_type: str | None
    cpus: int
    memory_mib: int
    features: tuple[str, ...]

    @property
    def words(self) -> str:
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        features = f", features {','.join(self.features)}" if self.features else ""
        return f"{self.gpus}{kind} GPUs, {self.cpus} CPUs, {self.memory_mib / 1024:,.0f} GiB{features}"


@dataclass(frozen=True)
class Partition:
    """One partition: `scontrol show partition` by key, and its nodes by kind, the commonest first."""

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
        """Those of `names` that AllowAccounts or AllowQos lets in."""
        allow = self.settings.get(what, "ALL").split(",")
        return [name for name in names if allow == ["ALL"] or name in allow]


@dataclass(frozen=True)
class Site:
    """A Slurm cluster as its user sees it. `accounts` and `qos`: the default first; empty without accounting."""

    name: str
    config: dict[str, str]
    partitions: dict[str, Partition]
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


def read_site() -> Site:
    """Asks scontrol, sinfo and sacctmgr. SlurmUnreachable where they do not answer."""
    config = {
        key.strip(): value.strip()
        for line in _said("scontrol", "show", "config").splitlines()
        for key, equals, value in [line.partition("=")]
        if equals
    }
    kinds: dict[str, dict[NodeKind, list[str]]] = {}
    features: set[str] = set()
    for line in _said("sinfo", "-h", "-N", "-o", "%N|%R|%c|%m|%G|%f").splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6:
            node, partition, cpus, memory, gres, offered = fields
            kind = _kind(cpus, memory, gres, offered)
            features |= set(kind.features)
            kinds.setdefault(partition, {}).setdefault(kind, []).append(node)
    partitions = {}
    for line in _said("scontrol", "--oneliner", "show", "partition").splitlines():
        settings = dict(_PAIR.findall(line))
        name = settings.get("PartitionName")
        if name:
            most_first = sorted(kinds.get(name, {}).items(), key=lambda each: -len(each[1]))
            partitions[name] = Partition(name, settings, dict(most_first))
    name = config.get("ClusterName", "cluster")
    accounts, qos = _of_user(name)
    return Site(name, config, partitions, accounts, qos, frozenset(features))


def threads_per_core(node: str) -> int | None:
    """Hardware threads of each core of a node; None where scontrol does not say."""
    found = re.search(r"\bThreadsPerCore=(\d+)", ask(["scontrol", "--oneliner", "show", "node", node]).stdout)
    return int(found[1]) if found else None


def _kind(cpus: str, memory: str, gres: str, features: str) -> NodeKind:
    counts: Counter[str | None] = Counter()
    for kind, count in _GRES.findall(gres):
        counts[kind or None] += int(count)
    gpu_type = counts.most_common(1)[0][0] if counts else None
    offered = () if features == "(null)" else tuple(sorted(features.split(",")))
    return NodeKind(counts[gpu_type], gpu_type, _number(cpus), _number(memory), offered)


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _of_user(cluster: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(accounts, qos) of the user on the cluster, the defaults first."""
    if shutil.which("sacctmgr") is None:
        return (), ()
    user = getpass.getuser()
    where = [f"cluster={cluster}", f"user={user}"]
    try:
        listed = ask(["sacctmgr", "-nP", "show", "assoc", *where, "format=Account,QOS,DefaultQOS"])
        default = ask(["sacctmgr", "-nP", "show", "user", user, *where[:1], "withassoc", "format=DefaultAccount"])
    except SlurmUnreachable:
        return (), ()
    if listed.code != 0:
        return (), ()
    accounts = default.stdout.split()[:1] if default.code == 0 else []
    qos: list[str] = []
    for line in listed.stdout.splitlines():
        account, _, rest = line.partition("|")
        usable, _, default_qos = rest.partition("|")
        accounts.append(account)
        qos = [name for name in [default_qos, *qos, *usable.split(",")] if name]
    return tuple(dict.fromkeys(filter(None, accounts))), tuple(dict.fromkeys(qos))


def _said(*command: str) -> str:
    answer = ask(list(command))
    if answer.code != 0:
        words = f"{command[0]}: {answer.sentence}"
        raise (
            SlurmUnreachable(words, "is slurmctld up?") if answer.unreachable else JobRefused(words, "is Slurm set up?")
        )
    return answer.stdout
