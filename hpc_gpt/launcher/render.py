"""The text of the job script of a resolved experiment, with its `#SBATCH` lines.

The text is a pure function of the experiment: it has no run id, time, host or path of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt import __version__
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import RenderError, raise_faults
from hpc_gpt.core.files import package_text, templates_dir
from hpc_gpt.core.format import counted
from hpc_gpt.core.network import HSN
from hpc_gpt.core.settings.devices import is_amd
from hpc_gpt.core.settings.resolved import Resolved, folder_name
from hpc_gpt.core.settings.sized import command_lines, script_title, stop_signal
from hpc_gpt.core.slurm.directives import (
    JOB_NAME,
    allocated_nodes,
    directives_but_name,
    hides_gpus,
    job_faults,
    quote_directive,
    sbatch_directives,
    script_directives,
)
from hpc_gpt.core.slurm.sbatch_words import chosen_clusters
from hpc_gpt.core.tables import close_matches

if TYPE_CHECKING:
    from jinja2 import Environment


def render_script(resolved: Resolved, template: Path | None = None) -> str:
    """The job script, from `template`, a user's own child of base.sh.j2; without one from the engine's template if it
    has one, else from base.sh.j2.

    Raises ConfigError for a value that a directive cannot hold, RenderError (with file, line and variable) for a
    template.
    """
    import jinja2

    raise_faults(job_faults(resolved.job, resolved.cluster))
    names = [f"{resolved.engine.name}.sh.j2", "base.sh.j2"] if template is None else [template.name]
    name = names[0]
    try:
        users_text = template.read_text(encoding="utf-8") if template is not None and template.is_file() else None
        environment = _environment(template and template.absolute(), users_text)
        if users_text is not None:
            _check_blocks(environment, str(template), users_text)
        text = environment.select_template(names).render(variables(resolved))
    except RenderError:
        raise
    except jinja2.UndefinedError as fault:
        where = _innermost_line(fault, template)
        raise RenderError(f"{where}: {fault.message}", "hpc-gpt help template lists the variables") from None
    except jinja2.TemplateSyntaxError as fault:
        where = f"{fault.filename or fault.name or name}:{fault.lineno}"
        raise RenderError(f"{where}: {fault.message}", "correct the template there") from None
    except jinja2.TemplateNotFound as fault:
        missing = str(template) if template is not None and not template.is_file() else str(fault.name)
        raise RenderError(f"no template {missing!r}", 'a child starts with {% extends "base.sh.j2" %}') from None
    except (UnicodeDecodeError, OSError) as fault:
        raise RenderError(f"{template or name}: {fault}", "give a readable UTF-8 file") from None
    except (TypeError, ValueError, ArithmeticError, jinja2.TemplateError) as fault:
        raise RenderError(f"{_innermost_line(fault, template)}: {fault}", "correct the template there") from None
    return text if text.endswith("\n") else text + "\n"


# All but KILL, STOP, CHLD and CONT, and the two that the C library uses.
_SIGNALS = [number for number in range(1, 65) if number not in (9, 17, 18, 19, 32, 33)]


def render_job_script(resolved: Resolved, body: bytes, arguments: Sequence[str], directives: Sequence[str]) -> str:
    """The job script around a script of the user's own, which ends with that script's bytes (surrogates stand for bytes
    that are not UTF-8). `directives` are all directives of the text, as sbatch is to read them."""
    facts, signal = resolved.script, resolved.job.signal_lead_s
    assert facts is not None
    template = _environment().get_template(f"script/{resolved.cluster.scheduler}.sh.j2")
    head = template.render(
        **variables(resolved) | {"directives": directives},
        script_bytes=len(body),
        script_args="".join(f" {shlex.quote(word)}" for word in arguments),
        two_files=facts.error is not None and facts.error != facts.output,
        open_mode=(facts.open_mode or "-")[0],
        limit_signal=facts.signal is None and signal is not None,
        signals=_SIGNALS,
    )
    return head + body.decode("utf-8", "surrogateescape")


def _extends_base(environment: Environment, tree: Any) -> bool:
    """Whether a template extends base.sh.j2, directly or not, or a template whose name is an expression."""
    from jinja2 import nodes

    assert environment.loader is not None
    parents: set[str] = set()
    while names := [node.template for node in tree.body if isinstance(node, nodes.Extends)]:
        if not isinstance(names[0], nodes.Const) or names[0].value == "base.sh.j2":
            return True
        if names[0].value in parents:
            return False
        parents.add(names[0].value)
        tree = environment.parse(environment.loader.get_source(environment, names[0].value)[0])
    return False


def _check_blocks(environment: Environment, template: str, text: str) -> None:
    """Raises RenderError for a user's template that does not extend base.sh.j2, as a run of its script would have no
    job chain; and for a block that base.sh.j2 does not have, as jinja would leave it out."""
    from jinja2 import nodes

    base = environment.parse(package_text(templates_dir() / "base.sh.j2"))
    of_base = [block.name for block in base.find_all(nodes.Block)]
    tree = environment.parse(text)
    if not _extends_base(environment, tree):
        raise RenderError(f"{template} does not extend base.sh.j2", 'begin it with {% extends "base.sh.j2" %}')
    for block in tree.body:
        if isinstance(block, nodes.Block) and block.name not in of_base:
            raise RenderError(
                f"{template}:{block.lineno}: base.sh.j2 has no block {block.name!r}",
                close_matches(block.name, of_base) or f"its blocks: {', '.join(of_base)}",
            )


def array_script(name: str, scripts: Sequence[str]) -> str:
    """The script of a job array for runs with equal directives. Its job name is the one that they share, else
    `name`."""
    return _script_of_rows("slurm/array.sh.j2", name, scripts)


def turns_script(name: str, scripts: Sequence[str]) -> str:
    """The script of one job that starts runs with equal directives one after the other; its job name as above."""
    return _script_of_rows("slurm/turns.sh.j2", name, scripts)


def _script_of_rows(template: str, name: str, scripts: Sequence[str]) -> str:
    names = {line for script in scripts for line in script_directives(script) if line.startswith(JOB_NAME)}
    shared = names.pop() if len(names) == 1 else JOB_NAME + quote_directive(name)
    return (
        _environment()
        .get_template(template)
        .render(
            title=f"{folder_name(name)}: {len(scripts)} runs",
            version=__version__,
            directives=[shared, *directives_but_name(scripts[0])],
        )
    )


def variables(resolved: Resolved) -> dict[str, Any]:
    """The variables of a template. Texts are not quoted: use `| quote`."""
    profile = resolved.cluster
    return {
        "resolved": resolved,
        "resolved_json": resolved.to_json(),
        "title": f"{resolved.slug}: {script_title(resolved, counted(resolved.asked_gpus or 0, 'GPU'))}",
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
        "notify": resolved.notify if resolved.notify.is_asked and profile.scheduler == "slurm" else None,
        "ranks_per_node": resolved.ranks_per_node,
        "command": command_lines(resolved),
        "signal": stop_signal(resolved),
        "tasks": resolved.tasks,
        "tasks_per_node": resolved.tasks_per_node,
        "directives": sbatch_directives(resolved) if profile.scheduler == "slurm" else [],
        "srun": [flag for flag in resolved.job.srun if resolved.tasks == resolved.gpus or not hides_gpus(flag)],
        "setup": profile.setup,
        "modules": profile.modules,
        "purge_modules": profile.purge_modules,
        "venv": profile.venv,
        "stage": profile.stage,
        "archive": profile.archive,
        "python": profile.python or ("python" if profile.venv else "python3"),
        "container": profile.container,
        "environment": profile.environment,
        "sets_allocator": not engine_named(resolved.engine.name).is_program
        and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(profile.environment)
        and not is_amd(profile.device),  # ROCm's allocator has no expandable segments
        "gpu_option": "--rocm" if is_amd(profile.device) else "--nv",
        "node_suffix": profile.node_suffix,
        "nccl_interface": HSN if profile.is_slingshot else None,
    }


@functools.cache
def _environment(template: Path | None = None, users_text: str | None = None) -> Environment:
    """The jinja environment, with the text of the user's own template, which comes before a packaged one of the same
    name. Cached with its compiled templates, because a sweep renders a thousand times."""
    import jinja2

    def packaged(name: str) -> tuple[str, str, None] | None:
        path = templates_dir() / name
        with contextlib.suppress(OSError):
            return package_text(path), str(path), None
        return None

    loaders: list[jinja2.BaseLoader] = [jinja2.FunctionLoader(packaged)]
    if template is not None:
        loaders.append(jinja2.FileSystemLoader(str(template.parent)))
    if users_text is not None:
        source = (users_text, str(template), None)
        user = jinja2.FunctionLoader(lambda name: source if template is not None and name == template.name else None)
        loaders.insert(0, user)
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"quote": lambda value: shlex.quote(str(value)), "chosen_clusters": chosen_clusters}
    environment.filters["quote_around_variables"] = quote_around_variables
    return environment


def quote_around_variables(value: str) -> str:
    """One shell word for a value of [environment]: `${NAME}` is a variable of the job, anything else is literal.

    >>> print(quote_around_variables("/tmp/${USER}-$HOME $(date)"))
    /tmp/"${USER}"'-$HOME $(date)'
    """
    parts = re.split(r"(\$\{[A-Za-z_][A-Za-z0-9_]*\})", value)
    words = (f'"{part}"' if at % 2 else shlex.quote(part) for at, part in enumerate(parts) if part)
    return "".join(words) or "''"


def _innermost_line(fault: BaseException, template: Path | None) -> str:
    """`file:line` of the template line that failed, from the last frame of a template in the traceback."""
    where, step = str(template or "template"), fault.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if file.endswith(".j2") or (template is not None and file == str(template)):
            where = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return where
