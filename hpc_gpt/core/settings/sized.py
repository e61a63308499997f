"""`Sized`: an experiment with a value for every key; and a function for each fact that differs between a run of our
model and a run of the user's own program or job script.

A program computes, reads and saves whatever it wants; its model, batch and steps may be unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpc_gpt import __version__
from hpc_gpt.core.format import counted, cut, plain
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Command, Data, Engine, Job, LayoutRequest, ScriptFacts, Train
from hpc_gpt.core.settings.key_rules import KeyRules, key_rules
from hpc_gpt.core.settings.layout import AXES, Batch, Layout
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import Notify, Plan, Track

# The unknown model and batch of a program; each is null in resolved.json.
NO_MODEL = ModelShape(hidden=0, layers=0, heads=1, vocab=0, seq=0)
NO_BATCH = Batch(0, 0, 0)

# The schema of resolved.json.
SCHEMA = 2

# {table of a Resolved: the table of an experiment that has the rules of its keys}
_ASKED_AS = {"model": Model, "layout": LayoutRequest, "batch": LayoutRequest}


@dataclass(frozen=True)
class Sized:
    """An experiment with a value for every key on one cluster profile. The launcher and the planner read sizes from it
    while keys of the experiment are still being decided; the last one becomes the run, a `Resolved`.

    `job` is the profile's request, overridden by the experiment's. `cluster` lacks the keys that only the planner
    reads, so that no calibration changes a script. `sweep` and `row` are the names of a sweep's row, else None.

    `command` is None unless the engine starts the program in it. The model, the batch and the number of steps (0) of
    such a run may be unknown (`core.settings.sized`). `script` has the facts about `command.script`.

    `data_from` is the step after which a branch to other data reads these from their first sample.
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
    track: Track = field(default_factory=Track)
    plan: Plan = field(default_factory=Plan)
    script: ScriptFacts | None = None
    data_from: int = 0
    version: str = __version__
    schema: int = SCHEMA

    @property
    def program(self) -> Command:
        """The `command` of a run that has one."""
        assert self.command
        return self.command

    @property
    def asked_gpus(self) -> int | None:
        """The GPUs that the job requests; None if a job script requests none."""
        return None if self.script is not None and self.cluster.gpu_flag == "none" else self.gpus

    @property
    def data_steps(self) -> int:
        """The number of steps that read their samples from `data`."""
        return self.train.steps - self.data_from

    @property
    def tasks_per_node(self) -> int:
        """The number of tasks that the job starts per node."""
        return self.ranks_per_node if self.command is None or self.command.per == "gpu" else 1

    @property
    def tasks(self) -> int:
        """The number of tasks that the job starts."""
        once = self.script is not None or (self.command is not None and self.command.per == "job")
        return 1 if once else self.nodes * self.tasks_per_node

    def key_rules(self, name: str) -> dict[str, KeyRules]:
        """{key: its rules} of one of its tables."""
        return key_rules(_ASKED_AS.get(name, type(getattr(self, name))))


# --- facts that differ between a run of our model and one of a program


def runs_program(run: Sized) -> bool:
    """Whether the job starts the user's own program, not a training of our model."""
    return run.command is not None


def known_shape(run: Sized) -> ModelShape | None:
    return None if run.model == NO_MODEL else run.model


def known_batch(run: Sized) -> Batch | None:
    return None if run.batch == NO_BATCH else run.batch


def shown_layout(run: Sized) -> str:
    """The layout, if the program's layout is known and not only its GPUs; else empty."""
    is_stated = run.batch != NO_BATCH or run.layout.dp < run.layout.gpus or run.layout.ep > 1
    return str(run.layout) if is_stated else ""


def params(run: Sized) -> int | None:
    return None if run.model == NO_MODEL else run.model.params


def unknown_figures(run: Sized) -> list[str]:
    """The keys of a record that are unknown for the run."""
    names = [] if shown_layout(run) else [*AXES, "ep"]
    names += [] if known_batch(run) else [entry.name for entry in fields(Batch)]
    of_model = ["seq", "hidden", "layers", "heads", "vocab", "params", "params_active", "recompute", "dtype"]
    return names + ([] if known_shape(run) else of_model)


# --- in resolved.json


def model_table(run: Sized) -> dict[str, Any]:
    """[model] without the preset; empty if the model is unknown."""
    return {} if run.model == NO_MODEL else run.model.table()


def batch_table(run: Sized) -> dict[str, int]:
    """The sizes of the batch; empty if they are unknown."""
    return {} if run.batch == NO_BATCH else dict(vars(run.batch))


def program_tables(run: Sized) -> dict[str, Any]:
    """[command] of a program's run; without the keys of a script, or for a script without the keys that it ignores."""
    if run.command is None:
        return {}
    of_script, of_run = ("script", "args"), ("run", "per", "setup", "resume", "snapshot", "link")
    left_out = of_script if run.command.script is None else of_run
    return {"command": {key: value for key, value in asdict(run.command).items() if key not in left_out}}


# --- its job


def command_lines(run: Sized) -> list[str]:
    """The lines of a program's command and its setup, for a comment."""
    command = run.command
    if command is None:
        return []
    if command.script is not None:
        return [plain(shlex.join([command.script, *command.args]), " ")]
    texts = (*command.setup, _line(command))
    return [plain(line, " ") for text in texts for line in text.splitlines() if line.strip()]


def stop_signal(run: Sized) -> str:
    return "" if run.command is None else run.command.stop_signal


def does(run: Sized, verb: str) -> str:
    """A text with the run's answer to the request `stop`, `save` or `requeue`."""
    if run.command is not None:
        return f"end by SIG{run.command.stop_signal}{' and go back to the queue' if verb == 'requeue' else ''}"
    how = {"stop": "end", "save": "continue", "requeue": "go back to the queue"}[verb]
    if verb == "save" or run.train.save_last:
        return f"save after this step and {how}"
    return f"{how} after this step, unsaved: train.save_last is false"


# --- as its user sees it


def script_title(run: Sized, where: str) -> str:
    """The model and layout, for the first line of a script."""
    shape, layout = known_shape(run), shown_layout(run)
    what = f"{shape.layers} layers of {shape.hidden}, {shape.params:,} parameters, " if shape is not None else ""
    return what + (f"{layout} on {where}" if layout else where)


def run_rows(run: Sized, where: str) -> Iterator[tuple[str, str]]:
    """(label, text) of the known facts that the user reads before the run is submitted."""
    shape, batch, layout, command = known_shape(run), known_batch(run), shown_layout(run), run.command
    if shape is not None:
        sizes = f"{counted(shape.layers, 'layer')} of {shape.hidden}, {shape.params:,} parameters"
        begins = f", begins from {run.train.init}" if run.train.init else ""
        yield "model", f"{sizes}, samples of {shape.seq:,} tokens{begins}"
    yield "layout", f"{layout}, {where}" if layout else where
    if batch is not None:
        parts = f"micro-batch {batch.micro_batch} x {batch.micro_batches:,} x dp {run.layout.dp}"
        tokens = f", {batch.global_batch * shape.seq:,} tokens" if shape is not None else ""
        yield "batch", f"{parts} = {counted(batch.global_batch, 'sample')} a step{tokens}"
    if command is None:
        zero = f", ZeRO stage {run.engine.zero_stage}" if run.engine.zero_stage else ""
        yield "engine", f"{run.engine.name}{zero}, {run.train.dtype}, recompute {run.engine.recompute}"
        yield "train", f"{counted(run.train.steps, 'step')}, learning rate {run.train.lr:g}"
    elif run.script is not None:
        yield "script", shlex.join([str(command.script), *command.args])
        yield "runs in", command.workdir
        yield "checkpoints", command.checkpoints or "the script's own, without --checkpoints"
    else:
        yield "command", f"once a {command.per}, in {command.workdir}: {cut(' '.join(_line(command).split()), 100)}"
        yield "stops by", command.stop_signal if command.stop_signal == "none" else f"SIG{command.stop_signal}"
        resumed = f", resumed by {command.resume}" if command.resume else ""
        yield (
            "checkpoints",
            f"{command.checkpoints}{resumed}" if command.checkpoints else "as the program decides itself",
        )


def _line(command: Command) -> str:
    return command.run if isinstance(command.run, str) else shlex.join(command.run)
