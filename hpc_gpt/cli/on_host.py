"""`hpc-gpt --host NAME VERB …`: the same verb on another machine, with the files that it names.

Experiments and job scripts are copied into `~/.hpc-gpt/sent/HASH` there, which `clean` removes later, and their words
become the paths there. All other words stay as they are.
"""

import contextlib
import hashlib
import io
import os
import re
import secrets
import shlex
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hpc_gpt import __version__
from hpc_gpt.cli.ssh import Host, Unreachable
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import config_dir, experiments_dir, read_start, replace_whole
from hpc_gpt.core.format import show_bytes
from hpc_gpt.core.secrets import is_credential_file
from hpc_gpt.core.tables import read_toml
from hpc_gpt.core.terminal import say

MINOR = __version__.rpartition(".")[0]
_MOST_BYTES = 10 << 20
_WITH_FILES = ("submit", "render", "plan")
# Options whose values may be paths of files that the request needs.
_FILE_OPTIONS = ("--cluster", "--with", "--template")
# Data, weights and checkpoints: too large, or the host's own.
_NEVER = re.compile(r"\.(tokens|bin|idx|safetensors|pt|pth|ckpt|gguf|np[yz]|parquet|distcp|h5|jsonl)", re.IGNORECASE)
# Variables that go there: the user's wishes, and the line that TAB completes.
_PASSED = re.compile(r"NO_COLOR|LANG|TERM|COMP_\w+|_HPC_GPT_COMPLETE")
# Sets "$@" to the program and its words. A login shell is asked for its PATH if the program is not in this one.
_START = """
export HPC_GPT_HOST=
if [ "$python" ]; then set -- "$python" -m hpc_gpt "$@"; else
  command -v hpc-gpt >/dev/null || PATH=$(echo env | "$SHELL" -l 2>/dev/null | sed -n 's/^PATH=//p' | tail -n 1):$PATH
  set -- hpc-gpt "$@"
fi
command -v "$1" >/dev/null || { printf '%s\\n' "$lacks" >&2; exit 127; }
exec "$@"
"""
_UNPACK = """
[ ! -d "$folder" ] || exec touch "$folder"
umask 077; mkdir -p "${folder%/*}" && new=$(mktemp -d "$folder.XXXXXX") && tar -xf - -C "$new" || exit 1
mv -T "$new" "$folder" 2>/dev/null || rm -rf "$new"
[ -d "$folder" ]
"""
# Paths of this machine that are to be there, too.
_CHECK = """for path in {}; do [ -e "$path" ] || {{
  printf 'Error: %s is on this machine, and not on %s\\n\\n' "$path" {} >&2
  echo "hint: copy it there, or use --host '' for this machine" >&2; exit 2
}}; done
"""


class OnHost:
    """The program on a host, for one command."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for what is not the name of a host."""
        if not name.strip() or name.startswith("-") or any(char.isspace() for char in name):
            raise ConfigError(f"--host {name!r} is not the name of a host", "name one of your ~/.ssh/config")
        self.host = Host(name)
        path = config_dir() / "config.toml"
        settings = read_toml(path).get("hosts", {}).get(name, {}) if path.is_file() else {}
        self.hint = f"pip install 'hpc-gpt=={MINOR}.*' there, or name its python under [hosts.{name}] in {path}"
        lacks = f"Error: there is no hpc-gpt on {name}, and this one is {__version__}\n\nhint: {self.hint}"
        self._find = f"python={shlex.quote(settings.get('python', ''))} lacks={shlex.quote(lacks)}\n"

    def script(self, *words: str, before: str = "") -> str:
        """The script of sh that runs the program with these words, each as sh reads it."""
        passed = {key: value for key, value in os.environ.items() if _PASSED.fullmatch(key)}
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in passed.items())
        return f"{exports}{before}{self._find}set -- {' '.join(words)}{_START}"

    def check_version(self) -> None:
        """Raises ConfigError if the host has another minor version: that one has refused our first word."""
        found = self.host.ask(self.script("--version")).decode().split()[-1:]
        if found and found[0].rpartition(".")[0] != MINOR:
            raise ConfigError(f"hpc-gpt on {self.host.name} is {found[0]}, and this one is {__version__}", self.hint)

    def complete(self) -> int:
        """Completes the user's line there; it never asks for a password."""
        script = self.script(f"--from-host={MINOR}")
        with contextlib.suppress(Unreachable):
            sys.stdout.write(self.host.ask(script, "-q", "-oBatchMode=yes", "-oConnectTimeout=5").decode())
        return 0

    def run(self, words: Sequence[str], options: Sequence[str], command: click.Command | None) -> int:
        """Runs a verb, whose `command` is known, and returns its exit code. `options` come before the verb. Raises
        ConfigError for a file that is not sent, Unreachable if there is no connection."""
        there, before, page = list(map(shlex.quote, words)), "", None
        read = list(read_words(words, command)) if command is not None else []
        named = [(*word, path) for word in read if (path := path_here(*word[1:])) is not None]
        if words[0] in _WITH_FILES:
            files = Files(dict(pair for _, option, _, path in named for pair in files_of(option, path)))
            for at, _, value, path in named:
                there[at] = words[at].removesuffix(value) + files.there(path)
            if any((option, value) == ("--cluster", "local") for _, option, value in read):
                say(f"note: --cluster local is {self.host.name} itself", err=True)
            if files.folder:
                self.host.ask(f"folder={files.folder}{_UNPACK}", given=files.archive)
        else:
            paths = [there[at] for at, option, value, _ in named if not option and "/" in value]  # else a run's name
            before = _CHECK.format(" ".join(paths), shlex.quote(self.host.name))
        back = f'"$HOME"/.hpc-gpt/{secrets.token_hex(8)}.html'
        for at, option, value in read if words[0] == "report" else ():
            if option == "--html":
                from hpc_gpt.report.page import check_page_target

                check_page_target(page := Path(value))
                there[at] = words[at].removesuffix(value) + back
                before += 'mkdir -p "$HOME/.hpc-gpt"\n'
        script = self.script(f"--from-host={MINOR}", *options, *there, before=before)
        code = self.host.run(script, follows=words[0] == "logs")
        if code == 2:
            self.check_version()
        code = 2 if code == 127 else code  # there is no program, as the script has said
        if page is not None and (text := self.host.ask(f"cat {back} 2>/dev/null && rm {back} || :")):
            replace_whole(page, text.decode())
            say(f"brought {page} from {self.host.name}", err=True)
        return code


class Files:
    """Files that go there, {file: the folder that links must not leave}, as a tar that depends on names and content
    alone; `folder`: where they will be, empty without files."""

    def __init__(self, files: dict[Path, Path]) -> None:
        self.names = list(files)
        self.top = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for file, root in sorted(files.items()):
                check_file(file, root)
                entry, content = tarfile.TarInfo(str(file.relative_to(self.top))), file.read_bytes()
                entry.size, entry.mode = len(content), 0o700 if os.access(file, os.X_OK) else 0o600
                tar.addfile(entry, io.BytesIO(content))
        self.archive = buffer.getvalue()
        self.folder = f'"$HOME"/.hpc-gpt/sent/{hashlib.sha256(self.archive).hexdigest()[:16]}' if files else ""

    def there(self, path: Path) -> str:
        """The path of a file or a folder there, as a word of sh; below experiments/ it is the host's own."""
        place, own = Path(os.path.abspath(path)), experiments_dir().resolve()
        if any(file.is_relative_to(place) for file in self.names):
            return f"{self.folder}/{shlex.quote(str(place.relative_to(self.top)))}"
        return shlex.quote(str(path.resolve().relative_to(own) if path.resolve().is_relative_to(own) else path))


def read_words(words: Sequence[str], command: click.Command) -> Iterator[tuple[int, str, str]]:
    """(place, option or nothing, value) of each value and other word up to a job script, whose words are its own."""
    from hpc_gpt.core.slurm.directives import is_job_script, options_of

    sbatch = options_of("sbatch")
    ours = {name: option for option in command.params for name in option.opts}
    at = 0
    while (at := at + 1) < len(words):
        word = words[at]
        if not word.startswith("-"):
            yield at, "", word
            if is_job_script(Path(word)):
                return
        elif word != "--":
            name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], "")
            if name in ours:
                valued = not getattr(ours[name], "is_flag", False)
            else:
                long = sbatch.named(name[2:]) if name.startswith("--") else sbatch.letters.get(name[1:], "")
                valued = sbatch.kinds.get(long) == "valued"
            at += valued and not equals
            yield at, name, value if equals else "".join(words[at : at + 1])


def path_here(option: str, value: str) -> Path | None:
    """The file or folder here that a value names, None without one; an experiment needs no suffix. The name of a
    profile, as of any --cluster without .toml, is the host's."""
    if (option and option not in _FILE_OPTIONS) or (option == "--cluster" and not value.endswith(".toml")):
        return None
    names = [value] if option else [value, f"{value}.toml"]
    return next((Path(name) for name in names if value and os.path.exists(name)), None)


def files_of(option: str, path: Path) -> list[tuple[Path, Path]]:
    """(file, the folder that links must not leave) of what a word stands for: an experiment is also what it extends."""
    from hpc_gpt.core.settings.experiment_file import read_experiment
    from hpc_gpt.core.slurm.directives import is_job_script

    files, root = [path], path if path.is_dir() else path.parent
    if path.is_dir() and option:
        files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    elif not option and not is_job_script(path):
        own = experiments_dir().resolve()  # the host has them
        files = [file for file, _ in read_experiment(str(path)).stated if not file.resolve().is_relative_to(own)]
    return [(Path(os.path.abspath(file)), root if option else file.parent) for file in files]


def check_file(file: Path, root: Path) -> None:
    """Raises ConfigError for a file that is never copied."""
    why = ""
    if not file.is_file() or (file.is_symlink() and not file.resolve().is_relative_to(root.resolve())):
        why = "a link that leads out of its folder" if file.is_symlink() else "not a file"
    elif _NEVER.fullmatch(file.suffix) or "checkpoints" in file.parts:
        why = "data, weights or a checkpoint"
    elif file.stat().st_size > _MOST_BYTES:
        why = f"larger than {show_bytes(_MOST_BYTES)}"
    elif is_credential_file(str(file), read_start(file, 4096), not file.stat().st_mode & 0o077):
        why = "a credential"
    if why:
        raise ConfigError(f"{file} is not copied to the host: it is {why}", "copy it yourself, and give its path there")
