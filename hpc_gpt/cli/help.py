"""hpc-gpt help: topics for which `--help` has no space."""

import json
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import NamedTuple

import click

from hpc_gpt.cli.verb import UncutGroup, options_of, verb
from hpc_gpt.core.ends.failures import CLASSES, LIVE, RETRY_WORDS
from hpc_gpt.core.engines import engines as all_engines
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.files import schemas_dir
from hpc_gpt.core.gone import gone_fault
from hpc_gpt.core.keys import Key, keys_of
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import ClusterProfile, list_profiles, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import Experiment, LayoutRequest
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.tables import close_matches, keys_called, toml_value
from hpc_gpt.launcher.render import variables
from hpc_gpt.planner.fast import fast_text

_NOT_SET = "-: not set; the cluster profile or a rule gives the value. KEY= resets a key to its default"


class Topics(UncutGroup):
    """The topics; the name of a verb shows that verb's own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in super().list_commands(ctx) if name != "word"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        topic = super().get_command(ctx, name)
        verbs = ctx.find_root().command
        if topic is not None or not isinstance(verbs, click.Group) or (verb := verbs.get_command(ctx, name)) is None:
            return topic

        def show() -> None:
            with click.Context(verb, info_name=name, parent=ctx.find_root()) as verb_context:
                click.echo(verb.get_help(verb_context))

        return click.Command(name, callback=show, help=f"The help of hpc-gpt {name}.")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and (gone := gone_fault(f"help {args[0]}") or gone_fault(args[0])):
            raise UserError(*gone)
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from hpc_gpt.cli import near_verb, verb_meant, verbs

            topics, tables = self.list_commands(ctx), _tables_of_keys()
            if args[0].strip("[].").partition(".")[0] in tables:
                return super().resolve_command(ctx, ["keys", *args])
            begins_another = any(name.startswith(args[0]) for name in (*topics, *verbs()))
            if not verb_meant(args[0]) and any(_about(args[0], not begins_another)):
                return super().resolve_command(ctx, ["word", *args])
            hint = _profile_hint(args[0]) or verb_meant(args[0]) or close_matches(args[0], topics)
            hint = hint or close_matches(args[0], tables).replace("mean ", "mean help keys ") or near_verb(args[0])
            hint = hint or f"topics: {', '.join(topics)}; or a verb of hpc-gpt --help"
            raise UserError(f"no topic and no verb {args[0]!r}", hint)
        return super().resolve_command(ctx, args)


@verb(210, Topics)
def help_command() -> None:
    """List keys of experiments, profiles and records, engines, models, a template's variables and how runs end.

    Any other word is looked up in the names, values and meanings of keys, and among engines, models, profiles, GPUs and
    ends.

    \b
    hpc-gpt help keys train
    hpc-gpt help wsd
    """


def _tables_of_keys() -> list[str]:
    return list(dict.fromkeys(key.name.partition(".")[0] for key in keys_of(Experiment) if "." in key.name))


def _profile_hint(word: str) -> str:
    """The hint for a word that belongs to cluster profiles; empty for any other."""
    words = {"profiles", "cluster", "clusters", *(key.name for key in keys_of(ClusterProfile))}
    return "hpc-gpt help profile lists the keys of a cluster profile" if word in words else ""


def _print_keys(listed: list[Key], as_json: bool, asides: str) -> None:
    if as_json:
        rows = [{"key": key.name, "default": key.default, "type": key.type, "means": key.means} for key in listed]
        click.echo(json.dumps({"schema": 1, "keys": rows}, indent=1))
        return
    click.echo("\n".join(_key_lines(listed)))
    click.echo(f"\n{asides}", err=True)


def _key_lines(listed: Sequence[Key]) -> list[str]:
    width = max((len(key.name) for key in listed), default=0)
    values = ["-" if key.default is None else toml_value(key.default) for key in listed]
    return [
        f"{key.name.ljust(width)}  {value.ljust(16)}  {key.type}\n    {key.means}"
        for key, value in zip(listed, values, strict=True)
    ]


@help_command.command("keys")
@click.argument("table", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, keys.")
def keys(table: str | None, as_json: bool) -> None:
    """List every key of an experiment, or of its TABLE: default, type, meaning. --set KEY=VALUE sets any of them."""
    listed = keys_of(Experiment)
    if table is not None:
        wanted = table.strip("[].")
        named = [key for key in listed if wanted in (key.name, key.name.partition(".")[0])]
        listed = named or [key for key in listed if wanted == key.name.rpartition(".")[2]]
        if not listed:
            tables = _tables_of_keys()
            hint = close_matches(wanted, [*tables, *(key.name for key in keys_of(Experiment))])
            hint = _profile_hint(wanted) or hint or f"tables: {', '.join(tables)}"
            raise ConfigError(f"an experiment has no table or key {table!r}", hint)
    _print_keys(listed, as_json, _NOT_SET)


class _About(NamedTuple):
    """The entries that match a word: keys of an experiment, keys of a cluster profile, and lines of all others."""

    keys: list[Key]
    profile_keys: list[Key]
    others: list[str]


def _about(word: str, in_meanings: bool = True) -> _About:
    """The entries whose name or value is the word. If there are none, with `in_meanings` the keys that have it in their
    name or meaning."""
    name, all_keys = word.strip("[].-").lower(), keys_of(Experiment)
    called = {
        *keys_called(name),
        *(option.key for option in options_of("plan") if f"--{name}" in option.opts),
    }
    engine = all_engines().get(name)
    switches = {f"engine.{switch}" for switch in engine.switches} if engine is not None else set()
    matches = [
        key for key in all_keys
        if name == key.name.rpartition(".")[2] or key.name in switches or key.name in called
        or name in key.choices
    ]  # fmt: skip
    of_profile = [key for key in keys_of(ClusterProfile) if name in (key.name, key.name.rpartition(".")[2])]
    alike = [other for other in PRESETS if len(name) > 2 and other.startswith(name) and other != name]
    alike += [other for other in PRESETS if "model.experts" in called and PRESETS[other].is_mixture]
    others = [line for entry in (name, *alike) for line in _lines_about(entry)]
    if in_meanings and not (matches or of_profile or others):
        separated = "[ _-]".join(map(re.escape, re.split("[ _-]", name)))
        parts = re.compile(rf"(?<![A-Za-z]){separated}(?![A-Za-z])", re.IGNORECASE)
        matches = [key for key in all_keys if len(name) > 2 and (parts.search(key.name) or parts.search(key.means))]
    return _About(matches, of_profile, others)


def _lines_about(name: str) -> list[str]:
    """The lines on the engine, model, GPU, cluster profile, end and key of a record that have this name."""
    lines = []
    if name in all_engines():
        lines.append(_engine_line(name))
    if name in PRESETS:
        shape = PRESETS[name]
        sizes = f"hidden {shape.hidden}, layers {shape.layers}, heads {shape.heads}, vocab {shape.vocab}"
        lines.append(f"--model {name}: {shape.params / 1e9:.3g}e9 parameters, {sizes}, seq {shape.seq}")
    if name in DEVICES:
        device = DEVICES[name]
        peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in device.peaks.items())
        lines.append(f'device = "{name}" in a cluster profile: {device.memory_gib:g} GiB; TFLOP/s: {peaks}')
    if name in list_profiles():
        lines.append(f"--cluster {name}: {load_profile(name).description}; hpc-gpt profile show {name} prints its keys")
    for ended in ("gpu_memory", "host_memory") if name == "oom" else [name] if name in CLASSES else []:
        lines += [f"a run can end as {ended}: {CLASSES[ended].means}", f"    {_chance(ended)}"]
    lines += [
        f"{key.name} of a record, for report --columns: {key.means}" for key in keys_of(Record) if key.name == name
    ]
    return lines


@help_command.command("word", hidden=True)
@click.argument("word")
def word_command(word: str) -> None:
    """Say what a word means: a key, a value, an engine, a model, a profile or an end."""
    about = _about(word)
    parts = ["\n".join(about.others), "\n".join(_key_lines(about.keys))]
    if about.profile_keys:
        parts.append("\n".join(["in a cluster profile:", *_key_lines(about.profile_keys)]))
    click.echo("\n\n".join(filter(None, parts)))
    if about.keys:
        click.echo(f"\n{_NOT_SET}", err=True)


@help_command.command("profile")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, keys.")
def profile(as_json: bool) -> None:
    """List every key of a cluster profile: default, type, meaning."""
    _print_keys(
        keys_of(ClusterProfile), as_json, "-: not set. hpc-gpt profile show NAME prints a profile as an example"
    )


@help_command.command("engines")
def engines() -> None:
    """List every engine: how it splits the model, its ZeRO stages, its switches in [engine], and those that a run
    without EXPERIMENT has by default on a GPU."""
    for name, facts in all_engines().items():
        click.echo(_engine_line(name))
        click.echo(click.wrap_text(", ".join(sorted(facts.switches)), 100, "    ", "    "))
    click.echo("\n" + fast_text(), nl=False)
    click.echo("\nhpc-gpt help keys lists the values of each switch", err=True)


def _engine_line(name: str) -> str:
    facts = all_engines()[name]
    axes = " x ".join(axis for axis in AXES if axis == "dp" or axis in facts.axes)
    return f"{name}: {axes}" + (f"; ZeRO {', '.join(map(str, facts.zero_stages))}" if facts.has_zero else "")


@help_command.command("models")
def models() -> None:
    """List every model preset, for --model: parameters and shape."""
    for name in PRESETS:
        click.echo(_lines_about(name)[0])
    click.echo("\n--model also takes transformers' config.json or its folder; --hidden, --layers, … a shape", err=True)


@help_command.command("causes")
def causes() -> None:
    """List how a run or an attempt can end: each class, whether a retry can help, and what to do."""
    for name, row in CLASSES.items():
        click.echo(f"{name}: {row.means}\n    {_chance(name)}")


def _chance(name: str) -> str:
    """The text on a run that ended so: whether a retry can succeed, and what to do."""
    row = CLASSES[name]
    if name in ("done", *LIVE):
        return row.to_do
    return f"retry: {RETRY_WORDS[row.can_succeed]}; a job chain {row.chain}; {row.to_do}"


@help_command.command("json")
@click.argument("verb", required=False)
def json_schema(verb: str | None) -> None:
    """Print the JSON schema of VERB's --json output; without VERB list the verbs that have one. Keys are only ever
    added."""
    files = {path.stem: path for path in sorted(schemas_dir().glob("*.json"))}
    if verb is None:
        click.echo("\n".join(files))
        return
    if verb not in files:
        raise UserError(f"no schema for {verb!r}", close_matches(verb, files) or f"schemas: {', '.join(files)}")
    click.echo(files[verb].read_text(encoding="utf-8"), nl=False)


@help_command.command("template")
def template() -> None:
    """List the blocks and variables of base.sh.j2, for a template of your own (--template FILE)."""
    example = Experiment(name="example", model=Model(preset="gpt2"), layout=LayoutRequest(gpus=4))
    click.echo(
        '{% extends "base.sh.j2" %}; {{ super() }} keeps the text of a block; `| quote` makes a text one shell word.'
    )
    click.echo(
        "blocks: directives environment preflight doctor (with job.preflight) launch epilogue\n"
        "variables, with gpt2 on 4 GPUs as the example:"
    )
    for name, value in variables(resolve(example, load_profile("generic-slurm"))).items():
        shown = type(value).__name__ if is_dataclass(value) or name == "resolved_json" else repr(value)
        click.echo(f"  {name.ljust(16)}{shown}")


@help_command.command("record")
def record() -> None:
    """List every key of a record, for --columns and --sort of report."""
    listed = keys_of(Record)
    width = max(len(key.name) for key in listed)
    for key in listed:
        click.echo(f"{key.name.ljust(width)}  {key.means}")
