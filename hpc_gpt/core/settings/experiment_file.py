"""An experiment's TOML file: finding it, reading it with the files it extends, choosing a row, applying options.

A file with a `[rows]` table is a sweep (`sweep_rows`).
"""

import copy
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, Fault, gathered, raise_faults
from hpc_gpt.core.files import data_dir, experiments_dir, read_start
from hpc_gpt.core.format import some
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.data_source import MIX, MixedSource, refuse_both, source_at, stated_source
from hpc_gpt.core.settings.experiment import Command, Data, Experiment
from hpc_gpt.core.settings.model import with_pad_token
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.program_text import without_secret_comments
from hpc_gpt.core.settings.rules.walk import without_followers
from hpc_gpt.core.settings.schedule import cut_schedule, schedule_faults
from hpc_gpt.core.settings.sweep_rows import SweepRow, check_rows, choose_row
from hpc_gpt.core.tables import close_matches, merge_tables, read_toml, set_dotted, value_at
from hpc_gpt.core.typed_tables import read_tables

DEFAULT_EXPERIMENT = "gpt2-meg-ds-3d"
# The experiment to try first on a cluster.
SMALL_EXPERIMENT = "demo"
SWEEP_FILE = "sweep.toml"
# The keys of [model] that a preset decides. An experiment may keep its own vocabulary, sequence and tied head.
OF_A_MODEL = [
    f"model.{entry.name}"
    for entry in fields(Model)
    if entry.name not in ("preset", "vocab", "seq", "tied", "vocab_multiple")
]


@dataclass(frozen=True)
class ExperimentFile:
    """An experiment's file. All rows of a sweep are loaded from one such object.

    `tables` has the tables of the file, without `rows`, over those of the file it extends. `stated` has each of these
    files with its own tables only, beginning with the file that extends none. `rows` is None if it is not a sweep.
    """

    path: Path
    text: str
    tables: Mapping[str, Any]
    rows: tuple[SweepRow, ...] | None
    stated: tuple[tuple[Path, Mapping[str, Any]], ...]

    @property
    def name(self) -> str:
        """The experiment's name; for a sweep.toml the name of its folder."""
        return str(self.tables["name"])

    @property
    def possible(self) -> list[SweepRow]:
        """The rows that can run."""
        return [row for row in self.rows or () if row.impossible is None]

    def row(self, name: str | None) -> SweepRow | None:
        """The row of that name, or the first that can run; None if the file is not a sweep.

        Raises ConfigError if there is no such row, or if it is impossible.
        """
        if self.rows is not None:
            return choose_row(self.rows, name, self.path)
        if name is not None:
            raise ConfigError(f"{self.path}: it has no [rows], so no row {name!r}", "leave --row out")
        return None

    def overridden(self, overrides: Mapping[str, Any] | None, row: str | None) -> dict[str, Any]:
        """The tables, overridden by the row and then by the overrides (by dotted key)."""
        tables = copy.deepcopy(dict(self.tables))
        if (chosen := self.row(row)) is not None:
            tables = merge_tables(tables, copy.deepcopy(chosen.overrides))
            tables["name"] = f"{tables['name']}-{chosen.name}"
        for key, value in (overrides or {}).items():
            set_dotted(tables, key, value)
        return tables

    def stated_with(self, row: str | None) -> list[tuple[Path, Mapping[str, Any]]]:
        """`stated`, with the tables of the file itself overridden by the row."""
        *extended, (path, tables) = self.stated
        chosen = self.row(row)
        return [*extended, (path, merge_tables(tables, chosen.overrides) if chosen is not None else tables)]


SCRIPT_SUFFIXES = {".slurm", ".sbatch", ".sh", ".bash", ".job", ".sub"}
_OF_FILES = {*SCRIPT_SUFFIXES, ".py", ".toml"}


def find_experiment(name: str) -> Path:
    """The TOML file that EXPERIMENT means: a file, a folder's sweep or only file, or either under `experiments/`."""
    if not name:
        raise ConfigError("the name of an experiment is empty", "is a variable of your shell not set?")
    # `.` and `..` mean folders of the user, not places under experiments/.
    inside = bool(Path(name).parts) and ".." not in Path(name).parts
    for base in (Path(), experiments_dir()) if inside else (Path(),):
        for path in (base / name, base / f"{name}.toml"):
            if path.is_file():
                return path
            if path.is_dir() and (files := sorted(path.glob("*.toml"))):
                if len(files) > 1 and path / SWEEP_FILE not in files:
                    names = some([file.name for file in files], 5)
                    raise ConfigError(f"folder {name} has {len(files)} TOML files: {names}", "name one of them")
                return path / SWEEP_FILE if path / SWEEP_FILE in files else files[0]
    if hint := value_hint([name]):
        raise ConfigError(f"{name!r} is a key's value, not an experiment", hint)
    experiments = list_experiments()
    if "/" in name or Path(name).suffix in _OF_FILES:
        meant = _scripts_here(name) or _meant_by(name, experiments)
        meant = meant or "give the path of a job script or of an experiment's TOML file"
        raise ConfigError(f"no such file: {name}", meant)
    raise ConfigError(
        f"no experiment {name!r}: neither a file, a folder with a TOML in it, nor a name under experiments/",
        _meant_by(name, experiments) or f"known: {', '.join(experiments)}",
    )


def _scripts_here(name: str) -> str:
    """The hint for the name of a job script that is not there: the job scripts in its folder, those of a similar name
    alone if there are any. Empty for another name, or if the folder has none."""
    path = Path(name)
    if path.suffix not in SCRIPT_SUFFIXES:
        return ""
    files = sorted(file.name for file in path.parent.glob("*") if file.suffix in SCRIPT_SUFFIXES and file.is_file())
    alike = [file for file in files if close_matches(path.stem, [Path(file).stem])]
    where = "" if path.parent == Path() else f"{path.parent}/"
    if alike:
        return f"did you mean {' or '.join(where + file for file in alike[:3])}?"
    place = "here" if not where else f"in {path.parent}"
    return f"job scripts {place}: {some(files, 5)}" if files else f"no job script is {place}"


def _meant_by(name: str, names: Sequence[str]) -> str:
    """The hint for a name that is not an experiment: it is a model, or a file has a similar name; empty if neither."""
    from glob import escape

    from hpc_gpt.core.settings.presets import PRESETS

    if name.lower() in PRESETS or (Path(name) / "config.json").is_file():
        return f"that is a model: --model {name}"
    # Compares the stems, as equal suffixes make any names similar.
    stem, suffix = os.path.splitext(name)
    for ending in filter(None, dict.fromkeys((suffix, ".toml"))):
        files = sorted(Path().glob(f"*{escape(ending)}"))
        if alike := [path.name for path in files if close_matches(stem, [path.stem])]:
            return f"did you mean {' or '.join(alike[:3])}?"
    return close_matches(stem if suffix else name, names)


def list_experiments() -> list[str]:
    """The names under `experiments/`, without suffix, sorted; the sweep of a folder has the folder's name."""
    top = experiments_dir()
    files = [path.parent if path.name == SWEEP_FILE else path.with_suffix("") for path in top.rglob("*.toml")]
    return sorted(str(path.relative_to(top)) for path in files)


def read_experiment(name: str) -> ExperimentFile:
    """The file that EXPERIMENT means. Raises ConfigError with every fault of its rows."""
    path = find_experiment(name)
    stated: list[tuple[Path, Mapping[str, Any]]] = []
    tables = _read_with_parents(path, (), stated)
    tables.setdefault("name", _default_name(path))
    rows = tables.pop("rows", None)
    checked = check_rows(rows, path) if rows is not None else None
    text = without_secret_comments(path.read_text(encoding="utf-8-sig"))
    return ExperimentFile(path, text, tables, checked, tuple(stated))


def find_sweep(experiment: str) -> ExperimentFile | None:
    """The sweep that EXPERIMENT means; None if the file has no rows. Raises ConfigError as `read_experiment` does."""
    file = read_experiment(experiment)
    return file if file.rows is not None else None


def load_experiment(
    name: str | ExperimentFile,
    overrides: Mapping[str, Any] | None = None,
    row: str | None = None,
    steps_elsewhere: bool = False,
    faults: list[Fault] | None = None,
) -> Experiment:
    """Reads the experiment `name`, overridden by dotted-key `overrides` (`{"train.steps": 20}`).

    In a sweep `row`, or the first possible row, overrides the base first. Raises ConfigError with every fault of the
    file; with a list of `faults` it adds them there instead, and a key with a fault has its default. A warm-up longer
    than the run is allowed if something newer decides the steps: an override, a file that extends the one with the
    warm-up, or the caller (`steps_elsewhere`); `cut_warmup` then cuts it.
    """
    file = read_experiment(name) if isinstance(name, str) else name
    tables, overridden = file.overridden(overrides, row), overrides or ()
    experiment, found = read_tables(tables, Experiment, str(file.path), overridden)
    fits = cut_schedule(experiment.train)[0] == experiment.train
    elsewhere = steps_elsewhere or fits or _steps_are_newer(file, row, overridden)
    stated = {key for key, value in _table_at(tables, "train").items() if value is not None}
    found += without_followers(schedule_faults(experiment.train, stated, str(file.path), overridden, elsewhere), found)
    with gathered(faults):
        raise_faults(found)
    with gathered(faults):
        experiment = replace(experiment, data=_with_source(experiment.data, file, row, overrides or {}))
    with gathered(faults):
        return _with_paths_found(experiment, file, row, overridden, keys_given(file, overrides, row))
    return experiment


def _with_source(data: Data, file: ExperimentFile, row: str | None, overrides: Mapping[str, Any]) -> Data:
    """[data] with a consistent path and source: a data.path that is stated after a source without path decides the
    source; one that is stated before is removed. ConfigError if one place states both."""
    if data.mix is not None or (path := data.path) is None:
        return data
    layers = [_table_at(tables, "data") for _, tables in file.stated]
    layers += [_table_at(chosen.overrides, "data")] if (chosen := file.row(row)) is not None else []
    layers.append({key.removeprefix("data."): value for key, value in overrides.items() if key.startswith("data.")})
    later = stated_source(data.source, layers)
    if later == "both":
        raise refuse_both(path, data.source)
    if later != "path":
        return replace(data, path=None) if later == "source" else data
    folder = _folder_of(["data.path"], file, row, overrides)
    return replace(data, source=source_at(path, (folder, Path.cwd(), data_dir())))


def keys_given(
    file: ExperimentFile, overrides: Mapping[str, Any] | None = None, row: str | None = None
) -> frozenset[str]:
    """The dotted keys to which the experiment, its row or the overrides give a value."""
    tables = file.overridden(overrides, row)
    return frozenset(f"{table}.{key}" for table, values in tables.items() if isinstance(values, dict) for key in values)


def folder_of_data(file: ExperimentFile, overrides: Mapping[str, Any] | None, row: str | None) -> Path | None:
    """The absolute folder of the newest file that states the experiment's data.path, or the path of a source of its
    mixture; None if no file does."""
    mix = _table_at(file.overridden(overrides, row), "data.mix")
    return _folder_of([f"data.mix.{name}.path" for name in mix] or ["data.path"], file, row, overrides or ())


def _folder_of(keys: Sequence[str], file: ExperimentFile, row: str | None, overridden: Collection[str]) -> Path | None:
    """The absolute folder of the newest file that states one of the dotted keys; None if only overrides, or none,
    do."""
    parts = [key.rpartition(".") for key in keys if key not in overridden]
    newest_first = reversed(file.stated_with(row))
    return next(
        (
            path.parent.resolve()
            for path, tables in newest_first
            if any(name in _table_at(tables, table) for table, _, name in parts)
        ),
        None,
    )


def _with_paths_found(
    experiment: Experiment, file: ExperimentFile, row: str | None, overridden: Collection[str], stated: Collection[str]
) -> Experiment:
    """The experiment with absolute paths: each beside the file that states it, else in the current folder.

    The folder of train.init gives the model's shape if [model] has none, the pad token, and the tokenizer for a stream
    of text if none is named. The user's own program has 0 steps, meaning unknown, unless train.steps is `stated`.
    """
    model, data, train, command = experiment.model, experiment.data, experiment.train, experiment.command

    def absolute(key: str, name: str) -> str:
        folder = _folder_of([key], file, row, overridden)
        places = [base / Path(name).expanduser() for base in (folder, Path.cwd()) if base is not None]
        return str(next((place for place in places if place.exists()), places[0]))

    if command != Command():
        # By default a program runs beside the file that names it.
        key = "command.workdir" if "command.workdir" in stated else "command.run"
        script = None if command.script is None else absolute("command.script", command.script)
        command = replace(command, workdir=absolute(key, command.workdir), script=script)
        train = train if "train.steps" in stated else replace(train, steps=0)
    if train.init is not None:
        init = absolute("train.init", train.init)
        if model.hf in (None, train.init) and model.preset is None and model.hidden is None:
            from hpc_gpt.core.weights.folder import check_folder  # only published weights need it

            check_folder(Path(init))
            model = replace(model, hf=init)
        tokenizer = Path(init, "tokenizer.json")
        if data.source == "stream" and "data.tokenizer" not in stated and tokenizer.is_file():
            data = replace(data, tokenizer=str(tokenizer))
        train = replace(train, init=init)
    if model.hf is not None:
        model = replace(model, hf=absolute("model.hf", model.hf))
    if train.init is not None:
        model = with_pad_token(model, Path(train.init))
    if data.mix is not None:
        folders = {name: _folder_of([f"data.mix.{name}.path"], file, row, overridden) for name in data.mix}
        common = _folder_of([f"data.mix.{name}.path" for name in data.mix], file, row, overridden)
        mix = {name: _beside(one, folders[name], common) for name, one in data.mix.items()}
        data = replace(data, mix=mix, source=MIX if data.source == Data.source else data.source)
    return replace(experiment, model=model, data=data, train=train, command=command)


def _beside(source: MixedSource, folder: Path | None, common: Path | None) -> MixedSource:
    """The source of a mixture with its path relative to the folder `common`, in which all paths are looked up, if a
    file in another `folder` states the path and the path exists there."""
    path = Path(source.path or "").expanduser()
    if folder is None or common in (None, folder) or path.is_absolute():
        return source
    file = folder / path
    exists = file.exists() or file.with_name(f"{file.name}.idx").exists()
    return replace(source, path=os.path.relpath(file, common)) if exists else source


def _table_at(tables: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table that a dotted key names; empty if it does not exist."""
    table = value_at(tables, key)
    return table if isinstance(table, Mapping) else {}


# --- what the command line says of its keys


def value_hint(texts: Sequence[str]) -> str:
    """The options that replace KEY=VALUE words on a command line, as other programs accept them; empty without such
    words.

    >>> value_hint(["train.lr=1e-3", "seq=2048", "demo"])
    'use --set train.lr=1e-3 --set model.seq=2048'
    """
    from hpc_gpt.core.keys import keys_meant

    pairs = [text.lstrip("+").partition("=") for text in texts if not text.startswith("-")]
    meant = [(keys_meant(Experiment, key), value) for key, equals, value in pairs if key and equals]
    options = [word for keys, value in meant if keys for word in ("--set", f"{keys[0]}={value}")]
    return hide_secrets(f"use {shlex.join(options)}") if options else ""


def gives_way(keys: Collection[str]) -> list[str]:
    """The keys of an experiment whose values are dropped if other `keys` are set: GPUs for nodes, nodes for GPUs, and
    the sizes of a model for a preset or a file."""
    away = ["layout.gpus"] if "layout.nodes" in keys else ["layout.nodes"] if "layout.gpus" in keys else []
    away += ["model.preset", *OF_A_MODEL] if {"model.preset", "model.hf"} & set(keys) else []
    return [key for key in away if key not in keys]


# --- files that extend others


def _read_with_parents(
    path: Path, seen: tuple[Path, ...], stated: list[tuple[Path, Mapping[str, Any]]]
) -> dict[str, Any]:
    """The file's tables with `rows`, over those of the file that it extends, beside it or under `experiments/`.

    Adds each file with its own tables to `stated`.
    """
    if path.resolve() in seen:
        chain = " -> ".join(step.name for step in (*seen, path))
        raise ConfigError(f"{path}: extends goes round in a circle: {chain}", "take one `extends` out")
    try:
        tables = read_toml(path)
    except ConfigError as fault:
        if read_start(path, 2) == b"#!":
            raise ConfigError(
                f"{path} is a job script, not an experiment: its model and layout are not known",
                f"hpc-gpt submit {path} runs it, doctor checks it",
            ) from None
        if path.suffix != ".toml":
            fault.hint = "an experiment is a TOML file; a job script begins with #!"
        raise
    parent = tables.pop("extends", None)
    stated.insert(0, (path, tables))
    if parent is None:
        return dict(tables)
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends must be the name of one experiment, not {parent!r}", 'for example "base"')
    candidates = [path.parent / parent, path.parent / f"{parent}.toml"]
    extended = next((file for file in candidates if file.is_file()), None) or find_experiment(parent)
    inherited = _read_with_parents(extended, (*seen, path.resolve()), stated)
    for key in ("name", "rows"):
        inherited.pop(key, None)
    return merge_tables(inherited, tables)


def _default_name(path: Path) -> str:
    """The path below `experiments/` without suffix, else the file's name; for a sweep.toml the name of its folder."""
    file = path.resolve()
    named = file.parent if file.name == SWEEP_FILE else file.with_suffix("")
    try:
        return "-".join(named.relative_to(experiments_dir().resolve()).parts) or named.name
    except ValueError:
        return named.name


# --- the learning rate's schedule


def _steps_are_newer(file: ExperimentFile, row: str | None, overridden: Collection[str]) -> bool:
    """Whether the command line, or a file that extends the one with the warm-up, decides the steps."""
    if "train.steps" in overridden:
        return True
    layers = [set(_table_at(tables, "train")) for _, tables in file.stated_with(row)]
    layers.append({key.removeprefix("train.") for key in overridden})
    newest_first = [keys & {"steps", "warmup_steps", "decay", "decay_steps"} for keys in reversed(layers)]
    return next((keys for keys in newest_first if keys), set()) == {"steps"}


def cut_warmup(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment with a warm-up and a decay of wsd that fit into its steps, and a line for each that was cut.

    `load_experiment` accepts longer ones if the steps come from elsewhere. Megatron-LM needs one step more than
    the warm-up.
    """
    train, lines = cut_schedule(experiment.train, engine_named(experiment.engine.name).least_steps_after_warmup)
    return replace(experiment, train=train), lines
