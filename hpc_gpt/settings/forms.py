"""The two forms of a run: of our model, or of a program of the user's own, a job script too. `Resolved.form` is one's.

What depends on the form is asked of it: the tasks of its job, what it may be asked, what a page shows.
"""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from hpc_gpt.settings.experiment import Command, Engine, ScriptFacts, Train
from hpc_gpt.settings.layout import AXES, Batch, Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.words import counted, cut, plain, show_bytes

# The model and the batch of a program that are not known; each is null in resolved.json.
NO_MODEL = ModelShape(hidden=0, layers=0, heads=1, vocab=0, seq=0)
NO_BATCH = Batch(0, 0, 0)
UNKNOWN: dict[str, ModelShape | Batch] = {"model": NO_MODEL, "batch": NO_BATCH}


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a run of either form; `shape` and `batch` are None if they are not known."""

    shape: ModelShape | None
    batch: Batch | None
    layout: Layout

    @property
    def params(self) -> int | None:
        return self.shape.params if self.shape is not None else None

    @property
    def model_table(self) -> dict[str, Any]:
        """[model] without the preset; empty if it is not known."""
        return self.shape.table() if self.shape is not None else {}

    @property
    def batch_table(self) -> dict[str, int]:
        """The sizes of the batch; empty if it is not known."""
        return dict(vars(self.batch)) if self.batch is not None else {}

    def checkpoints_take(self, size: float) -> str:
        """What checkpoints to come take of a disk, after what is free of it."""
        return f", checkpoints to come take about {show_bytes(size)}"

    @property
    def shown_layout(self) -> str:
        """The layout, if it is that of the program, and not only its GPUs; else empty."""
        return str(self.layout) if self.batch is not None or self.layout.dp < self.layout.gpus else ""

    @property
    def unknown(self) -> list[str]:
        """The figures of a record that are not known."""
        names = [] if self.shown_layout else [*AXES]
        names += [] if self.batch is not None else [entry.name for entry in fields(Batch)]
        of_model = ["seq", "hidden", "layers", "heads", "vocab", "params", "recompute", "dtype"]
        return names + ([] if self.shape is not None else of_model)

    def title(self, where: str) -> str:
        """Model and layout, for the first line of a script."""
        shape, layout = self.shape, self.shown_layout
        what = f"{shape.layers} layers of {shape.hidden}, {shape.params:,} parameters, " if shape is not None else ""
        return what + (f"{layout} on {where}" if layout else where)

    def size_rows(self, where: str, begins: str = "") -> Iterator[tuple[str, str]]:
        """(subject, what of it) of model, layout and batch, as far as they are known."""
        shape, batch, layout = self.shape, self.batch, self.shown_layout
        if shape is not None:
            sizes = f"{counted(shape.layers, 'layer')} of {shape.hidden}, {shape.params:,} parameters"
            yield "model", f"{sizes}, samples of {shape.seq:,} tokens{begins}"
        yield "layout", f"{layout}, {where}" if layout else where
        if batch is not None:
            parts = f"micro-batch {batch.micro_batch} x {batch.micro_batches:,} x dp {self.layout.dp}"
            tokens = f", {batch.global_batch * shape.seq:,} tokens" if shape is not None else ""
            yield "batch", f"{parts} = {counted(batch.global_batch, 'sample')} a step{tokens}"


@dataclass(frozen=True)
class OurModel(_Sizes):
    """Our model is trained, by our trainer or by another program."""

    engine: Engine
    train: Train

    tables: ClassVar[dict[str, Any]] = {}  # of its experiment, beside those of every run
    recorded: ClassVar[tuple[str, ...]] = ("engine", "train", "data")  # tables that a record keeps
    saves_by_train: ClassVar[bool] = True  # whether [train] says when it saves
    no_prediction: ClassVar[str] = ""  # why nothing is predicted of it
    inputs: ClassVar[str] = "random tokens"  # without a file or folder of ours
    data_lines: ClassVar[tuple[str, ...]] = ("random tokens, to measure speed; nothing is learnt from them",)
    copied: ClassVar[str] = ""  # a folder of which the run keeps a copy
    needs_files: ClassVar[bool] = True  # whether how many files its rank 0 has open is known
    command_lines: ClassVar[list[str]] = []
    stop_signal: ClassVar[str] = ""

    def tasks(self, nodes: int, ranks: int) -> tuple[int, int]:
        """(tasks that the job starts on a node with so many ranks, on all nodes)."""
        return ranks, nodes * ranks

    def does(self, verb: str) -> str:
        """What it does if it is asked to `stop`, `save` or `requeue`."""
        how = {"stop": "end", "save": "continue", "requeue": "go back to the queue"}[verb]
        if verb == "save" or self.train.save_last:
            return f"save after this step and {how}"
        return f"{how} after this step, unsaved: train.save_last is false"

    def rows(self, where: str) -> Iterator[tuple[str, str]]:
        """(subject, what of it) for its user to read before it is submitted."""
        engine, train = self.engine, self.train
        yield from self.size_rows(where, f", begins from {train.init}" if train.init else "")
        zero = f", ZeRO stage {engine.zero_stage}" if engine.zero_stage else ""
        yield "engine", f"{engine.name}{zero}, {train.dtype}, recompute {engine.recompute}"
        yield "train", f"{counted(train.steps, 'step')}, learning rate {train.lr:g}"


@dataclass(frozen=True)
class OwnProgram(_Sizes):
    """The job starts a program of the user's own. What it computes, reads and saves is its own affair."""

    command: Command
    script: ScriptFacts | None

    recorded: ClassVar[tuple[str, ...]] = ("command",)
    saves_by_train: ClassVar[bool] = False
    no_prediction: ClassVar[str] = "a program of your own"
    inputs: ClassVar[str] = "the program of your own reads them"
    needs_files: ClassVar[bool] = False
    data_lines: ClassVar[tuple[str, ...]] = ()

    @property
    def _line(self) -> str:
        return self.command.run if isinstance(self.command.run, str) else shlex.join(self.command.run)

    @property
    def tables(self) -> dict[str, Any]:
        """[command] without the keys that a script has no use for, or without those of a script."""
        of_script, of_run = ("script", "args"), ("run", "per", "setup", "resume", "snapshot", "link")
        left_out = of_script if self.command.script is None else of_run
        return {"command": {key: value for key, value in asdict(self.command).items() if key not in left_out}}

    @property
    def copied(self) -> str:
        return self.command.workdir if self.command.snapshot else ""

    @property
    def command_lines(self) -> list[str]:
        """The command with what sets it up, for a comment."""
        command = self.command
        if command.script is not None:
            return [plain(shlex.join([command.script, *command.args]), " ")]
        texts = (*command.setup, self._line)
        return [plain(line, " ") for text in texts for line in text.splitlines() if line.strip()]

    @property
    def stop_signal(self) -> str:
        return self.command.stop_signal

    def tasks(self, nodes: int, ranks: int) -> tuple[int, int]:
        per_node = ranks if self.command.per == "gpu" else 1
        return per_node, 1 if self.script is not None or self.command.per == "job" else nodes * per_node

    def does(self, verb: str) -> str:
        return f"end by SIG{self.command.stop_signal}{' and go back to the queue' if verb == 'requeue' else ''}"

    def checkpoints_take(self, size: float) -> str:
        return super().checkpoints_take(size) if size else "; what the program's own checkpoints take is not known"

    def rows(self, where: str) -> Iterator[tuple[str, str]]:
        command = self.command
        yield from self.size_rows(where)
        if self.script is not None:
            yield "script", shlex.join([str(command.script), *command.args])
            yield "runs in", command.workdir
            yield "checkpoints", command.checkpoints or "the script's own, which the chain does not see"
            return
        yield "command", f"once a {command.per}, in {command.workdir}: {cut(' '.join(self._line.split()), 100)}"
        yield "stops by", command.stop_signal if command.stop_signal == "none" else f"SIG{command.stop_signal}"
        resumed = f", resumed by {command.resume}" if command.resume else ""
        found = f"{command.checkpoints}{resumed}" if command.checkpoints else "as the program decides itself"
        yield "checkpoints", found
