"""hpc-gpt plan"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_gpt.cli.experiment_options import planning_options
from hpc_gpt.errors import ConfigError

if TYPE_CHECKING:
    from hpc_gpt.launch.prepare import Request
    from hpc_gpt.plan.machine import Machine
    from hpc_gpt.plan.question import Question
    from hpc_gpt.plan.rates import Constants
    from hpc_gpt.plan.search import Candidate, Figures, Searched
    from hpc_gpt.settings.cluster import ClusterProfile
    from hpc_gpt.settings.experiment import Experiment
    from hpc_gpt.settings.model_shape import ModelShape

_TOKENS = 300e9  # GPT-3's (arXiv:2005.14165)
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class _Asked:
    """What is to be planned, settled as far as it can be before a search."""

    request: Request
    name: str
    base: Experiment
    experiment: Experiment
    profile: ClusterProfile
    model: ModelShape
    machine: Machine
    constants: Constants
    source: str
    question: Question
    tokens: float


@click.command()
@planning_options
@click.option("--why", metavar="LAYOUT", help="Explain one layout, as tp4-pp16-dp1, line by line with its arithmetic.")
@click.option("--max-model", is_flag=True, help="Find the largest model of a family that fits, whatever --model says.")
@click.option("--tokens", type=float, default=_TOKENS, metavar="N",
              help="Budget of tokens that days and GPU-hours are told for; 300e9 unless given.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help='One JSON object: {"schema": 1, "candidates": [...], ...}.')
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write one page that draws memory and time there.")  # fmt: skip
@click.option("--validate", type=_FILE, metavar="ROWS", help="Predict published rows, and print what was measured.")
@click.option("--calibrate", type=_FILE, multiple=True, metavar="RECORDS|ROWS",
              help="Fit the planner's constants to your records, or to rows, and store them in the profile of "
              "--cluster; with --validate store nothing. May be repeated.")  # fmt: skip
@click.option("--calibration", metavar="NAME", help="Take the constants of that cluster.")
@click.option("--cross-validate", is_flag=True, help="With --validate: also fit without each source, and predict it.")
def plan(
    request: Request,
    why: str | None,
    max_model: bool,
    tokens: float,
    as_json: bool,
    html: Path | None,
    validate: Path | None,
    calibrate: tuple[Path, ...],
    calibration: str | None,
    cross_validate: bool,
) -> None:
    """Find the layouts that fit in memory, and how fast each is, before anyone queues.

    Every (tp, pp, dp), micro-batch, ZeRO stage, recomputation and offload of the model on so many GPUs of the cluster
    that its memory holds, the fastest first, and why the others lose. What an option settles is not searched.
    EXPERIMENT gives model, batch, dtype and engine; its layout is searched all the same.

    \b
    hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g
    hpc-gpt plan --model 48b --gpus 64 --pp 16 --why tp4-pp16-dp1
    hpc-gpt plan --max-model --gpus 16 --cluster jean-zay-v100-16g
    hpc-gpt plan --calibrate logs/ --cluster mine
    """
    if cross_validate and validate is None:
        raise ConfigError("--cross-validate is for --validate", "give --validate ROWS, too")
    for name, given in (("--why", why), ("--max-model", max_model), ("--html", html)):
        if given and (validate is not None or calibrate):
            raise ConfigError(f"{name} does not go with --validate or --calibrate", f"two commands: one without {name}")
    if validate is not None:
        from hpc_gpt.cli.plan_rows import run_validate

        run_validate(validate, calibrate, calibration, cross_validate, as_json, request.cluster)
        return
    if calibrate:
        from hpc_gpt.cli.plan_rows import run_calibrate
        from hpc_gpt.settings.cluster import user_default

        cluster = request.cluster or user_default()
        if cluster is None:
            raise ConfigError("--calibrate stores what it finds in a cluster's profile", "name one with --cluster")
        run_calibrate(calibrate, cluster, calibration, as_json)
        return
    if not 0 < tokens < 1e30:
        raise ConfigError(f"--tokens is {tokens:g}, but must be a number above 0", "for example --tokens 300e9")
    if html is not None:
        from hpc_gpt.report.plan_page import check_page

        check_page(html)
    if max_model:
        if why is not None:
            raise ConfigError("--why and --max-model do not go together", "two commands: one without --why")
        _largest(_ask(request, tokens, calibration, largest=True), as_json, html)
        return
    asked = _ask(request, tokens, calibration, why=why)
    _print(asked, _search(asked, must_fit=why is None), as_json, html, why)


def _ask(
    request: Request, tokens: float, calibration: str | None, why: str | None = None, largest: bool = False
) -> _Asked:
    """Everything settled that the search does not vary; UserError for what cannot be."""
    from dataclasses import replace

    from hpc_gpt.launch.foresight import constants_of
    from hpc_gpt.launch.prepare import choose_profile, read_asked
    from hpc_gpt.plan.machine import check_dtype, check_reach, machine_of
    from hpc_gpt.plan.question import USUAL_ENGINES, check_possible, question_of
    from hpc_gpt.settings.experiment_file import DEFAULT_EXPERIMENT, cut_warmup, load_experiment, read_experiment
    from hpc_gpt.settings.resolve import resolve_shape

    overrides = dict(request.overrides)
    if why is not None:
        overrides |= _layout_of(why, overrides)
    profile = choose_profile(request, queueing=False)
    under: dict[str, Any] = {}
    if not request.names_experiment:
        own = read_experiment(DEFAULT_EXPERIMENT).tables
        # Layouts are compared at one global batch, whatever the model; the largest is searched from some model.
        under = {"layout": {"global_batch": own["layout"]["global_batch"]}}
        under |= {"model": own["model"]} if largest else {}
    file = read_asked(request, profile, under)
    # How long a run is, and its warm-up, are nothing to a plan, once no file contradicts itself.
    experiment, _ = cut_warmup(load_experiment(file, overrides, request.row))
    base = load_experiment(file, {}, request.row, steps_elsewhere=True)
    model = resolve_shape(experiment.model)
    machine = machine_of(profile)
    holds = {key for key, value in overrides.items() if value is not None}
    if request.names_experiment:
        holds.add("engine.name")
    engines = (*USUAL_ENGINES, "megatron-lm") if profile.megatron_lm is not None else USUAL_ENGINES
    if largest:
        # The smallest batch: one sample in a pass, one pass in a step, unless more is asked for.
        sizes = {"micro_batch": 1, "micro_batches": 1}
        batch: dict[str, Any] = {name: overrides.get(f"layout.{name}") or size for name, size in sizes.items()}
        experiment = replace(experiment, layout=replace(experiment.layout, **batch, global_batch=None))
        if "engine.offload" not in holds:
            experiment = replace(experiment, engine=replace(experiment.engine, offload="none"))
        holds = holds - {"layout.global_batch"} | {"layout.micro_batch", "layout.micro_batches", "engine.offload"}
    question = question_of(experiment, profile, holds, engines)
    check_reach(machine, question.gpus)
    check_dtype(question.dtype, machine)
    name = _name(request, experiment, model)
    if not largest:
        check_possible(question, experiment, profile, name)
    fitted = profile
    if calibration is not None:
        from hpc_gpt.settings.cluster import load_profile

        fitted = load_profile(calibration)
        if fitted.calibration is None:
            raise ConfigError(
                f"profile {fitted.name} has no [calibration]",
                f"hpc-gpt plan --calibrate RECORDS --cluster {fitted.name} writes one",
            )
    source = "data sheets" if fitted.calibration is None else f"calibration of {fitted.name}"
    return _Asked(
        request, name, base, experiment, profile, model, machine, constants_of(fitted), source, question, tokens
    )


def _layout_of(why: str, overrides: dict[str, object]) -> dict[str, int]:
    import re

    found = re.fullmatch(r"tp(\d{1,6})-pp(\d{1,6})-dp(\d{1,6})", why)
    if found is None:
        raise ConfigError(f"--why {why!r:.60} is no layout", "give one as tp4-pp16-dp1")
    layout = {f"layout.{axis}": int(size) for axis, size in zip(("tp", "pp", "dp"), found.groups(), strict=True)}
    for key, size in layout.items():
        if overrides.get(key, size) != size:
            axis = key.partition(".")[2]
            raise ConfigError(f"--why {why} and --{axis} {overrides[key]} contradict each other", f"leave --{axis} out")
    return layout


def _name(request: Request, experiment: Experiment, model: ModelShape) -> str:
    sizes = {f"model.{name}" for name in ("hidden", "layers", "heads")}
    if any(request.overrides.get(key) is not None for key in sizes):
        return f"{model.layers} x {model.hidden}"
    return experiment.model.preset or experiment.name


def _search(asked: _Asked, must_fit: bool) -> Searched:
    """LayoutError with the nearest where nothing fits, unless that is to be explained."""
    from hpc_gpt.plan.search import fewest_gpus, search
    from hpc_gpt.report.plan_table import settings_words

    searched = search(asked.question, asked.machine, asked.constants)
    if searched.candidates or not must_fit:
        return searched
    from hpc_gpt.errors import LayoutError

    nearest = searched.too_large[0]
    settled = [name for name in ("tp", "pp", "dp") if name in asked.question.settled]
    otherwise = f"leave --{', --'.join(settled)} open" if settled else "use a smaller model"
    more = fewest_gpus(asked.question, asked.machine)
    raise LayoutError(
        f"{asked.name} does not fit on {asked.question.gpus} {asked.machine.device}: the nearest, {nearest.layout} on "
        f"{nearest.training.engine} with {settings_words(nearest.training)}, needs {nearest.need_gib:.1f} of "
        f"{nearest.card_gib:.4g} GiB on stage {nearest.memory.deciding}",
        f"use --gpus {more}, which fits" if more else f"{otherwise}, or find one with hpc-gpt plan --max-model",
    )


def _print(asked: _Asked, searched: Searched, as_json: bool, html: Path | None, why: str | None) -> None:
    figures = [_figures(asked, candidate) for candidate in searched.candidates]
    best = searched.candidates[0] if searched.candidates else None
    command = _command(asked, best) if best is not None else ""
    _write_page(html, asked, searched, figures, command)
    if as_json:
        _print_json(asked, searched, figures, command)
    elif why is not None:
        from hpc_gpt.report.plan_explanation import explain
        from hpc_gpt.report.plan_table import wrapped
        from hpc_gpt.terminal import width

        text = explain(best or searched.too_large[0], asked.machine, figures[0] if figures else None)
        for line in text.splitlines():
            click.echo("\n".join(wrapped(line, width())))
    else:
        _print_table(asked, searched, figures[0])
    if command and not as_json:
        click.echo(f"next: {command}", err=True)


def _print_table(asked: _Asked, searched: Searched, figures: Figures) -> None:
    from hpc_gpt.report.plan_table import (
        can_draw_blocks,
        figures_words,
        heading,
        left_out_words,
        legend,
        search_table,
        unchecked,
        wrapped,
    )
    from hpc_gpt.terminal import width, write_heading

    columns = width()
    for line in wrapped(heading(searched, asked.name, asked.model.params), columns):
        write_heading(line)
    click.echo("\n" + search_table(searched, columns, can_draw_blocks()))
    best = searched.candidates[0]
    words = [legend(searched), f"best, {best.layout}:"]
    words += [f"  {line}" for line in figures_words(figures, asked.question.gpus)]
    words += [
        f"  constants: {asked.source}; the band is what that is worth",
        left_out_words(searched),
        unchecked(searched),
    ]
    for text in words:
        for line in wrapped(text, columns) if text else []:
            click.echo(line)


def _print_json(
    asked: _Asked, searched: Searched, figures: list[Figures], command: str, more: dict[str, Any] | None = None
) -> None:
    from dataclasses import asdict

    from hpc_gpt.report.plan_table import search_tables

    model = {"name": asked.name, **asdict(asked.model), "params": asked.model.params}
    tables = search_tables(searched, figures, model, command, {"source": asked.source, **asdict(asked.constants)})
    click.echo(json.dumps(tables | (more or {}), indent=1, allow_nan=False))


def _write_page(html: Path | None, asked: _Asked, searched: Searched, figures: list[Figures], command: str) -> None:
    if html is None:
        return
    from hpc_gpt.report.plan_page import write_page

    write_page(html, searched, figures, asked.name, asked.model.params, command)
    click.echo(f"wrote {html}", err=True)


def _figures(asked: _Asked, candidate: Candidate) -> Figures:
    from hpc_gpt.plan.search import figures_of

    assert candidate.step is not None
    return figures_of(candidate.training, candidate.step, asked.machine, asked.tokens)


def _command(asked: _Asked, best: Candidate) -> str:
    from hpc_gpt.cli.next_command import submit_command

    return submit_command(asked.request, asked.base, asked.experiment, best.training)


def _largest(asked: _Asked, as_json: bool, html: Path | None) -> None:
    import shlex
    from dataclasses import replace

    from hpc_gpt.plan.search import FAMILY, largest
    from hpc_gpt.report.plan_table import count_words

    found = largest(asked.question, asked.model, asked.machine, asked.constants)
    model = found.model
    name = f"{model.layers} x {model.hidden}"
    asked = replace(asked, model=model, name=name)
    figures = [_figures(asked, candidate) for candidate in found.searched.candidates]
    words = ["hpc-gpt", "plan", "--hidden", model.hidden, "--layers", model.layers, "--heads", model.heads]
    words += ["--gpus", asked.question.gpus, *(["--cluster", asked.request.cluster] if asked.request.cluster else [])]
    if not asked.request.names_experiment:
        engine = asked.request.overrides.get("engine.name")
        words += [*(["--engine", engine] if engine else []), "--set", f"train.dtype={asked.question.dtype}"]
    command = shlex.join(map(str, words))
    _write_page(html, asked, found.searched, figures, command)
    if as_json:
        next_larger = {**vars(found.next_larger), "params": found.next_larger.params} if found.next_larger else None
        _print_json(asked, found.searched, figures, command, {"family": FAMILY, "next_larger": next_larger})
    else:
        sizes = f"{model.layers} layers of {model.hidden}, {model.heads} heads"
        click.echo(f"largest: {count_words(model.params)} parameters, {sizes}")
        if found.next_larger is not None:
            larger = found.next_larger
            sizes = f"{larger.layers} layers of {larger.hidden}"
            click.echo(f"the next, {count_words(larger.params)} parameters, {sizes}, does not fit, or leaves no room")
        click.echo(f"family: {FAMILY}\n")
        _print_table(asked, found.searched, figures[0])
    if not as_json:
        click.echo(f"next: {command}", err=True)
