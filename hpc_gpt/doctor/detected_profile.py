"""A commented cluster profile from what Slurm says of a site."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from hpc_gpt.doctor.site import NodeKind, Partition, Site, threads_per_core
from hpc_gpt.errors import ConfigError
from hpc_gpt.job_time import limit_s
from hpc_gpt.settings.devices import DEVICES
from hpc_gpt.tables import close_matches

# A job that asks for less starts sooner; one that goes on by itself loses nothing.
_LONGEST_S = 24 * 3600


def choose_partition(site: Site, name: str | None) -> Partition:
    """The partition of that name; without one the default if it has GPUs, else the one with most nodes that have.

    ConfigError for a name that is none, or where there is no partition at all.
    """
    if name is not None:
        if name not in site.partitions:
            known = ", ".join(site.partitions)
            raise ConfigError(
                f"no partition {name!r} on {site.name}", close_matches(name, site.partitions) or f"known: {known}"
            )
        return site.partitions[name]
    if not site.partitions:
        raise ConfigError(f"{site.name} has no partition that you may see", "ask its administrators")
    return max(
        site.partitions.values(),
        key=lambda each: (each.is_up, each.is_default and bool(each.gpu_nodes), each.gpu_nodes),
    )


def choose_kind(partition: Partition) -> NodeKind | None:
    """The commonest kind of node with GPUs, else the commonest; None where the partition has no node."""
    return next((kind for kind in partition.kinds if kind.gpus), next(iter(partition.kinds), None))


def guess_device(kind: NodeKind) -> list[str]:
    """The devices of our table that the type or the features of a node name; several where its memory is not told."""
    text = " ".join([kind.gpu_type or "", *kind.features]).lower()
    words = set(re.split(r"[^a-z0-9]+", text))
    known = [name for name, device in DEVICES.items() if not device.nominal]
    of_family = [name for name in known if name.partition("-")[0] in words]
    for name in list(of_family):
        memory = re.search(r"-(\d+)g", name)
        if memory and words & {f"{memory[1]}{unit}" for unit in ("", "g", "gb", "go")}:
            return [name]
    return of_family


def chosen_words(site: Site, partition: Partition) -> list[str]:
    """What was chosen among what, a line each; empty where there was no choice."""
    lines = []
    others = [name for name, each in site.partitions.items() if name != partition.name and each.kinds]
    if others:
        lines.append(f"partition {partition.name}; --partition takes another: {', '.join(others)}")
    if len(partition.kinds) > 1:
        chosen = choose_kind(partition)
        lines.append(
            f"{partition.name} has {len(partition.kinds)} kinds of nodes; the profile is for the first that has GPUs:"
        )
        for kind, nodes in partition.kinds.items():
            lines.append(f"  {'*' if kind == chosen else ' '} {len(nodes)} nodes: {kind.words}")
    return lines


def profile_text(site: Site, partition: Partition) -> str:
    """The profile's TOML, each key with where it comes from. Nothing in it that Slurm did not say."""
    kind = choose_kind(partition)
    if kind is None:
        raise ConfigError(f"partition {partition.name} has no nodes", "name another with --partition")
    nodes = partition.kinds[kind]
    lines = [
        f"# {_plain(site.name)}, partition {_plain(partition.name)}, as sinfo, scontrol and sacctmgr describe it.",
        "# `hpc-gpt help keys` lists every key; `hpc-gpt doctor` checks this file against the cluster.",
        "",
        f"description = {_text(f'{site.name}, partition {partition.name}: {kind.words}')}",
        *_devices(kind),
        *_asking(kind, nodes[0]),
        *_partition(site, partition, kind),
        *_user(site, partition),
        *_time(partition),
        *_chain(site),
        "",
        "# Not to be learnt from Slurm: what joins the nodes, and how a job gets its Python.",
        '# fabric = "infiniband 4x200G"',
        '# modules = ["pytorch"]',
        '# venv = "/path/to/venv"',
        '# node_suffix = "-ib0"  # where a node is reached by another name than Slurm\'s',
        "# preflight = true      # probe every node before the ranks start",
    ]
    return "\n".join(lines) + "\n"


def _devices(kind: NodeKind) -> Iterable[str]:
    guessed = guess_device(kind)
    if len(guessed) == 1:
        yield f"device = {_text(guessed[0])}  # guessed from {_plain(kind.gpu_type or ','.join(kind.features))}"
    elif guessed:
        yield f"# device = {_text(guessed[0])}  # or {', '.join(guessed[1:])}: Slurm does not say which"
    elif kind.gpus:
        yield f"# device = …  # not to be told from the type or the features; one of {', '.join(DEVICES)}"
    else:
        yield 'device = "cpu"  # these nodes have no GPU'


def _asking(kind: NodeKind, node: str) -> Iterable[str]:
    if kind.gpus:
        yield f"gpus_per_node = {kind.gpus}"
        yield 'gpu_flag = "gres"  # --gres=gpu:N; "gpus-per-node" where the site prefers that'
    else:
        yield "gpus_per_node = 1  # ranks a node: these have no GPU"
        yield 'gpu_flag = "none"'
    if kind.gpu_type:
        yield f"gpu_type = {_text(kind.gpu_type)}"
    yield f"cpus_per_node = {kind.cpus}"
    threads = threads_per_core(node)
    if threads and threads > 1:
        yield f'# sbatch = ["--hint=nomultithread"]  # {threads} hardware threads a core are counted as CPUs'
    yield f"# mem = \"0\"  # all of a node's {kind.memory_mib / 1024:,.0f} GiB, where the site's own default is less"


def _partition(site: Site, partition: Partition, kind: NodeKind) -> Iterable[str]:
    yield f"partition = {_text(partition.name)}{'  # the default' if partition.is_default else ''}"
    others = [name for name, each in site.partitions.items() if name != partition.name]
    if others:
        yield f"# other partitions: {_plain(', '.join(others))}"
    alike = [each for each in partition.kinds if each != kind and each.gpus]
    own = [feature for feature in kind.features if not any(feature in each.features for each in alike)]
    if alike and own:
        yield f"constraint = {_text(own[0])}  # of the partition's kinds of nodes only this one has it"
    elif alike:
        yield f"# {len(alike)} other kinds of GPU nodes are in this partition, and no feature tells this one from them"
    elif kind.features:
        yield f"# constraint: its nodes offer {_plain(', '.join(kind.features))}"
    if partition.settings.get("OverSubscribe") == "EXCLUSIVE":
        yield "exclusive = true  # the partition gives whole nodes"


def _user(site: Site, partition: Partition) -> Iterable[str]:
    for key, names, allow in (("account", site.accounts, "AllowAccounts"), ("qos", site.qos, "AllowQos")):
        usable = partition.allowed(allow, names)
        if not names:
            yield f"# {key}: there is no accounting that says"
        elif not usable:
            yield f"# {key}: none of yours ({_plain(', '.join(names))}) may use this partition"
        else:
            more = f"  # or {_plain(', '.join(usable[1:]))}" if usable[1:] else ""
            yield f"{key} = {_text(usable[0])}{more}"


def _time(partition: Partition) -> Iterable[str]:
    most, usual = partition.settings.get("MaxTime", "UNLIMITED"), partition.settings.get("DefaultTime", "NONE")
    limit = _seconds(most)
    if _seconds(usual) is not None:
        chosen = usual
    elif limit is not None and limit <= _LONGEST_S:
        chosen = most
    else:
        chosen = "24:00:00"
    yield f"time = {_text(chosen)}  # the partition allows {_plain(most)}"


def _seconds(time: str) -> int | None:
    try:
        return limit_s(time)
    except ConfigError:
        return None


def _chain(site: Site) -> Iterable[str]:
    size = site.config.get("MaxArraySize")
    if site.config.get("JobRequeue") == "1":
        yield 'chain = "requeue"  # JobRequeue = 1'
        yield '# That compute nodes may call scontrol requeue is not to be seen from here; if not, "singleton".'
    else:
        yield 'chain = "singleton"  # JobRequeue = 0: a job is not put back into the queue, so its links are sent ahead'
        yield '# That compute nodes may call sbatch and scancel is not to be seen from here; if not, "none".'
    if size:
        yield f"# MaxArraySize = {_plain(size)}: a larger sweep is split"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)


def _plain(value: str | Sequence[str]) -> str:
    """As a comment can carry it: on one line."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", str(value))
