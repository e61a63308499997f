"""hpc-gpt profile"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.request import small_options
from hpc_gpt.cli.verb import UncutGroup, VerbCommand, options_of, verb
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import check_new, config_dir, write_new
from hpc_gpt.core.settings.cluster import FALLBACK, list_profiles, load_profile, user_default
from hpc_gpt.core.tables import toml_lines, toml_value
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.doctor.site import (
    choice_lines,
    choose_partition,
    count_gpus,
    lines_to_fill_in,
    profile_text,
    read_site,
)
from hpc_gpt.launcher.smoke import fit_small


@verb(190, UncutGroup)
def profile() -> None:
    """List, show and detect cluster profiles.

    A profile says how one site wants its jobs. Your own profiles are in the config folder, clusters/NAME.toml.
    """


@profile.command("list")
def list_() -> None:
    """List every profile with its description; yours are marked."""
    names = list_profiles()
    default = user_default() or FALLBACK
    width = max(len(name) for name in names)
    for name, path in names.items():
        listed, mark = load_profile(name), "*" if name == default else " "
        origin = "  (from documentation, not tried there)" if listed.to_add else ""
        origin = "  (yours)" if path.is_relative_to(config_dir()) else origin
        say(f"{mark} {name.ljust(width)}  {listed.description}{origin}", hang=width + 4)
    say(f'\n* the default without --cluster; cluster = "NAME" in {config_dir() / "config.toml"} changes it', err=True)


@profile.command("show")
@click.argument("name", shell_complete=completers.profiles)
def show(name: str) -> None:
    """Print every key of profile NAME, with the keys of the profile that it extends."""
    settings = asdict(load_profile(name))
    tables = {key: settings.pop(key) for key in ("container", "environment", "machine", "calibration", "to_add")}
    for key, value in settings.items():
        click.echo(f"{key} = {toml_value(value)}" if value is not None else f"# {key} is not set")
    for key, table in tables.items():
        _show_table(key, table or {})
    path = list_profiles().get(name)
    if path is not None:
        say(f"\nfrom {path}", err=True)


@profile.command("detect", VerbCommand, params=options_of("detect"))
def detect(name: str | None, output: Path | None, partition: str | None) -> None:
    """Write a commented profile of the cluster that you are on.

    The values are from sinfo, scontrol and sacctmgr: GPUs, CPUs, partition, your accounts and qos, features, limits
    and requeueing. Without --name and -o the profile is printed. No file is overwritten.
    """
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"--name {name!r} is not a valid profile name", "use letters, digits, dots, dashes and underscores"
        )
    path = config_dir() / "clusters" / f"{name}.toml" if name is not None else output
    check_new([path] if path is not None else [])
    site = read_site()
    chosen = choose_partition(site, partition)
    text = profile_text(site, chosen)
    for line in choice_lines(site, chosen):
        say(line, err=True)
    if path is None:
        click.echo(text, nl=False)
        return
    write_new({path: text})
    say(f"wrote {path}")
    say("fill in its last lines, which plan and init need:", err=True)
    for line in lines_to_fill_in(site, chosen):
        click.echo(f"  {line}", err=True)
    written = load_profile(name or str(path))
    sizes = fit_small(written, count_gpus(chosen, written.gpus_per_node))
    command = ["hpc-gpt", "doctor", *small_options(sizes), "--cluster", name or str(path)]
    click.echo(f"next: {shlex.join(command)}", err=True)


def _show_table(name: str, table: Mapping[str, Any]) -> None:
    """Prints the keys of a table that are set; the tables within it come last."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if lines := toml_lines({key: value for key, value in table.items() if key not in inner}):
        click.echo("\n".join(["", f"[{name}]", *lines]))
    for key, value in inner.items():
        _show_table(f"{name}.{key}", value)
