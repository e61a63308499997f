"""`hpc-gpt bench --machine`: measures this machine, and writes `[machine]` and `[calibration]` of a profile.

The ranks (trainer/machine.py) run on this machine, or on the nodes of a Slurm allocation. A rate divided by the data
sheet's figure becomes a constant of the planner, so that plan predicts what was measured. If the device has no data
sheet, the figures themselves follow from the measurements, by plan's usual shares.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import JobFailed
from hpc_gpt.core.format import counted
from hpc_gpt.core.network import free_port
from hpc_gpt.core.runs.provenance import known_gpus
from hpc_gpt.core.settings.cluster import ClusterProfile, MachineFigures
from hpc_gpt.core.settings.devices import DEVICES, device_named
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.tables import toml_lines
from hpc_gpt.launcher.here import read_allocation
from hpc_gpt.launcher.this_machine import profile_here
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine, Rates, generation_of, machine_of
from hpc_gpt.planner.step_time import layer_time
from hpc_gpt.trainer.preflight.verdict import MACHINE_LIMIT_S, MACHINE_MARK

_ON_CPU = 2  # ranks without a GPU, so that there is something to send
_START_S = 60.0  # in addition to the ranks' own limit: torch may load from a network file system
_LARGEST = {entry.name: entry.metadata.get("most", 1e3) for entry in fields(Constants)}
_FIGURES = ("memory_gib", "peak_tflops", "memory_gb_s", "node_gb_s", "host_gb_s", "network_gb_s")
_SHOWN = {"pair": "send", "gather": "all-gather", "ring": "all-reduce"}


def measure_machine(chosen: ClusterProfile | None) -> dict[str, Any]:
    """Starts the ranks, and joins their figures. Raises JobFailed if there are none, ConfigError, SlurmUnreachable."""
    nodes, host = 1, "127.0.0.1"
    ranks_per_node = 0 if "SLURM_JOB_ID" in os.environ else len(known_gpus()) or _ON_CPU
    start = [sys.executable, "-m", "hpc_gpt.trainer.preflight.probe", "here", str(ranks_per_node)]
    environment = dict(os.environ)
    if "SLURM_JOB_ID" in os.environ:
        allocation = read_allocation()
        nodes, ranks_per_node = len(allocation.nodes), min(node.gpus for node in allocation.nodes) or 1
        cpus = max(1, min(node.cpus for node in allocation.nodes) // ranks_per_node)
        host = allocation.nodes[0].name + (chosen.node_suffix if chosen else "")
        start = ["srun", "--overlap", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--cpus-per-task={cpus}"]
        start += [f"--ntasks-per-node={ranks_per_node}", *(chosen.srun if chosen else ())]
        # The variables of salloc's request, and of a smaller step around this command, must not limit the ranks.
        passed_on = ("SLURM_JOB_ID", "SLURM_CONF")
        environment = {
            key: text for key, text in os.environ.items() if key in passed_on or not key.startswith("SLURM_")
        }
        environment |= chosen.environment if chosen else {}
    environment |= {"MASTER_ADDR": environment.get("HPC_GPT_MASTER_ADDR", host)}
    environment |= {"MASTER_PORT": str(free_port(os.getpid()))}
    command = [*start, sys.executable, "-m", "hpc_gpt.trainer.machine", str(nodes), str(ranks_per_node)]
    pipe, limit_s = subprocess.PIPE, MACHINE_LIMIT_S + _START_S  # the ranks end themselves before
    printed = b""
    with contextlib.suppress(subprocess.TimeoutExpired):
        printed = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, timeout=limit_s, check=False
        ).stdout
    line = next((line for line in printed.decode(errors="replace").splitlines() if line.startswith(MACHINE_MARK)), None)
    if line is None:
        ranks = counted(nodes * ranks_per_node, "rank")
        raise JobFailed(f"{ranks} gave no figures", "what they printed is above; hpc-gpt doctor checks the set-up")
    return {"nodes": nodes, "ranks_per_node": ranks_per_node, **medians(json.loads(line.removeprefix(MACHINE_MARK)))}


def medians(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure, over the ranks that have it."""
    every = {name: [rank[name] for rank in ranks if name in rank] for rank in ranks for name in rank}
    tflops = {name: median(rates[name] for rates in every["tflops"]) for name in every["tflops"][0]}
    middle = {
        name: median(figures) if isinstance(figures[0], int | float) else figures[0] for name, figures in every.items()
    }
    return middle | {"tflops": tflops}


def as_profile(measured: Mapping[str, Any], chosen: ClusterProfile | None) -> dict[str, Any]:
    """Converts the measurements to the keys of a profile. Figures that the profile `chosen` has, and its fabric, are
    kept."""
    profile = profile_here(chosen, [])
    product = "".join(char if char.isalnum() else " " for char in measured["device"].lower())
    device = device_named(measured["device"]) or profile.device or "-".join(product.split())
    data_sheet = DEVICES.get(device)
    fabric = profile.fabric or ("nvlink" if data_sheet is not None and data_sheet.nvlink else "pcie")
    of_profile = replace(profile, device=device, fabric=fabric, gpus_per_node=measured["ranks_per_node"])
    machine, derived = _machine(measured, of_profile)
    figures = {name: getattr(machine, name) for name in _FIGURES if getattr(machine, name)}
    calibration = {"constants": _rounded(_constants(measured, machine, derived))}
    return {"device": device, "fabric": fabric, "machine": _rounded(figures), "calibration": calibration}


def machine_text(measured: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    """The TOML of a profile, with the measurements in comments."""
    where = f"{counted(measured['nodes'], 'node')} with {counted(measured['ranks_per_node'], 'rank')} each"
    products = ", ".join(f"{name} {rate:g}" for name, rate in measured["tflops"].items())
    samples, heads, tokens = measured["attention"]
    lines = [
        f"# {measured['device']}, {where}: measured by hpc-gpt bench --machine",
        f"# products of {measured['rows']:g} rows, TFLOP/s: {products}",
        f"# attention of {samples} x {tokens} tokens, {heads} heads of 128: {1e3 * measured['attention_s']:.3g} ms",
        f"# GB/s: memory {measured['memory_gb_s']:g}, from the host {measured['host_to_device_gb_s']:g}",
    ]
    for axis, place in (("node", "in a node"), ("nodes", "between nodes")):
        rates = {label: measured.get(f"{axis}_{kind}_gb_s") for kind, label in _SHOWN.items()}
        shown = ", ".join(f"{label} {rate:g}" for label, rate in rates.items() if rate)
        lines += [f"# GB/s per rank {place}: {shown}"] if shown else []
    lines += [*toml_lines({key: profile[key] for key in ("device", "fabric")}), "", "[machine]"]
    lines += [*toml_lines(profile["machine"]), "", "# plan --calibrate of whole runs replaces these."]
    return "\n".join([*lines, "[calibration.constants]", *toml_lines(profile["calibration"]["constants"])]) + "\n"


def _machine(measured: Mapping[str, Any], profile: ClusterProfile) -> tuple[Machine, set[str]]:
    """Returns (the machine, those of its figures that follow from the measurements). Copies from the host are always as
    measured: they have no constant."""
    data_sheet, host = DEVICES.get(profile.device or ""), measured["host_to_device_gb_s"]
    over = {"host_gb_s": host / VALUES["host.copies"]}
    if data_sheet is None or data_sheet.nominal:
        over |= {
            "memory_gib": measured["memory_gib"],
            "peak_tflops": {name: rate / VALUES["power.most"] for name, rate in measured["tflops"].items()},
            "memory_gb_s": measured["memory_gb_s"] / DEFAULT.memory,
            "node_gb_s": measured.get("node_gather_gb_s", host) / DEFAULT.node,
        }
    profile_figures = {
        key: value for key, value in vars(profile.machine or MachineFigures()).items() if value is not None
    }
    machine = machine_of(replace(profile, machine=MachineFigures(**{**over, **profile_figures})))
    derived = over.keys() - profile_figures.keys()
    if measured["nodes"] > 1 and not machine.network_gb_s:
        sends = measured["nodes_pair_gb_s"] * measured["ranks_per_node"]
        return replace(machine, network_gb_s=sends / DEFAULT.network), derived | {"network_gb_s"}
    return machine, derived


def _constants(measured: Mapping[str, Any], machine: Machine, derived: set[str]) -> dict[str, float]:
    """The constants with which plan predicts what was measured; a figure that is derived from a measurement gets
    none."""
    training = _training(measured)
    rates, gpus, sends = Rates(machine, DEFAULT, training), measured["ranks_per_node"], measured.get("nodes_pair_gb_s")
    # The table's best rate is for products alone, too; a model's reach a part of it (constants.toml, products).
    best = rates.flops / VALUES[f"products.{generation_of(machine)}.none"] / 1e12
    core_s = layer_time(training, rates).core_s
    shares_by_figure = {
        "gemm": ("peak_tflops", DEFAULT.gemm * measured["tflops"][training.dtype] / best),
        "memory": ("memory_gb_s", measured["memory_gb_s"] / machine.memory_gb_s),
        "attention": ("", DEFAULT.attention * core_s / measured["attention_s"]),
        "node": ("node_gb_s", measured.get("node_gather_gb_s", 0.0) / machine.node_gb_s),
        "network": ("network_gb_s", (sends or 0.0) * gpus / (machine.network_gb_s or 1.0)),
        "reduction": ("", measured.get("nodes_ring_gb_s", 0.0) / (machine.network_gb_s or 1.0)),
    }
    shares = {name: share for name, (figure, share) in shares_by_figure.items() if share and figure not in derived}
    return {name: min(share, _LARGEST[name]) for name, share in shares.items()}


def _training(measured: Mapping[str, Any]) -> Training:
    """A training whose attention has the measured sizes and format."""
    samples, heads, tokens = measured["attention"]
    shape = ModelShape(128 * heads, 1, heads, vocab=51200, seq=tokens)
    dtype = "bf16" if "bf16" in measured["tflops"] else "fp16"
    return Training(shape, micro_batch=samples, dtype=dtype, engine="ddp", flash=True, attention="te")


def _rounded(table: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds all figures to four digits."""
    return {
        key: _rounded(value) if isinstance(value, Mapping) else float(f"{value:.4g}") for key, value in table.items()
    }
