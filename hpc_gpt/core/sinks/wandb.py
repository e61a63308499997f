"""Weights & Biases: all attempts of a run are one run there."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.core.sinks import CurveRow, ShownRun, need_package

_OFF = ("save_code", "x_save_requirements")
_ON = ("disable_code", "disable_git", "disable_job_creation", "silent", "x_disable_machine_info", "x_disable_meta",
       "x_disable_stats", "x_disable_viewer")  # fmt: skip
_INIT_S = 20.0


class Wandb:
    """A run of W&B in `project`, with its files in `folder`/wandb, and without console, code, git, host and the
    machine's figures. W&B takes rising steps only (wandb#4482): steps up to `shown`, online up to the last one on the
    server, are left out. `how`: further arguments of wandb.init."""

    def __init__(self, run: ShownRun, folder: Path, project: str, shown: int = -1, **how: Any) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the settings do not silence its login
        wandb = need_package("wandb")
        switches = {**dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False), "init_timeout": _INIT_S}
        settings = wandb.Settings(console="off", host="", username="", program="hpc-gpt", **switches)
        where = {"dir": str(folder), "project": project, "group": run.group, "name": run.title, "id": run.id}
        try:
            self._run = wandb.init(config=dict(run.settings), settings=settings, **where, **how)
        except Exception:
            wandb.teardown()  # else the id stays in use
            raise
        self.folder = Path(self._run.settings.sync_dir)
        self._shown = shown if self._run.offline or self._run.disabled else self._run.starting_step - 1

    def add(self, rows: Sequence[CurveRow]) -> None:
        for step, at, row in rows:
            if step > self._shown:
                # Committed at once: a row that waits for the next one is written last, over what `summarize` sets.
                self._run.log({**row, "_timestamp": at}, step=step, commit=True)
                self._shown = step

    def summarize(self, figures: Mapping[str, Any]) -> None:
        """Sets figures of the whole run."""
        self._run.summary.update(figures)

    def close(self) -> None:
        self._run.finish()
