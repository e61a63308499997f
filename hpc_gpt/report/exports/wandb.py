"""Curves as W&B's offline runs: `DIR/wandb/offline-run-*`, which `wandb sync` uploads when the user says so.

Nothing here goes to the network or reads a key: W&B runs offline, whatever its settings and variables say, and it
captures neither console, code, git, host nor the machine's figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.readers.runs.attempts import epoch
from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.exports.exported import Exported, export_runs, folder_within, plain_text
from hpc_gpt.report.exports.target import ANOTHER, not_installed

# In each run of ours, so that an export replaces what an earlier one wrote and nothing else.
MARK = "hpc-gpt.json"
PROJECT = "hpc-gpt"
_LAST_YEAR_S = 253402300800  # 10000-01-01, for which the name has no room


def write_offline_runs(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes each run as an offline run, in place of the one an earlier export wrote, and returns their folders.

    All restarts of a run are one run with one id, and each step is in it once. UserError where wandb is not
    installed, RunFolderError where a folder cannot be written.
    """
    place = folder_within(folder, "wandb")
    exported = export_runs(runs)
    try:
        with tempfile.TemporaryDirectory(prefix=".hpc-gpt-", dir=place) as name:
            aside = Path(name)
            with _offline(aside) as wandb:
                made = [_write(wandb, run, aside) for run in exported]
            # Only now that its process has ended is all of it written.
            places = [place / f"offline-run-{started_name(run)}-{run.id}" for run in exported]
            return [_put(own, at, aside) for own, at in zip(made, places, strict=True)]
    except OSError as fault:
        raise RunFolderError(f"{place}: {fault.strerror or fault}", ANOTHER) from None


@contextlib.contextmanager
def _offline(aside: Path) -> Iterator[Any]:
    """The package wandb, without any of the user's WANDB_ variables, with its caches in `aside`."""
    kept = {key: value for key, value in os.environ.items() if key.startswith("WANDB_")}
    folders = {f"WANDB_{name}_DIR": str(aside / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    for key in kept:
        del os.environ[key]
    os.environ |= {**folders, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    try:
        try:
            import wandb
        except ImportError as fault:
            raise not_installed("wandb", str(fault)) from None
        try:
            yield wandb
        finally:
            wandb.teardown()
    finally:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            del os.environ[key]
        os.environ |= kept


def _write(wandb: Any, run: Exported, aside: Path) -> Path:
    """The folder that wandb wrote the run into."""
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        silent=True,
        host="",
        username="",
        program="hpc-gpt",
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_viewer=True,
        x_save_requirements=False,
    )
    record = run.run.record
    made = wandb.init(
        mode="offline",
        dir=str(aside),
        project=PROJECT,
        group=run.name,
        name=plain_text(f"{record.name or 'run'}/{record.run or run.id}")[:120],
        id=run.id,
        config=run.settings(),
        settings=settings,
    )
    folder = Path(made.settings.sync_dir)
    for step, at, scalars in run.rows():
        made.log({**scalars, "_timestamp": at}, step=step)
    made.summary.update({**run.figures(), "ended": record.ended})
    made.finish()
    return folder


def started_name(run: Exported) -> str:
    """The run's start as wandb writes it in a folder's name, in UTC; the same at each export."""
    start = epoch(run.run.record.started) or (float(run.at[0]) if len(run.at) else 0.0)
    return time.strftime("%Y%m%d_%H%M%S", time.gmtime(start if 0 <= start < _LAST_YEAR_S else 0))


def _put(made: Path, place: Path, aside: Path) -> Path:
    """Moves what wandb wrote to its place, less its own logs; what stands there must be ours."""
    for inner in ("logs", "tmp"):
        shutil.rmtree(made / inner, ignore_errors=True)
    (made / MARK).write_text(json.dumps({"written_by": "hpc-gpt report --wandb"}) + "\n", encoding="utf-8")
    if os.path.lexists(place):
        if place.is_symlink() or not (place / MARK).is_file():
            raise RunFolderError(f"{place} is there and not of an export", ANOTHER)
        place.rename(aside / f"former-{place.name}")
    made.rename(place)
    return place
