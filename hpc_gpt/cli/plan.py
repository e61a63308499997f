"""hpc-gpt plan"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli.options import option_name
from hpc_gpt.cli.request import experiment_argument, with_request
from hpc_gpt.cli.verb import GroupedCommand, options_of, verb
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.files import config_dir
from hpc_gpt.core.format import wrapped
from hpc_gpt.core.settings.cluster import load_profile, user_default
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.rules.engine import export_notes
from hpc_gpt.core.tables import toml_lines, toml_value
from hpc_gpt.core.terminal import painted, say, shows_life, width, write_heading
from hpc_gpt.launcher.plan_question import (
    PLANNED_TOKENS,
    PlanRequest,
    keys_without_effect,
    read_plan_request,
    search_plan,
)
from hpc_gpt.launcher.request import Request
from hpc_gpt.planner.best_plan import usual_batch
from hpc_gpt.planner.explanation import explain_plan
from hpc_gpt.planner.fast import FAST_SETTINGS, with_fast_settings
from hpc_gpt.planner.figures import as_text, figures_in, figures_of, plan_figures, summary
from hpc_gpt.planner.largest import FAMILY, largest, longest
from hpc_gpt.planner.nearest import by_micro_batch, fewest_gpus, larger_batch, overlapped, without_offload
from hpc_gpt.planner.prediction import compiled_step
from hpc_gpt.planner.search import Candidate, Searched, search
from hpc_gpt.planner.search_tables import search_tables
from hpc_gpt.planner.table import (
    COLOURS,
    PARTS,
    can_draw_blocks,
    count_text,
    heading,
    left_out_text,
    legend,
    other_ep_text,
    search_table,
    slow_text,
    unchecked,
)
from hpc_gpt.planner.training import engine_for

# {key: its option of plan}. The command for submit has those of _FLAGS alone, and other keys by --set.
_PLAN_FLAGS = {option.key: option_name(option) for option in options_of("plan") if option.key}
_FLAGS = {key: _PLAN_FLAGS[key] for key in ("model.preset", "model.seq", "engine.name", "engine.zero_stage")}
_LARGEST_MODEL_KEYS = ("model.preset", "model.hidden", "model.layers", "model.heads", "layout.global_batch")
# The keys that `_submit_command` itself writes as options.
_BY_OPTION = ("layout.gpus", "layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.etp", "layout.dp",
          "layout.micro_batch", "layout.micro_batches", "layout.global_batch", "layout.shard")  # fmt: skip
# The keys of [engine] that the planner may choose if no EXPERIMENT is named.
_CHOSEN = ("name", "zero_stage", "recompute")


@verb(10, GroupedCommand)
@experiment_argument
@with_request
def plan(
    request: Request,
    why: str | None,
    max_model: bool,
    max_seq: bool,
    tokens: int | None,
    as_json: bool,
    device: str | None,
    calibrate: tuple[Path, ...],
    calibration: str | None,
) -> None:
    """Find the layouts that fit in memory and predict how fast each is, before anything is queued.

    Searches every (tp, pp, dp), micro-batch, ZeRO stage, recomputation and offload for the model on these GPUs, and
    prints the layouts that fit, the fastest first, with the reason why the others are slower. A value that an option
    gives is fixed. EXPERIMENT gives model, batch, dtype and engine; its layout is searched anyway.

    \b
    hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g
    hpc-gpt plan --model 48b --gpus 64 --pp 16 --why tp4-pp16-dp1
    hpc-gpt plan --max-model --gpus 16 --cluster jean-zay-v100-16g
    hpc-gpt plan --calibrate logs/ --cluster mine
    """
    if device is not None:
        request = replace(request, device=device, cluster=None)
    if calibrate:
        cluster = user_default() if request.cluster is None else request.cluster
        if cluster is None:
            raise ConfigError("--calibrate stores the constants in a cluster profile", "name one with --cluster")
        _calibrate(calibrate, cluster, as_json)
        return
    if tokens is not None and not 0 < tokens < 1e30:
        raise ConfigError(f"--tokens is {tokens!s:.40}, but must be above 0 and below 1e30", "for example --tokens 15T")
    budget = PLANNED_TOKENS if tokens is None else float(tokens)
    if max_model or max_seq:
        plan_request = read_plan_request(request, budget, calibration, largest=max_model, longest=max_seq)
        if plan_request.stands_in:
            say(plan_request.stand_in_note, err=True)
        _largest(plan_request, calibration, as_json, max_seq)
        return
    plan_request = read_plan_request(request, budget, calibration, why=why)
    if plan_request.stands_in:
        say(plan_request.stand_in_note, err=True)
    _print(plan_request, search_plan(plan_request, must_fit=why is None), as_json, why, calibration)


def _calibrate(paths: Sequence[Path], cluster: str, as_json: bool) -> None:
    """Fits the planner's constants to records, stores them in the user's profile of `cluster`, and prints both."""
    from hpc_gpt.planner.calibration import calibrate as fit_constants
    from hpc_gpt.planner.calibration import store_calibration
    from hpc_gpt.planner.measured_steps import read_measured_steps

    profile = load_profile(cluster)
    read = [read_measured_steps(path, profile) for path in paths]
    measured = [step for steps, _ in read for step in steps]
    left_out = [entry for _, entries in read for entry in entries]
    for entry in left_out:
        say(f"left out: {entry.id}: {entry.reason}", err=True)
    if not any(step.step_s for step in measured):
        raise ConfigError(
            f"no record has the time of a step on {profile.gpus_per_node} {profile.device} per node",
            f"give records of runs on {profile.name}; {len(left_out)} were left out",
        )
    fitted = fit_constants(profile.name, measured)
    path = store_calibration(cluster, fitted)
    if as_json:
        tables = {"schema": 1, "profile": str(path), "calibration": fitted.to_tables()}
        tables["left_out"] = [{"id": entry.id, "left_out": entry.reason} for entry in left_out]
        click.echo(json.dumps(tables, indent=1, allow_nan=False))
        return
    for name, value in vars(fitted.constants).items():
        say(f"{name:<12} {value:.4g}")
    for name, residual in sorted(fitted.residuals.items(), key=lambda pair: -abs(pair[1])):
        say(f"{residual:+8.1%}  {name}")
    count, error = len(fitted.residuals), fitted.mean_error or 0
    say(f"mean error over the {count} fitted step times: {error:.1%}")
    say(f"stored in {path}", err=True)


def _print(plan: PlanRequest, searched: Searched, as_json: bool, why: str | None, calibration: str | None) -> None:
    best = searched.candidates[0] if searched.candidates else None
    command = _submit_command(plan, searched.best.training) if searched.best is not None else ""
    lines = _profile_lines(plan) if command and plan.request.device is not None else ""
    enough_gpus = fewest_gpus(searched.question, plan.machine) if searched.best is None and why is None else None
    if enough_gpus is not None:
        sizes = {"layout.nodes": None, "layout.gpus": enough_gpus}
        command = _plan_command(plan, {**plan.request.given, **sizes}, calibration)
    if (matmul := plan.question.matmul) != "none":
        engine = searched.best.training.engine if searched.best is not None else plan.base.engine.name
        if matmul not in engine_named(engine).matmuls:
            command = ""  # no run can have them
            say(f"note: engine {engine} does not train with train.matmul {matmul}: only plan knows it", err=True)
    if plan.stands_in and plan.request.device is None:
        command = "hpc-gpt profile list"
    if best is not None and not plan.of_program:
        for note in export_notes(best.training.engine, best.training.shape):
            say(f"note: {note}", err=True)
    overlap = None
    if plan.of_program:
        command = ""  # its own arguments decide its layout
        for key in keys_without_effect(plan, searched):
            say(f"note: {key} changes nothing in this plan of a program", err=True)
    elif searched.best is not None:
        overlap = overlapped(searched.best, plan.machine, plan.constants)
    slow = slow_text(best, _without_offload(plan), "without offload the best layout") if best is not None else ""
    if as_json:
        hidden: dict[str, Any] = {}
        if overlap is not None and overlap[1]:
            with_them = command and _with_arguments(plan, *overlap)
            figures = figures_in(searched, overlap[0], plan.tokens)
            assert figures is not None
            hidden = {"overlapped": {"arguments": overlap[1], "next": with_them, "figures": asdict(figures)}}
        _print_json(plan, searched, command, hidden)
    elif why is not None:
        others = by_micro_batch(searched, plan.constants)
        one = best or searched.too_large[0]
        text = explain_plan(one, plan.machine, figures_in(searched, one, plan.tokens), others, plan.source)
        for line in text.splitlines():
            say(line)
    else:
        _print_table(plan, searched, slow, enough_gpus, overlap)
        assert best is not None
        assert best.step is not None
        if compiled := compiled_step(best.training, plan.machine, plan.constants):
            note = f"note: not compiled; with --set engine.compile=block {best.layout} is predicted "
            say(f"{note}{best.step.step_s / compiled.step_s:.2f} times as fast", err=True)
    if command and not as_json:
        click.echo(f"{lines}next: {command}", err=True)
        if overlap is not None and overlap[1] and why is None:
            click.echo(f"with them: {_with_arguments(plan, *overlap)}", err=True)


def _profile_lines(plan: PlanRequest) -> str:
    """The lines of a profile for the planned nodes, which `_submit_command` names; empty if the user has it."""
    profile = plan.profile
    file = config_dir() / "clusters" / f"{profile.name}.toml"
    if file.exists():
        return ""
    sizes = {"device": profile.device, "gpus_per_node": profile.gpus_per_node, "fabric": profile.fabric}
    lines = toml_lines({"extends": "generic-slurm", **sizes, "partition": "YOURS"})
    return "\n".join([f"first write a profile of your nodes, {file}:", *(f"  {line}" for line in lines), ""])


def _without_offload(plan: PlanRequest) -> Candidate | None:
    """The best layout that offloads nothing, if the search had only layouts that offload; else None."""
    if plan.question.fixed.get("offload", "none") == "none":
        return None
    question = replace(plan.question, fixed={**plan.question.fixed, "offload": "none"})
    return search(question, plan.machine, plan.constants).best


def _print_table(
    plan: PlanRequest,
    searched: Searched,
    slow: str,
    enough_gpus: int | None = None,
    overlap: tuple[Candidate, tuple[str, ...]] | None = None,
) -> None:
    columns = width()
    write_heading(heading(searched, plan.name, plan.model.params))
    if searched.best is None:
        hint = f", or use --gpus {enough_gpus}, on which a layout fits" if enough_gpus else ""
        say(f"\n{unchecked(searched)}{hint}")
    click.echo("\n" + search_table(searched, columns, can_draw_blocks(), overlap, painted))
    for line in wrapped(legend(searched), columns):
        for part in PARTS:
            line = line.replace(f" {part.letter} {part.name}", f" {painted(part.letter, COLOURS)} {part.name}")
        click.echo(line)
    best = searched.candidates[0]
    texts = [f"{'best' if searched.best else 'fastest'}, {best.layout}:"]
    texts += [f"  {line}" for line in summary(plan_figures(best, figures_in(searched, best, plan.tokens)))]
    texts += [
        slow,
        without_offload(searched),
        larger_batch(searched, plan.constants),
        other_ep_text(searched),
        left_out_text(searched),
        unchecked(searched) if searched.best else "",
    ]
    for text in filter(None, texts):
        say(text)


def _print_json(plan: PlanRequest, searched: Searched, command: str, added: dict[str, Any] | None = None) -> None:
    counts = {"params": plan.model.params, "params_active": plan.model.params_active}
    model = {"name": plan.name, **plan.model.table(), **counts}
    tables = search_tables(searched, plan.tokens, model, command, {"source": plan.source, **asdict(plan.constants)})
    click.echo(json.dumps(tables | (added or {}), indent=1, allow_nan=False))


def _largest(plan: PlanRequest, calibration: str | None, as_json: bool, of_seq: bool) -> None:
    with shows_life("searching"):
        if of_seq:
            most = longest(plan.question, plan.machine, plan.constants)
        else:
            most = largest(plan.question, plan.model, plan.machine, plan.constants)
    slow, name = "", plan.name
    if not of_seq:
        slow = _slow_largest(plan, most.searched.candidates[0])
        name = f"{most.model.layers} x {most.model.hidden}"
    model = most.model
    plan = replace(plan, model=model, name=name)
    days = "" if of_seq else _days_of_20(plan, most.searched)
    command = _largest_command(plan, calibration, of_seq)
    offload = plan.question.fixed["offload"]
    if as_json:
        next_larger = {**most.next_larger.table(), "params": most.next_larger.params} if most.next_larger else None
        added: dict[str, Any] = {"family": FAMILY, "next_larger": next_larger}
        if of_seq:
            added = {"longest_seq": model.seq, "next_longer": most.next_larger.seq if most.next_larger else None}
        _print_json(plan, most.searched, command, added)
        return
    how = "without offload" if offload == "none" else f"with offload {offload}"
    if of_seq:
        longer = f"; {most.next_larger.seq:,} do not fit, or are too tight" if most.next_larger else ""
        say(f"longest sequence {how}: {model.seq:,} tokens{longer}\n")
    else:
        sizes = f"{model.layers} layers of {model.hidden}, {model.heads} heads"
        say(f"largest {how}: {count_text(model.params)} parameters, {sizes}")
        if most.next_larger is not None:
            larger = most.next_larger
            sizes = f"{larger.layers} layers of {larger.hidden}"
            say(f"the next, {count_text(larger.params)} parameters, {sizes}, does not fit, or is too tight")
        if offload == "none":
            say("--offload optimizer or full finds the largest model with a part of it in the host's memory")
        say(f"family: {FAMILY}")
        say(f"{days}\n")
    _print_table(plan, most.searched, slow)
    click.echo(f"next: {command}", err=True)


def _days_of_20(plan: PlanRequest, searched: Searched) -> str:
    """The line on the time of 20 tokens per parameter, at the usual batch if that fits: the search for the largest
    model takes the smallest."""
    model, tokens = plan.model, 20 * plan.model.params
    batch = usual_batch(model.seq, plan.question.gpus)
    fixed = {name: value for name, value in plan.question.fixed.items() if name not in ("micro_batch", "micro_batches")}
    question = replace(plan.question.of(model), global_batch=batch, fixed=fixed)
    best = search(question, plan.machine, plan.constants, keep=1).best or searched.candidates[0]
    assert best.step is not None
    figures = plan_figures(best, figures_of(best.training, best.step, plan.machine, tokens))
    cost = as_text(figures, "days", "gpu_hours")
    return f"20 tokens a parameter at global batch {best.training.global_batch} on {best.layout}: {cost}"


def _slow_largest(plan: PlanRequest, best: Candidate) -> str:
    """The line for a largest model that trains far slower with offload than the largest without; else empty."""
    if plan.question.fixed["offload"] == "none":
        return ""
    question = replace(plan.question, fixed={**plan.question.fixed, "offload": "none"})
    try:
        other = largest(question, plan.model, plan.machine, plan.constants)
    except LayoutError:  # none fits without
        return ""
    what = f"the largest without offload, {count_text(other.model.params)} parameters,"
    return slow_text(best, other.searched.best, what)


def _largest_command(plan: PlanRequest, calibration: str | None, of_seq: bool) -> str:
    """The `hpc-gpt plan` command that prints the table again: the request's options with the sizes of the model, or the
    sequence."""
    request, model, fixed = plan.request, plan.model, plan.question.fixed
    left_out = ("layout.global_batch",) if of_seq else _LARGEST_MODEL_KEYS
    keys = {key: value for key, value in request.given.items() if key not in left_out}
    if not of_seq:
        sizes = ("hidden", "layers", "heads", *(("expert_ffn",) if model.is_mixture else ()))
        keys = {f"model.{name}": getattr(model, name) for name in sizes} | keys
    keys |= {f"layout.{name}": fixed[name] for name in ("micro_batch", "micro_batches")}
    keys |= {"engine.offload": fixed["offload"], "layout.gpus": plan.question.gpus}
    if "activation_offload" in fixed:
        keys["engine.activation_offload"] = fixed["activation_offload"]
    keys["train.dtype"] = plan.question.dtype
    if of_seq:
        keys["model.seq"] = model.seq
    elif not request.names_experiment:
        keys |= {"model.vocab": model.vocab, "model.seq": model.seq}
    return _plan_command(plan, keys, calibration)


def _plan_command(plan: PlanRequest, keys: Mapping[str, Any], calibration: str | None) -> str:
    """The `hpc-gpt plan` command of the request with `keys` instead of its own options."""
    request = plan.request
    command = ["hpc-gpt", "plan", *([request.experiment] if request.names_experiment else [])]
    command += ["--row", request.row] if request.row is not None else []
    command += ["--cluster", request.cluster] if request.cluster is not None else []
    command += ["--device", request.device] if request.device is not None else []
    for key, value in keys.items():
        command += _option(key, value, _PLAN_FLAGS) if value is not None else []
    command += ["--calibration", calibration] if calibration is not None else []
    command += ["--tokens", f"{plan.tokens:.17g}"] if plan.tokens != PLANNED_TOKENS else []
    return shlex.join(command)


def _submit_command(plan: PlanRequest, training: Training) -> str:
    """The `hpc-gpt submit` command for a candidate, quoted for a shell.

    Without EXPERIMENT it gives engine and dtype, which `submit` would choose otherwise. If the engine differs from the
    default experiment's, it also gives the model, so that the default of every key applies.
    """
    request, base, planned = plan.request, plan.base, plan.experiment
    command = ["hpc-gpt", "submit"]
    if request.names_experiment:
        command.append(request.experiment)
    if request.row is not None:
        command += ["--row", request.row]
    if (cluster := plan.profile.name if request.device is not None else request.cluster) is not None:
        command += ["--cluster", cluster]
    for key, value in request.given.items():
        if not key.startswith("engine.") and key not in _BY_OPTION:
            command += _option(key, value)
    command += ["--gpus", str(training.gpus), "--tp", str(training.tp), "--pp", str(training.pp)]
    command += ["--cp", str(training.cp)] if training.cp > 1 else []
    command += ["--ep", str(training.ep)] if training.ep > 1 else []
    command += ["--set", f"layout.etp={training.etp}"] if training.etp is not None else []
    command += ["--dp", str(training.dp), "--mbs", str(training.micro_batch), "--gbs", str(training.global_batch)]
    command += _option("layout.shard", training.shard) if training.shard or planned.layout.shard else []
    engine, default = engine_for(training, planned.engine), base.engine
    chosen = () if request.names_experiment else _CHOSEN
    if not request.names_experiment and engine.name != default.name and base.model.preset is not None:
        command += ["--model", str(planned.model.preset)]
        default = Engine()
    elif plan.fast:  # `submit` sets these by itself
        like = replace(default, name=engine.name, zero_stage=engine.zero_stage, loss_chunks=engine.loss_chunks)
        fast = with_fast_settings(like, plan.model, planned.train)
        default = replace(default, **{setting.key: getattr(fast, setting.key) for setting in FAST_SETTINGS})
    for entry in fields(Engine):
        value = getattr(engine, entry.name)
        if value != getattr(default, entry.name) or (entry.name in chosen and value is not None):
            command += _option(f"engine.{entry.name}", value)
    if not request.names_experiment and "train.dtype" not in request.given:
        command += _option("train.dtype", planned.train.dtype)
    return shlex.join(command)


def _with_arguments(plan: PlanRequest, candidate: Candidate, arguments: tuple[str, ...]) -> str:
    """The `hpc-gpt submit` command for a candidate with further arguments of Megatron-LM."""
    engine = plan.experiment.engine
    engine = replace(engine, megatron_args=(*engine.megatron_args, *arguments))
    with_them = replace(plan, experiment=replace(plan.experiment, engine=engine))
    return _submit_command(with_them, candidate.training)


def _option(key: str, value: Any, flags: Mapping[str, str] = _FLAGS) -> list[str]:
    if key == "layout.allow_tp_across_nodes":
        return ["--allow-tp-across-nodes"] if value else []
    if key in flags and value is not None:
        return [flags[key], str(value)]
    if value is None:
        return ["--set", f"{key}="]
    return ["--set", f"{key}={value if isinstance(value, str) else toml_value(value)}"]
