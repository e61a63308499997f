"""The text of the job script of a resolved experiment, with its `#SBATCH` lines.

The text is a pure function of the experiment: it has no run id, time, host or path of this machine.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt import __version__
from hpc_gpt.engines import engine_named
from hpc_gpt.errors import ConfigError, RenderError, raise_faults
from hpc_gpt.files import templates_dir
from hpc_gpt.settings.command import command_lines
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.settings.resolved import Resolved, folder_name
from hpc_gpt.slurm.options import OF_JOB, options_of
from hpc_gpt.slurm.sbatch_words import chosen_clusters
from hpc_gpt.tables import close_matches
from hpc_gpt.words import counted

if TYPE_CHECKING:
    from jinja2 import Environment

_FLAG = re.compile(r"-[A-Za-z]|-[A-Za-z].+|--[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# {flag that the script sets itself: the key that decides it, None if no key does}.
_OWNED_SBATCH = {
    **{option: f"job.{key}" for key, option in OF_JOB.items()},
    "cpus-per-task": "job.cpus_per_task", "nodes": "layout.nodes", "gpus": "layout.gpus",
    **dict.fromkeys(("gres", "gpus-per-node"), "the profile's gpu_flag and gpu_type"), "signal": "job.signal_lead_s",
    **dict.fromkeys(("requeue", "no-requeue"), "the profile's chain"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus-per-task", "output", "error", "open-mode", "export", "wrap",
                     "array", "wait", "parsable", "quiet", "test-only")),
}  # fmt: skip
_OWNED_SRUN = dict.fromkeys(("ntasks", "nodes", "ntasks-per-node", "gpus-per-task", "export", "kill-on-bad-exit"))
# {flag without such a key: why it cannot be added}.
_WHY = {
    "gpus-per-task": "it hides a rank's neighbours from NCCL; one task a GPU comes from --ntasks-per-node",
    **dict.fromkeys(("output", "error"), "all output goes to attempts/<n>/log"),
    "export": "the ranks need the whole environment of the job",
}  # fmt: skip
# Directives after those of the size.
_LATER = ("mem", "time")
_MARK = "#SBATCH "
_JOB_NAME = "--job-name="


def render_script(resolved: Resolved, template: Path | None = None) -> str:
    """The job script, from the engine's template if it has one, else from base.sh.j2, or from `template`, the user's
    own child of it.

    Raises ConfigError for a value that a directive cannot carry, RenderError (with file, line and variable) for a
    template.
    """
    import jinja2

    check_job(resolved)
    names = [f"{resolved.engine.name}.sh.j2", "base.sh.j2"] if template is None else [template.name]
    name = names[0]
    try:
        environment = _environment(template)
        if template is not None and template.is_file():
            _check_blocks(environment, template)
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


# All but KILL, STOP, CHLD and CONT, and the two that the C library keeps.
_SIGNALS = [number for number in range(1, 65) if number not in (9, 17, 18, 19, 32, 33)]


def render_job_script(resolved: Resolved, body: bytes, arguments: Sequence[str], directives: Sequence[str]) -> str:
    """The job script around a script of the user's own, whose bytes are its end (surrogates stand for bytes that are no
    UTF-8). `directives` are all of the text's, as sbatch is to read them."""
    facts, signal = resolved.script, resolved.job.signal_lead_s
    assert facts is not None
    template = _environment(None).get_template(f"script/{resolved.cluster.scheduler}.sh.j2")
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


def _check_blocks(environment: Environment, template: Path) -> None:
    """RenderError for a block of the user's child that base.sh.j2 does not have: jinja would leave it out."""
    from jinja2 import nodes

    base = environment.parse((templates_dir() / "base.sh.j2").read_text(encoding="utf-8"))
    known = [block.name for block in base.find_all(nodes.Block)]
    tree = environment.parse(template.read_text(encoding="utf-8"))
    if not any(isinstance(node, nodes.Extends) for node in tree.body):
        return
    for block in tree.body:
        if isinstance(block, nodes.Block) and block.name not in known:
            raise RenderError(
                f"{template}:{block.lineno}: base.sh.j2 has no block {block.name!r}",
                close_matches(block.name, known) or f"its blocks: {', '.join(known)}",
            )


def array_script(name: str, scripts: Sequence[str]) -> str:
    """The script of a job array for runs with equal directives. Its job name is theirs if they share one, or `name`."""
    own = {line for script in scripts for line in script_directives(script) if line.startswith(_JOB_NAME)}
    shared = own.pop() if len(own) == 1 else _JOB_NAME + quote_directive(name)
    template = _environment(None).get_template("slurm/array.sh.j2")
    return template.render(
        title=f"{folder_name(name)}: {len(scripts)} runs",
        version=__version__,
        directives=[shared, *directives_but_name(scripts[0])],
    )


def script_directives(script: str) -> list[str]:
    """The directives of a script: the text after `#SBATCH`, up to the first command, at which sbatch stops reading.

    >>> script_directives("#!/bin/bash\\n#SBATCH --nodes=2\\n\\n# more\\ntrue\\n#SBATCH --nodes=3\\n")
    ['--nodes=2']
    """
    found = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith(_MARK):
            found.append(line.removeprefix(_MARK))
    return found


def directives_but_name(script: str) -> list[str]:
    """The directives without the job's name; scripts in which they are equal can be one array."""
    return [line for line in script_directives(script) if not line.startswith(_JOB_NAME)]


def variables(resolved: Resolved) -> dict[str, Any]:
    """The variables of a template. Texts are not quoted: use `| quote`."""
    profile = resolved.cluster
    return {
        "resolved": resolved,
        "resolved_json": resolved.to_json(),
        "title": _title(resolved),
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
        "command": command_lines(resolved.command) if resolved.command is not None else [],
        "signal": resolved.command.stop_signal if resolved.command is not None else "",
        "tasks": resolved.tasks,
        "tasks_per_node": resolved.tasks_per_node,
        "directives": sbatch_directives(resolved) if profile.scheduler == "slurm" else [],
        "srun": resolved.job.srun,
        "modules": profile.modules,
        "purge_modules": profile.purge_modules,
        "venv": profile.venv,
        "python": profile.python or ("python" if profile.venv else "python3"),
        "container": profile.container,
        "environment": profile.environment,
        "sets_allocator": not engine_named(resolved.engine.name).is_program
        and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(profile.environment),
        "node_suffix": profile.node_suffix,
    }


def _title(resolved: Resolved) -> str:
    shape, where = resolved.model, counted(resolved.gpus, "GPU")
    what = f"{shape.layers} layers of {shape.hidden}, {shape.params:,} parameters, " if resolved.has_model else ""
    return f"{resolved.slug}: {what}{f'{resolved.layout} on {where}' if resolved.has_layout else where}"


@functools.cache
def _environment(template: Path | None) -> Environment:
    """The jinja environment. Cached with its compiled templates, because a sweep renders a thousand times."""
    import jinja2

    folders = [str(templates_dir())] if template is None else [str(templates_dir()), str(template.parent)]
    loader: jinja2.BaseLoader = jinja2.FileSystemLoader(folders)
    if template is not None:
        # The user's file comes before a shipped one of the same name, and is read again when it has changed.
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
    environment.filters |= {"quote": lambda value: shlex.quote(str(value)), "chosen_clusters": chosen_clusters}
    return environment


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _innermost_line(fault: BaseException, template: Path | None) -> str:
    """`file:line` of the template line that failed: the last frame of a template in the traceback."""
    where, step = str(template or "template"), fault.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if file.endswith(".j2") or (template is not None and file == str(template)):
            where = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return where


# --- directives


def check_job(resolved: Resolved) -> None:
    """ConfigError, with all faults, for values that a directive, a file pattern or the script cannot carry."""
    faults = [*_text_faults(resolved), *_flag_faults(resolved), *_environment_faults(resolved)]
    try:
        limit = limit_s(resolved.job.time)
    except ConfigError as fault:
        faults.append(str(fault))
    else:
        lead = resolved.job.signal_lead_s
        if lead is not None and lead < 1:
            faults.append(f"job.signal_lead_s is {lead}, but must be at least 1")
        elif limit is not None and lead is not None and lead >= limit:
            faults.append(
                f"job.signal_lead_s {lead} s leaves no time of job.time {resolved.job.time} ({limit} s): "
                "the job would save and go back to the queue at once"
            )
    spares = resolved.job.spare_nodes or 0
    if spares < 0:
        faults.append(f"job.spare_nodes is {spares}, but must not be negative")
    elif spares and not resolved.job.preflight and resolved.cluster.scheduler == "slurm":
        faults.append(f"job.spare_nodes is {spares}, but job.preflight is off, and only it finds a node to replace")
    cpus = resolved.job.cpus_per_task
    if cpus is not None and cpus < 1:
        faults.append(f"job.cpus_per_task is {cpus}, but must be at least 1")
    raise_faults(dict.fromkeys(faults, "change the key in the experiment, the cluster profile or with --set"))


def sbatch_directives(resolved: Resolved) -> list[str]:
    """The text after `#SBATCH` in each line, quoted. `check_job` must have passed."""
    job, profile = resolved.job, resolved.cluster
    lines: list[str] = []
    texts = {key: f"--{option}={quote_directive(value)}" for key, option in OF_JOB.items()
             if (value := getattr(job, key)) is not None}  # fmt: skip
    lines += [text for key, text in texts.items() if key not in _LATER]
    lines += [f"--nodes={allocated_nodes(resolved)}", f"--ntasks-per-node={resolved.ranks_per_node}"]
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpu_flag == "gres":
        lines.append("--gres=" + quote_directive(f"gpu:{kind}{resolved.ranks_per_node}"))
    elif profile.gpu_flag == "gpus-per-node":
        lines.append("--gpus-per-node=" + quote_directive(f"{kind}{resolved.ranks_per_node}"))
    cpus = cpus_per_task(resolved)
    if cpus is not None:
        lines.append(f"--cpus-per-task={cpus}")
    lines += [text for key, text in texts.items() if key in _LATER]
    if job.exclusive:
        lines.append("--exclusive")
    lines += ["--no-requeue" if profile.chain == "none" else "--requeue", "--open-mode=append"]
    # Without job.time the partition's limit holds, and Slurm sends the signal ahead of that.
    if job.signal_lead_s is not None and (job.time is None or limit_s(job.time) is not None):
        lines.append(f"--signal=USR2@{job.signal_lead_s}")
    # Not in the run folder: it may not exist yet, and a job whose output cannot be opened dies without a message.
    lines.append("--output=%x-%j.out")
    lines += [quote_directive(flag) for flag in job.sbatch]
    return lines


def allocated_nodes(resolved: Resolved) -> int:
    """The nodes to request: those of the layout and the spare ones."""
    return resolved.nodes + (resolved.job.spare_nodes or 0)


def quote_directive(text: str) -> str:
    """A value of a directive. sbatch reads quotes as a shell does, but removes a backslash even between them."""
    return shlex.quote(text.replace("\\", "\\\\"))


def cpus_per_task(resolved: Resolved) -> int | None:
    """The CPUs of a rank: as requested, else a GPU's share of the node, else None."""
    if resolved.job.cpus_per_task is not None:
        return resolved.job.cpus_per_task
    if resolved.cluster.cpus_per_node is None:
        return None
    return max(1, resolved.cluster.cpus_per_node // resolved.cluster.gpus_per_node)


def _text_faults(resolved: Resolved) -> Iterator[str]:
    job, profile = resolved.job, resolved.cluster
    texts: dict[str, str | None] = {f"job.{name}": getattr(job, name) for name in OF_JOB}
    texts |= {f"job.sbatch[{i}]": flag for i, flag in enumerate(job.sbatch)}
    texts |= {f"job.srun[{i}]": flag for i, flag in enumerate(job.srun)}
    where = f"cluster profile {profile.name}"
    texts |= {f"{where}: {name}": getattr(profile, name) for name in ("gpu_type", "venv", "python", "node_suffix")}
    texts |= {f"{where}: modules[{i}]": module for i, module in enumerate(profile.modules)}
    if profile.container is not None:
        texts[f"{where}: container.image"] = profile.container.image
        texts |= {f"{where}: container.mounts[{i}]": mount for i, mount in enumerate(profile.container.mounts)}
    for key, text in texts.items():
        if text is None:
            continue
        if bad := _control_character(text):
            yield f"{key} holds {bad}, which a line of the script cannot carry: {text!r}"
        elif text == "" and key not in (f"{where}: node_suffix", "job.comment"):
            yield f"{key} is empty; leave it out instead"
    if job.name and (bad_chars := sorted(set(job.name) & set("%\\/"))):
        yield (
            f"job.name {job.name!r} holds {' and '.join(bad_chars)}, which the output's name %x-%j.out cannot carry "
            "(job.name is the experiment's name unless set)"
        )
    if profile.container is not None and profile.scheduler == "local":
        yield f"{where} is this machine, where ranks run without a container"
    if profile.container is not None and profile.container.kind == "pyxis":
        for i, mount in enumerate(profile.container.mounts):
            if "," in mount:
                yield f"{where}: container.mounts[{i}] {mount!r} holds a comma, which separates mounts in pyxis"


def _control_character(text: str) -> str:
    """A description of the first character that no directive can carry; empty without one."""
    for char in text:
        if char == "\n":
            return "a newline"
        if char == "\0":
            return "a NUL"
        if ord(char) < 32 or ord(char) == 127:
            return f"the control character {char!r}"
        if 0xD800 <= ord(char) <= 0xDFFF:
            return "bytes that are no UTF-8"
    return ""


def _flag_faults(resolved: Resolved) -> Iterator[str]:
    tables = (("sbatch", resolved.job.sbatch, _OWNED_SBATCH), ("srun", resolved.job.srun, _OWNED_SRUN))
    for table, flags, owned in tables:
        letters = options_of(table).letters
        for i, flag in enumerate(flags):
            key = f"job.{table}[{i}]"
            if not _FLAG.fullmatch(flag):
                yield f"{key} {flag!r} is no flag of {table}: one --name or --name=value each"
                continue
            name = flag[2:].partition("=")[0] if flag.startswith("--") else letters.get(flag[1], flag[1])
            if name in owned:
                instead = owned[name]
                why = f"set {instead}" if instead else _WHY.get(name, "the script decides it itself")
                yield f"{key} {flag!r} is not for you to add: {why}"


def _environment_faults(resolved: Resolved) -> Iterator[str]:
    for name, value in resolved.cluster.environment.items():
        where = f"cluster profile {resolved.cluster.name}: environment.{name}"
        if not _NAME.fullmatch(name):
            yield f"{where!r} is no name of a variable"
        elif "\0" in value:
            yield f"{where} holds a NUL, which no variable can carry"
