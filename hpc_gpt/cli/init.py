"""hpc-gpt init"""

import shlex
from pathlib import Path

import click

from hpc_gpt.cli.request import with_request
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import check_new, write_new
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.core.slurm.directives import is_job_script
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.request import Request

_TOKENS = 300e9  # the tokens to train on, for the predicted days and GPU-hours; the file has no such key


@verb(15)
@click.argument("name", required=False)
@with_request
def init(request: Request, name: str | None, folder: Path) -> None:
    """Write an experiment from the planner's best layout: NAME.toml, with comments. No file is overwritten.

    \b
    hpc-gpt init big --model llama3.1-8b --gpus 64 --cluster h100-80g-8
    """
    name = name and name.removesuffix(".toml")
    if name is not None and name != folder_name(name):
        raise ConfigError(f"{name!r} is not a file name", "use letters, digits, dots, dashes and underscores")
    if name is not None and is_job_script(Path(name)):
        raise ConfigError(f"{name} is a job script", f"hpc-gpt submit {name} runs it as it is")
    if name is None:
        raise ConfigError("no NAME is given", "for example hpc-gpt init big --model gpt2 --gpus 8")
    from_plan(name, request, folder)


def from_plan(name: str, request: Request, folder: Path) -> None:
    from hpc_gpt.core.settings.decide import size_run
    from hpc_gpt.core.settings.experiment import Experiment
    from hpc_gpt.core.settings.rules.engine import export_notes
    from hpc_gpt.core.typed_tables import check_tables
    from hpc_gpt.launcher.plan_question import read_plan_request, search_plan
    from hpc_gpt.planner.explanation import planned_tables, planned_text
    from hpc_gpt.planner.figures import figures_of
    from hpc_gpt.planner.table import unchecked

    if not any(request.overrides.get(f"model.{key}") is not None for key in ("preset", "hf", "hidden")):
        raise ConfigError(
            "no model is given", "add --model, for example --model gpt2, or --hidden, --layers and --heads"
        )
    path = folder / f"{name}.toml"
    check_new([path])
    plan = read_plan_request(request, _TOKENS, None)
    if plan.stands_in:
        say(plan.stand_in_note, err=True)
    searched = search_plan(plan, must_fit=True)
    best = searched.candidates[0]
    assert best.step is not None
    settings = {key: value for key, value in request.overrides.items() if value is not None}
    paths = [key for key in settings if key.startswith("data.mix.") and key.endswith(".path")]
    for key in ("model.hf", "train.init", "data.path", "data.tokenizer", *paths):
        if (file := settings.get(key)) is not None and Path(file).exists():
            settings[key] = str(Path(file).absolute())  # the new file may be in another folder
    tables = planned_tables(best, plan.experiment, settings)
    sized = size_run(check_tables({"name": name, **tables}, Experiment, str(path)), plan.profile)
    figures = figures_of(best.training, best.step, plan.machine, _TOKENS)
    write_new({path: planned_text(name, tables, searched, figures, (plan.name, plan.model), plan.source)})
    say(f"wrote {path}: {best.layout} on {best.training.engine}")
    if searched.best is None:
        say(f"note: {unchecked(searched)}", err=True)
    for note in export_notes(sized.engine.name, sized.model):
        say(f"note: {note}", err=True)
    cluster = ["--cluster", request.cluster] if request.cluster is not None else []
    click.echo(f"next: {shlex.join(['hpc-gpt', 'render', str(path), *cluster])}", err=True)
