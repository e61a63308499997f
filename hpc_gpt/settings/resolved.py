"""`Resolved`: the complete settings of one run, their text, and the hash that says which runs are repeats.

Rendering, submission, training and reporting share this object, whose text is `resolved.json` in the run folder. It has
no run id, time, host or path of the machine that made it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_gpt import __version__
from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.around import AROUND, After, Notify, Plan, Track, changed_keys
from hpc_gpt.settings.cluster import OF_THE_PLANNER, ClusterProfile
from hpc_gpt.settings.experiment import Command, Data, Engine, Job, LayoutRequest, Model, ScriptFacts, Train
from hpc_gpt.settings.forms import NO_BATCH, NO_MODEL, UNKNOWN, OurModel, OwnProgram
from hpc_gpt.settings.key_rules import KeyRules, key_rules
from hpc_gpt.settings.layout import Batch, Layout
from hpc_gpt.settings.model_shape import ModelShape, check_shape
from hpc_gpt.typed_tables import from_tables

SCHEMA = 1

# Keys of [engine] that were added later, and are written with their defaults, too.
_WRITTEN = ("keep_residuals", "one_pass_loss", "fused_bias_gradients")
# For tables of a Resolved: the table of the experiment that has the rules of their keys.
_ASKED_AS = {"model": Model, "layout": LayoutRequest, "batch": LayoutRequest}


@dataclass(frozen=True)
class Resolved:
    """The complete settings of one run. `job` is the experiment's request laid over the profile's.

    `cluster` lacks the keys that only the planner reads, so that no calibration changes a script. `sweep` and `row` are
    the names of a sweep's row, else None.

    `command` is None unless the engine starts the program that it says. Of such a run the model (NO_MODEL), the batch
    (NO_BATCH) and the number of steps (0) may be unknown. `script` is what is known of `command.script`.

    `data_from` is the step after which the run, a branch to other data, reads these from their first sample. `race`:
    the most visits of a race, which measures its rows in turns; 0 for a run that trains.
    """

    name: str
    preset: str | None
    model: ModelShape
    data: Data
    engine: Engine
    layout: Layout
    batch: Batch
    gpus: int
    nodes: int
    ranks_per_node: int
    train: Train
    job: Job
    cluster: ClusterProfile
    sweep: str | None = None
    row: str | None = None
    command: Command | None = None
    notify: Notify = field(default_factory=Notify)
    after: After = field(default_factory=After)
    track: Track = field(default_factory=Track)
    plan: Plan = field(default_factory=Plan)
    script: ScriptFacts | None = None
    data_from: int = 0
    race: int = 0
    version: str = __version__
    schema: int = SCHEMA

    @property
    def slug(self) -> str:
        """The experiment's name as a folder name."""
        return folder_name(self.name)

    @property
    def form(self) -> OurModel | OwnProgram:
        """What depends on whether our model is trained, or a program of the user's own is started."""
        if self.command is None:
            return OurModel(self.model, self.batch, self.layout, self.engine, self.train)
        shape = None if self.model == NO_MODEL else self.model
        batch = None if self.batch == NO_BATCH else self.batch
        return OwnProgram(shape, batch, self.layout, self.command, self.script)

    @property
    def program(self) -> Command:
        """`command` of a run that starts one."""
        assert self.command is not None
        return self.command

    @property
    def asked_gpus(self) -> int | None:
        """The GPUs that the job asks for; None if a job script asks for none."""
        return None if self.script is not None and self.cluster.gpu_flag == "none" else self.gpus

    @property
    def data_steps(self) -> int:
        """The steps whose samples are of `data`."""
        return self.train.steps - self.data_from

    @property
    def tasks_per_node(self) -> int:
        """The tasks that the job starts on a node."""
        return self.form.tasks(self.nodes, self.ranks_per_node)[0]

    @property
    def tasks(self) -> int:
        """The tasks that the job starts."""
        return self.form.tasks(self.nodes, self.ranks_per_node)[1]

    def key_rules(self, name: str) -> dict[str, KeyRules]:
        """The rules of each key of one of its tables."""
        return key_rules(_ASKED_AS.get(name, type(getattr(self, name))))

    def to_json(self) -> str:
        """The text of resolved.json, the same bytes for the same settings."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        form = self.form
        tables = asdict(self) | {"model": form.model_table or None, "batch": form.batch_table or None}
        for key in OF_THE_PLANNER:
            del tables["cluster"][key]
        if self.cluster.purge_modules:  # a key added later: the same text as ever without it
            del tables["cluster"]["purge_modules"]
        if self.cluster.stage is None:
            del tables["cluster"]["stage"]
        for name in ("data", "engine", "layout", "train", *form.tables):
            rules = self.key_rules(name)
            for key in [key for key in tables[name] if key not in _WRITTEN]:
                if tables[name][key] in rules[key].unhashed:  # a key added later: the same text as ever without it
                    del tables[name][key]
        for name in AROUND:
            tables[name] = changed_keys(getattr(self, name))
        nones: dict[str, Any] = {"command": None, "script": None, "data_from": 0, "race": 0}
        for name, none in (*nones.items(), *((name, {}) for name in AROUND)):
            if tables[name] == none:
                del tables[name]
        return json.dumps(tables, indent=1, ensure_ascii=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Resolved:
        """The object of a text that `to_json` gave; ConfigError if it is damaged or of another schema."""
        try:
            tables = json.loads(text)
            if tables["schema"] != SCHEMA:
                raise ConfigError(
                    f"resolved.json has schema {tables['schema']}, this version reads {SCHEMA}",
                    f"use the version that wrote it: {tables['version']}",
                )
            tables |= {name: asdict(none) for name, none in UNKNOWN.items() if tables[name] is None}
            resolved = from_tables(Resolved, tables)
            _check_stored(resolved)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
            if isinstance(fault, ConfigError):
                raise
            words = f"no JSON: {fault}" if isinstance(fault, json.JSONDecodeError) else repr(fault)
            words = words if text.strip() else "it is empty"
            raise ConfigError(
                f"resolved.json cannot be read: {words}", "the run folder is damaged; submit again"
            ) from None
        assert isinstance(resolved, Resolved)
        return resolved


def folder_name(name: str) -> str:
    """A name that a folder can have: anything but letters, digits, dots, dashes and underscores becomes `_`.

    >>> folder_name("../x y")
    '_x_y'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-") or "experiment"


def config_hash(resolved: Resolved) -> str:
    """16 hex digits of the settings that decide weights and speed: equal for runs that count as repeats."""
    return _hash_of(resolved, ("speed", "schedule"))


def speed_hash(resolved: Resolved) -> str:
    """A text of the cluster and the settings that decide speed: equal for runs that should be equally fast."""
    return f"{resolved.cluster.name} {_hash_of(resolved, ('speed',))}"


def _hash_of(resolved: Resolved, decides: Collection[str]) -> str:
    kept: dict[str, Any] = {"nodes": resolved.nodes, "device": resolved.cluster.device}
    for name in ("model", "data", "engine", "layout", "batch", "train", *resolved.form.tables):
        of_keys = resolved.key_rules(name)
        part = getattr(resolved, name)
        table = part.table() if isinstance(part, ModelShape) else vars(part)
        kept[name] = {
            key: value
            for key, value in table.items()
            if of_keys[key].decides in decides and value not in of_keys[key].unhashed
        }
    if resolved.data_from and "schedule" in decides:
        kept["data_from"] = resolved.data_from
    if resolved.script is not None:
        kept["script"] = {"body": resolved.script.body, "tasks": resolved.script.tasks}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=asdict).encode()).hexdigest()[:16]


def _check_stored(resolved: Resolved) -> None:
    """ValueError or LayoutError for settings that `resolve` never returns."""
    if resolved.form.shape is not None:
        check_shape(resolved.form.shape)
    for name, size in {"gpus": resolved.gpus, "nodes": resolved.nodes, **resolved.form.batch_table}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}")
    if resolved.engine.zero_stage is None:
        raise ValueError("engine.zero_stage is null")
