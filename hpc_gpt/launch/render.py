"""From a resolved experiment to the text of its job script. Pure: no run, time, host or path of this machine in it."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import RenderError
from hpc_gpt.launch.directives import allocated_nodes, check_job, sbatch_directives
from hpc_gpt.paths import templates_dir
from hpc_gpt.settings.resolve import Resolved

if TYPE_CHECKING:
    from jinja2 import Environment


def render_script(resolved: Resolved, template: Path | None = None) -> str:
    """The job script, by the engine's template or by `template`, a child of base.sh.j2 of one's own.

    Raises ConfigError for a value a directive cannot carry, RenderError (file, line and variable) for a template.
    """
    import jinja2

    check_job(resolved)
    name = f"{resolved.engine.name}.sh.j2" if template is None else template.name
    try:
        text = _environment(template).get_template(name).render(variables(resolved))
    except jinja2.UndefinedError as fault:
        where = _innermost_line(fault, template)
        raise RenderError(f"{where}: {fault.message}", "hpc-gpt help template lists the variables") from None
    except jinja2.TemplateSyntaxError as fault:
        where = f"{fault.filename or fault.name or name}:{fault.lineno}"
        raise RenderError(f"{where}: {fault.message}", "mend the template there") from None
    except jinja2.TemplateNotFound as fault:
        missing = str(template) if template is not None and not template.is_file() else str(fault.name)
        raise RenderError(f"no template {missing!r}", 'a child starts with {% extends "base.sh.j2" %}') from None
    except (UnicodeDecodeError, OSError) as fault:
        raise RenderError(f"{template or name}: {fault}", "give a readable UTF-8 file") from None
    except (TypeError, ValueError, ArithmeticError, jinja2.TemplateError) as fault:
        raise RenderError(f"{_innermost_line(fault, template)}: {fault}", "mend the template there") from None
    return text if text.endswith("\n") else text + "\n"


def render_array(title: str, directives: Sequence[str]) -> str:
    """The script of an array, whose elements are runs with a job.sh each. The directives stand as they will in it."""
    from hpc_gpt import __version__

    template = _environment(None).get_template("slurm/array.sh.j2")
    return template.render(title=title, version=__version__, directives=directives)


def variables(resolved: Resolved) -> dict[str, Any]:
    """What a template can use. Texts come as given: quote them with `| quote`."""
    profile, shape = resolved.cluster, resolved.model
    return {
        "resolved": resolved,
        "resolved_json": resolved.to_json(),
        "title": f"{resolved.slug}: {shape.layers} layers of {shape.hidden}, {shape.params:,} parameters, "
        f"{resolved.layout} on {resolved.gpus} GPUs",
        "slug": resolved.slug,
        "version": resolved.version,
        "scheduler": profile.scheduler,
        "job": resolved.job,
        "cluster": profile,
        "layout": resolved.layout,
        "gpus": resolved.gpus,
        "nodes": resolved.nodes,
        "allocated_nodes": allocated_nodes(resolved),
        "preflight": bool(resolved.job.preflight) and profile.scheduler == "slurm",
        "ranks_per_node": resolved.ranks_per_node,
        "directives": sbatch_directives(resolved) if profile.scheduler == "slurm" else [],
        "srun": resolved.job.srun,
        "modules": profile.modules,
        "venv": profile.venv,
        "python": profile.python or ("python" if profile.venv else "python3"),
        "container": profile.container,
        "environment": profile.environment,
        "node_suffix": profile.node_suffix,
    }


@functools.cache
def _environment(template: Path | None) -> Environment:
    """Kept, with the templates it has compiled: a sweep renders them a thousand times. A changed file is read anew."""
    import jinja2

    folders = [str(templates_dir())] if template is None else [str(templates_dir()), str(template.parent)]
    loader: jinja2.BaseLoader = jinja2.FileSystemLoader(folders)
    if template is not None:
        # One's own file first under its own name, whatever a shipped one is called.
        own = jinja2.FunctionLoader(
            lambda name: (
                (text := template.read_text(encoding="utf-8"), str(template), lambda: _reads(template, text))
                if name == template.name and template.is_file()
                else None
            )
        )
        loader = jinja2.ChoiceLoader([own, loader])
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _innermost_line(fault: BaseException, template: Path | None) -> str:
    """`file:line` of the template line that failed: the last frame of the traceback that is a template's."""
    where, step = str(template or "template"), fault.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if file.endswith(".j2") or (template is not None and file == str(template)):
            where = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return where
