"""The request that a command line makes: its cluster profile, its experiment, and the defaults without one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import FALLBACK, ClusterProfile, load_profile, user_default
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import Experiment, with_keys
from hpc_gpt.core.settings.experiment_file import (
    DEFAULT_EXPERIMENT,
    SMALL_EXPERIMENT,
    ExperimentFile,
    cut_warmup,
    gives_way,
    read_experiment,
)
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.slurm.environment import has_sbatch
from hpc_gpt.launcher.past_timings import PastTimings
from hpc_gpt.launcher.prepared import Copies
from hpc_gpt.launcher.until import Until
from hpc_gpt.planner.fast import with_fast_settings

if TYPE_CHECKING:
    from hpc_gpt.core.settings.grid import GridAxis

# Stands for the path of a file if no EXPERIMENT is given and the default of every key applies.
DEFAULTS = Path("the defaults")


@dataclass(frozen=True)
class ScriptRequest:
    """A job script of the command line: its file, its arguments, and the `options` for sbatch before it."""

    path: Path
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request by the command line. `given` has the keys that it gives, `overrides` also those that follow from them.

    `sized`: the size of the run, or a sweep's row, is given. `until` says how far a verb that submits trains, empty if
    that is not given; None for the other verbs. `grid` has the keys that `--grid` varies, over `row` if the file has
    rows. `device`: a plan is for nodes of this device, without a profile. The runs of a request share its `copies`, and
    `past`, the timings of earlier runs.
    """

    experiment: str
    cluster: str | None
    template: Path | None
    overrides: dict[str, Any]
    row: str | None = None
    sweep: bool = False
    smoke: bool = False
    force: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    names_experiment: bool = True
    sized: bool = True
    until: Until | None = None
    script: ScriptRequest | None = None
    grid: tuple[GridAxis, ...] = ()
    device: str | None = None
    copies: Copies = field(default_factory=Copies, compare=False, repr=False)
    past: PastTimings = field(default_factory=PastTimings, compare=False, repr=False)


def with_model_file(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with model.hf in place of model.preset if that names a file or a folder, or looks like a path."""
    name = keys.get("model.preset")
    if name is None or name.lower() in PRESETS:
        return {**keys}
    if not (Path(name).exists() or "/" in name or name.endswith(".json")):
        return {**keys}
    return {"model.hf" if key == "model.preset" else key: value for key, value in keys.items()}


def completed(overrides: Mapping[str, Any], names_experiment: bool) -> dict[str, Any]:
    """The overrides, with the keys that follow from them."""
    keys = dict(overrides)
    has_model = {"model.preset", "model.hf", "model.hidden"} & set(keys)
    if not names_experiment and keys.get("train.init") and not has_model:
        keys["model.hf"] = keys["train.init"]  # it gives the shape, as there is no EXPERIMENT
    return dict.fromkeys(gives_way(keys)) | keys


def with_small(request: Request, profile: ClusterProfile) -> Request:
    """The request with SMALL_EXPERIMENT, as large as the profile allows, if it gives neither EXPERIMENT nor a size.

    For the verbs that try a cluster. A request that only gives another engine stays: `requested_file` refuses it.
    """
    if request.names_experiment or request.sized or "engine.name" in request.overrides:
        return request
    from hpc_gpt.launcher.smoke import fit_small

    return replace(request, experiment=SMALL_EXPERIMENT, overrides=fit_small(profile) | request.overrides)


def requested_file(request: Request, profile: ClusterProfile, under: Mapping[str, Any] | None = None) -> ExperimentFile:
    """The file of EXPERIMENT, with the rows of the request's grid.

    Without EXPERIMENT it is the default experiment's file. If the request gives another model or engine, no file is
    read: the default of every key applies, overridden by a verb's own tables `under`. Raises ConfigError for another
    engine without a model, which has no default.
    """
    file = _without_grid(request, profile, under)
    if not request.grid:
        return file
    from hpc_gpt.core.settings.grid import with_grid

    return with_grid(file, request.grid, request.row)


def _refuse_program(name: str) -> None:
    """Raises ConfigError for a file of commands: a job script, or one that lacks #! at its beginning."""
    from hpc_gpt.core.slurm.sbatch_words import sizes_of
    from hpc_gpt.core.slurm.script_lines import directives_of_srun  # parses what no experiment has
    from hpc_gpt.trainer.program.job_script import last_values, read_job_script

    path = Path(name)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() and path.suffix != ".toml" else ""
    if text.startswith("#!"):
        sizes = sizes_of(last_values(read_job_script(path).options))
        hint = f"--model NAME --gpus {max(1, sizes.gpus) * sizes.nodes} plans such a model; submit runs the script"
        raise ConfigError(f"{name} is a job script: its program decides the model and the layout", hint)
    lines = directives_of_srun(text)
    if lines or re.search(r"^#SBATCH|^\s*(srun|torchrun|python3?|bash|accelerate|mpirun) ", text, re.MULTILINE):
        also = ", and its srun asks for a job of its own" if lines else ""
        hint = "begin it with #!/bin/bash" + (", and below that write srun's sizes as" if lines else "")
        raise ConfigError(f"{name} is not a job script: it does not begin with #!{also}", "\n".join([hint, *lines]))


def _without_grid(request: Request, profile: ClusterProfile, under: Mapping[str, Any] | None) -> ExperimentFile:
    try:
        file = read_experiment(request.experiment)
    except ConfigError:
        _refuse_program(request.experiment)
        raise
    if request.names_experiment or request.experiment != DEFAULT_EXPERIMENT:
        return file
    overrides = request.overrides
    sizes = [overrides.get(f"model.{name}") for name in ("hidden", "layers", "heads")]
    of_file = None
    if overrides.get("model.hf"):
        from hpc_gpt.core.weights.config import model_name  # only published weights need it

        of_file = model_name(Path(str(overrides["model.hf"])))
    name = overrides.get("model.preset") or of_file or (None if None in sizes else f"{sizes[1]}x{sizes[0]}")
    engine, usual = overrides.get("engine.name"), file.tables["engine"]["name"]
    if name is None and engine in (None, usual):
        return file
    if name is None and "model" not in (under or {}):
        raise ConfigError(
            f"no EXPERIMENT: {DEFAULT_EXPERIMENT} has engine {usual}, and with {engine} the defaults have no model",
            "add --model, for example --model gpt2, or name an EXPERIMENT",
        )
    if request.row is not None or request.sweep:
        option = "--sweep" if request.row is None else f"--row {request.row}"
        raise ConfigError(
            f"{option} needs an EXPERIMENT; --model gives none", f"name one, such as {DEFAULT_EXPERIMENT}"
        )
    tables = {"name": str(name or "default"), **(under or {})}
    if lacks_bf16(of_full_size(request, profile)) and "train.dtype" not in overrides:
        tables["train"] = {"dtype": "fp16"}
    if compiles(of_full_size(request, profile), overrides):
        tables["engine"] = {**tables.get("engine", {}), "compile": "block"}
    return ExperimentFile(DEFAULTS, "", tables, None, ((DEFAULTS, tables),))


def compiles(profile: ClusterProfile, overrides: Mapping[str, Any]) -> bool:
    """Whether a run without an experiment is compiled: on a known GPU that Triton supports (Ampere, the first with
    bf16, or newer), by an engine that can compile, unless the overrides decide it."""
    name = overrides.get("engine.name")
    can = name is None or (name in engines() and "compile" in engines()[name].switches)
    has_peaks = bool(profile.machine and profile.machine.peak_tflops)
    is_open = "engine.compile" not in overrides
    return (profile.device in DEVICES or has_peaks) and not lacks_bf16(profile) and can and is_open


def with_defaults(
    experiment: Experiment, profile: ClusterProfile, overrides: Mapping[str, Any], given_keys: Collection[str]
) -> tuple[Experiment, str]:
    """Returns (the experiment of a run without one, the reason for its batch).

    If it is compiled, by default and for CUDA, it has the fast settings that its model and engine take, except those
    that the overrides give. It has a global batch unless the `given_keys` have any size of the batch, or a plan has
    chosen it.
    """
    if is_fast(profile, overrides):
        shape, train = resolve_shape(experiment.model), experiment.train
        experiment = replace(experiment, engine=with_fast_settings(experiment.engine, shape, train, overrides))
    if {f"layout.{name}" for name in ("micro_batch", "micro_batches", "global_batch")} & set(given_keys):
        return experiment, ""
    if experiment.layout.global_batch is not None:
        return experiment, " as in plan"
    size, why = _default_batch(size_run(cut_warmup(experiment)[0], profile), profile)
    return with_keys(experiment, {"layout.global_batch": size}), why


def is_fast(profile: ClusterProfile, overrides: Mapping[str, Any]) -> bool:
    """Whether a run without an experiment has fast settings."""
    device = DEVICES.get(profile.device or "")
    return device is not None and device.cuda and compiles(profile, overrides)


def _default_batch(sized: Sized, profile: ClusterProfile) -> tuple[int, str]:
    """Returns (the global batch of a run without one, the reason for it).

    It is the batch of `plan`; ranks without a GPU have one sample each, so that a step ends soon.
    """
    from hpc_gpt.planner.best_plan import usual_batch

    dp, usual = sized.layout.dp, usual_batch(sized.model.seq, sized.gpus)
    on_gpus = profile.device is not None or profile.gpu_flag != "none"
    if not on_gpus and profile.scheduler == "local":
        from hpc_gpt.core.machine.find_gpus import has_gpus  # loads much that a job script does not need

        on_gpus = has_gpus()
    if not on_gpus:
        reason = "they have no GPU" if profile.scheduler == "local" else "the profile has neither device nor gpu_flag"
        size, why = sized.gpus, f", one sample a rank as {reason}"
    elif usual % dp == 0:
        size, why = usual, " as in plan"
    else:
        size = max(1, usual // dp) * dp
        why = (
            f", the multiple of dp {dp} nearest below plan's {usual}"
            if size < usual
            else f", one sample for each of dp {dp}"
        )
    return size, why


def lacks_bf16(profile: ClusterProfile) -> bool:
    """Whether the profile's device is known to compute in fp16 but not in bf16."""
    device = DEVICES.get(profile.device or "")
    peaks = (profile.machine and profile.machine.peak_tflops) or (device.peaks if device else {})
    return "fp16" in peaks and "bf16" not in peaks


def choose_profile(request: Request, queueing: bool) -> ClusterProfile:
    """The profile of --cluster or HPC_GPT_CLUSTER, else `local` for a smoke run, else the user's default, else the
    fallback."""
    if request.cluster is None and request.smoke:
        return load_profile("local")
    chosen = user_default() if request.cluster is None else request.cluster
    if chosen is None and queueing and not has_sbatch():
        raise ConfigError(
            f"no cluster profile is chosen, and the fallback {FALLBACK} needs sbatch, which is not here",
            "--cluster local runs it on this machine; hpc-gpt profile detect --name NAME writes a cluster's profile",
        )
    return load_profile(FALLBACK if chosen is None else chosen)


def of_full_size(request: Request, profile: ClusterProfile) -> ClusterProfile:
    """The profile of the run at full size; for a smoke run on this machine the user's default or the fallback."""
    if not request.smoke or profile.scheduler != "local":
        return profile
    default = user_default() if request.cluster is None else None
    meant = load_profile(default or FALLBACK)
    return meant if meant.scheduler != "local" else load_profile(FALLBACK)
