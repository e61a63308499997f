"""Cluster profiles: the settings that a site needs for its jobs.

A profile is one TOML file, shipped or in the user's config folder.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hpc_gpt.core.errors import ConfigError, Fault, raise_faults
from hpc_gpt.core.files import clusters_dir, config_dir, site_dir
from hpc_gpt.core.secrets import hide_secrets, is_secret_variable
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.core.tables import close_matches, flat, merge_tables, read_toml
from hpc_gpt.core.typed_tables import read_tables

FALLBACK = "generic-slurm"
WARM = "warm"
# Each of these keys names a job's Python. Without all of them it is the Python that submits.
_WITH_PYTHON = ("venv", "python", "container", "archive")

# The ways to get another job; hpc_gpt/core/slurm/requeue.py has a class for each.
Chain = Literal["none", "requeue", "singleton"]


@dataclass(frozen=True)
class Container:
    """`[container]`: the image that the ranks run in."""

    kind: Literal["pyxis", "apptainer", "environment"]
    "How ranks start in it: srun's options of pyxis, apptainer (or singularity) exec, or srun --environment."
    image: str
    'Container image; for example "/images/torch.sqsh"; of kind environment the EDF\'s name or path.'
    mounts: tuple[str, ...] = ()
    'Folders visible in the container, as HOST:CONTAINER; for example ["/scratch:/scratch"].'

    @property
    def by_srun(self) -> bool:
        """Whether options of srun start the container, not a command."""
        return self.kind != "apptainer"


@dataclass(frozen=True)
class MachineFigures:
    """`[machine]`: figures that the planner uses instead of those of the device and the fabric.

    An unknown device needs all but `network_gb_s`, `host_memory_gib`, `switched` and the latencies.
    """

    memory_gib: float | None = None
    "GPU memory that a program can use, in GiB; for example 79.3."
    peak_tflops: dict[str, float] | None = None
    "Dense peak of a GPU in TFLOP/s, by dtype; for example { bf16 = 312 }."
    memory_gb_s: float | None = None
    "Bandwidth of GPU memory, in GB/s of 1e9 bytes; for example 2039."
    node_gb_s: float | None = None
    "Bandwidth from a GPU to the others of its node, in GB/s in one direction; for example 300."
    switched: bool | None = None
    "Whether any two GPUs of a node can use all their links; false: each pair has a third, as on boards of four A100."
    network_gb_s: float | None = None
    "Bandwidth from a whole node to others, in GB/s in one direction; for example 100."
    host_gb_s: float | None = None
    "Bandwidth between a GPU and its host, in GB/s in one direction; for example 25."
    host_memory_gib: float | None = None
    "Memory of a node that a job gets, in GiB; for example 1862."
    node_latency_s: float | None = None
    "Latency of a message within a node, in seconds; for example 5e-6."
    network_latency_s: float | None = None
    "Latency of a message between nodes, in seconds; for example 1.5e-5."
    power_w: float | None = None
    "Power limit of a GPU in watts; for example 400."


@dataclass(frozen=True)
class Calibration:
    """`[calibration]`: the planner's constants for this cluster, which `hpc-gpt plan --calibrate` fits and writes."""

    constants: dict[str, float] = field(default_factory=dict)
    "Constants of the planner, by name; hpc-gpt plan --calibrate fits and writes them."
    rows: int = 0
    "Number of measured rows in the fit."
    mean_error: float | None = None
    "Mean error of the fit over these rows, as a share."
    residuals: dict[str, float] = field(default_factory=dict)
    "Error of each row: predicted / measured - 1."


def _planner_key() -> Any:
    """A key that only the planner, or the one who submits, reads: it does not change a run."""
    return field(default=None, metadata={"planner": True})


@dataclass(frozen=True)
class ClusterProfile:
    """The profile of one site. None: the site does not have it, or does not need it."""

    name: str
    "The file's name; not a key of the file."
    description: str = ""
    "Line in hpc-gpt profile list."
    scheduler: Literal["slurm", "local"] = "slurm"
    "Slurm, or this machine (local)."
    device: str | None = None
    'GPU model, which the planner needs; for example "a100-80g".'
    fabric: str | None = _planner_key()
    'Network between nodes: KIND, ports per node x Gbit/s per port; for example "infiniband 8x200G".'
    gpus_per_node: int = 4
    "GPUs per node, 1 or more; for example 8."
    cpus_per_node: int | None = None
    "CPUs per node as Slurm counts them; for example 128."
    gpu_flag: Literal["gres", "gpus-per-node", "none"] = "gres"
    "How GPUs are requested: --gres=gpu:N, --gpus-per-node=N, or not at all."
    gpu_type: str | None = None
    'GPU type in that request, --gres=gpu:TYPE:N; for example "a100".'
    partition: str | None = None
    "Default partition."
    account: str | None = None
    "Default account."
    qos: str | None = None
    "Default quality of service."
    constraint: str | None = None
    "Default features that nodes must have."
    reservation: str | None = None
    "Default reservation."
    time: str | None = None
    'Default time limit; for example "20:00:00".'
    mem: str | None = None
    'Default memory per node; for example "160G".'
    exclusive: bool = False
    "Whether a job has its nodes to itself."
    chain: Chain = "requeue"
    "How a run continues after a job: Slurm requeues it, jobs of one name wait for each other, or it does not."
    signal_lead_s: int = 120
    "Seconds before the time limit when Slurm sends its signal, so that a checkpoint is saved."
    retry_pause_s: int = 30
    "Seconds before the first retry; doubled with each failure in a row."
    preflight: bool = False
    "Whether every node is probed before the ranks start."
    spare_nodes: int = 0
    "Additional nodes to request, which replace those that fail the preflight."
    bad_node_hours: float = 24.0
    "Hours for which jobs exclude a node that failed; for example 24."
    setup: tuple[str, ...] = ()
    'Lines of bash that a job runs before it loads its modules; for example ["module use /appl/local/modules"].'
    modules: tuple[str, ...] = ()
    'Modules that a job loads; for example ["cuda/12.4"].'
    purge_modules: bool = True
    "Whether a job unloads all modules before it loads its own; false where Slurm or the compilers are modules."
    venv: str | None = None
    "Virtual environment that a job activates."
    python: str | None = None
    "Python interpreter of the ranks, if there is no venv."
    stage: str | None = None
    "Preparation of a node before its ranks start: warm reads the environment's libraries; a tar's path unpacks it."
    megatron_lm: str | None = None
    "Folder of a Megatron-LM checkout, for engine megatron-lm."
    container: Container | None = None
    "Container image that the ranks run in; see [container]."
    environment: dict[str, str] = field(default_factory=dict)
    "Variables that a job exports by value; ${NAME} is a variable of the job. Secrets it inherits from the shell."
    node_suffix: str = ""
    'Suffix that makes a node\'s short name its address; for example "-ib".'
    sbatch: tuple[str, ...] = ()
    "Further options for sbatch, for every job."
    srun: tuple[str, ...] = ()
    "Further options for srun, for every job."
    machine: MachineFigures | None = _planner_key()
    "Figures that replace those of device and fabric in the planner; see [machine]."
    calibration: Calibration | None = _planner_key()
    "Constants of the planner for this cluster; see [calibration]."
    to_add: dict[str, str] | None = _planner_key()
    "Keys that a profile from a site's documentation leaves to its user, each with what to give."

    @property
    def no_device(self) -> str:
        """The reason why no plan can be made for the profile; empty if it names a device."""
        return "" if self.device is not None else f"profile {self.name} names no device"

    @property
    def archive(self) -> str | None:
        """The tar in `stage` with the environment of the ranks, unpacked on each node."""
        return None if self.stage == WARM else self.stage

    def lacks(self, job: Any) -> dict[str, str]:
        """{key: what to give} of the keys in `to_add` that neither the profile nor the `job` of an experiment has."""

        def is_set(key: str) -> bool:
            keys = _WITH_PYTHON if key in _WITH_PYTHON else (key,)
            return any(getattr(at, one, None) for at in (self, job) for one in keys)

        return {key: text for key, text in (self.to_add or {}).items() if not is_set(key)}

    @property
    def is_slingshot(self) -> bool:
        """Whether its nodes are joined by Slingshot, whose interfaces are hsn0, hsn1 and so on."""
        return "slingshot" in (self.fabric or "").lower()

    @property
    def of_a_run(self) -> "ClusterProfile":
        """The profile as a run stores it: without the keys that only the planner reads. A Slingshot fabric stays,
        because it decides NCCL's interface."""
        unplanned: dict[str, Any] = dict.fromkeys(OF_THE_PLANNER)
        return replace(self, **unplanned | ({"fabric": self.fabric} if self.is_slingshot else {}))


OF_THE_PLANNER = tuple(entry.name for entry in fields(ClusterProfile) if "planner" in entry.metadata)


# The profile that the example for a user's own profile extends.
_EXAMPLE = "a100-80g-8"


def list_profiles() -> dict[str, Path]:
    """{name: file} of every profile, sorted. A user's profile replaces the site's of the same name, and that replaces
    a shipped one."""
    files: dict[str, Path] = {}
    for folder in (clusters_dir(), site_dir() / "clusters", config_dir() / "clusters"):
        files.update({path.stem: path for path in sorted(folder.glob("*.toml"))})
    return dict(sorted(files.items()))


def find_profile(name: str) -> Path:
    """The TOML file of a profile, given by its name or path. Raises ConfigError with close matches if there is none."""
    path = Path(name) if name.endswith(".toml") and Path(name).is_file() else list_profiles().get(name)
    if path is None:
        names = list(list_profiles())
        hint = close_matches(name, [*map(str, Path(name).parent.glob("*.toml")), *names])
        chosen = re.sub(r"[^A-Za-z0-9_.-]", "", Path(name).stem) or "NAME"
        file = config_dir() / "clusters" / f"{chosen}.toml"
        lines = f'extends = "{_EXAMPLE}"\npartition = "gpu"'
        of_device = ""
        if not hint and (device := device_named(name.lower()) or device_named(name)) is not None:
            of_device = f"that is a GPU: hpc-gpt plan --device {device} plans for usual nodes with it; "
            lines = f'extends = "generic-slurm"\ndevice = "{device}"\npartition = "gpu"'
        raise ConfigError(
            f"no cluster profile {name!r}",
            f"{hint} hpc-gpt profile list names all"
            if hint
            else f"{of_device}hpc-gpt profile detect --name {chosen} writes one, on its cluster; or write lines, with "
            f"your values, to {file}:\n{lines}",
        )
    return path


def load_profile(name: str, of_a_run: bool = False) -> ClusterProfile:
    """The profile that `find_profile` finds.

    Raises ConfigError with all faults of a file at once. `of_a_run`: an existing run was made with it, so too few CPUs
    and secrets are allowed.
    """
    path = find_profile(name)
    tables = _with_parent(path, ())
    tables["name"] = path.stem
    profile, faults = read_tables(tables, ClusterProfile, str(path), topic="profile")
    if not of_a_run:
        faults += _site_faults(profile, str(path), {key for fault in faults for key in fault.keys})
    raise_faults([*faults, *_figure_faults(profile, str(path))])
    return profile


def _site_faults(profile: ClusterProfile, path: str, faulty: Collection[str]) -> Iterator[Fault]:
    """The faults of new runs: too few CPUs, secrets, a `stage` that no job can follow, unknown keys in `to_add`. The
    keys in `faulty` have a fault already."""
    cpus, gpus, stage = profile.cpus_per_node, profile.gpus_per_node, profile.stage
    if cpus is not None and cpus < gpus and "gpus_per_node" not in faulty:
        yield Fault(
            f"{path}: cpus_per_node is {cpus}, below gpus_per_node = {gpus}: there is a process for each GPU",
            "give all CPUs of a node, as Slurm counts them, or leave cpus_per_node out",
        )
    names = [name for name, value in profile.environment.items() if is_secret_variable(name, value)]
    hint = f"take it out and export {', '.join(names)} in the shell that submits: jobs and containers inherit it"
    if names and (option := _narrow_export(profile)):
        hint += f"; {option} of this profile would prevent that: take it out as well"
    for name in names:
        yield Fault(f"{path}: environment.{name} looks like a secret, which job.sh and the run folder would hold", hint)
    if stage not in (None, WARM) and not (stage.startswith("/") and stage.isprintable()):
        yield Fault(
            f'{path}: stage is {stage!r}, but must be "{WARM}" or the absolute path of a tar',
            'for example stage = "/project/me/environment.tar"',
        )
    if stage is not None and profile.container is not None:
        yield Fault(
            f"{path}: stage is {stage!r}, but the ranks' environment is in the image of [container]",
            "take stage or [container] out",
        )
    keys = [entry.name for entry in fields(ClusterProfile)]
    for key in profile.to_add or ():
        if key not in keys:
            near = close_matches(key, keys) or "take it out"
            yield Fault(f"{path}: to_add names {key}, which is not a key of a profile", near)


def _narrow_export(profile: ClusterProfile) -> str:
    """The profile's option for sbatch or srun that hides the shell's variables from a job; empty without one."""
    for key in ("sbatch", "srun"):
        for word, following in pairwise([*getattr(profile, key), ""]):
            option, equals, value = word.partition("=")
            value = value if equals else following
            if option == "--export" and "ALL" not in value.split(","):
                return f"{key} = {option}={hide_secrets(value)}"
    return ""


def _figure_faults(profile: ClusterProfile, path: str) -> Iterator[Fault]:
    """The faults of figures of [machine] or [calibration] that are not finite, of those of [machine] that are not above
    0, and of a node without a GPU."""
    if profile.gpus_per_node < 1:
        message = f"{path}: gpus_per_node is {profile.gpus_per_node}, but must be at least 1"
        yield Fault(message, "count the GPUs of one node")
    tables = {name: vars(table) for name in ("machine", "calibration") if (table := getattr(profile, name)) is not None}
    hint = "give the figures of a data sheet, or take the key out"
    for key, value in flat(tables).items():
        if value is not None and not math.isfinite(value):
            yield Fault(f"{path}: {key} is {value}, but must be a finite number", hint)
        elif value is not None and key.startswith("machine.") and value <= 0:
            yield Fault(f"{path}: {key} is {value}, but must be above 0", hint)


def _with_parent(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The profile's tables, which override those of the profile that it extends. A user's profile may extend the
    shipped one of the same name."""
    tables = read_toml(path)
    parent = tables.pop("extends", None)
    if parent is None:
        return tables
    shipped = clusters_dir() / f"{parent}.toml"
    extended = (
        shipped if path.resolve() != shipped.resolve() and shipped.is_file() else list_profiles().get(str(parent))
    )
    if extended is None or extended.resolve() in (*seen, path.resolve()):
        raise ConfigError(
            f"{path}: extends {parent!r}, but no other profile has that name",
            "name a profile that hpc-gpt profile lists",
        )
    return merge_tables(_with_parent(extended, (*seen, path.resolve())), tables)


def user_default() -> str | None:
    """The profile named by `cluster = "…"` in the user's `config.toml`, else in the site's; None without one."""
    for folder in (config_dir(), site_dir()):
        path = folder / "config.toml"
        if path.is_file() and (chosen := _default_in(path)) is not None:
            return chosen
    return None


def _default_in(path: Path) -> str | None:
    """The profile that a `config.toml` names; None if it names none."""
    settings = read_toml(path)
    hint = 'this file names your profile, cluster = "NAME"; the profile itself is clusters/NAME.toml beside it'
    known = ("cluster", "host", "hosts")
    faults = [
        Fault(f"{path}: unknown key {key}; {close_matches(key, known) or 'known here: ' + ', '.join(known)}", hint)
        for key in settings
        if key not in known
    ]
    chosen = settings.get("cluster")
    if chosen is not None and not isinstance(chosen, str):
        message = f"{path}: cluster must be the name of a profile, not {chosen!r}"
        faults.append(Fault(message, 'for example cluster = "local"'))
    raise_faults(faults)
    return chosen
