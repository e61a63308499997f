"""The curves of a run in the services of `[track]`, which rank 0 shows while it trains."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import NODE, read_last_stored_line, read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.sinks import FLOPS, CurveRow, ShownRun, Sink, shown_settings, source_tags
from hpc_gpt.core.sinks.background import Background
from hpc_gpt.core.sinks.mlflow import Mlflow
from hpc_gpt.core.sinks.tensorboard import EVENT_FILE, TensorBoard
from hpc_gpt.core.sinks.wandb import Wandb
from hpc_gpt.trainer.engines.protocol import BALANCE_FIGURES

_TAGS = ("loss", "step_s", "tokens_per_s", "lr", "grad_norm", *BALANCE_FIGURES, "loss_eval", "bpb", "skipped")
_OF_JOB = re.compile(r"\d+(?:[_-]\d+)?")  # the id of a run by plain sbatch
_LONG_S = 1e6  # seconds of a step so long that its TFLOPs are below every device's peak


def service_id(run: RunFolder, attempt: Attempt) -> str:
    """The run's id in W&B and MLflow. A run by plain sbatch has the number of its job, which is also one of every other
    cluster's: so the cluster's name is added at its first start, and noted. RunFolderError if the disk refuses."""
    note = run.path / "track.json"
    if noted := read_stored(note).get("id"):
        return str(noted)
    cluster = os.environ.get("SLURM_CLUSTER_NAME") or ""
    is_shown = any(each.number < attempt.number and each.metrics.exists() for each in run.attempts())
    if is_shown or not NODE.fullmatch(cluster) or not _OF_JOB.fullmatch(run.run_id):
        return run.run_id
    named = f"{cluster}-{run.run_id}"
    write_once(note, json.dumps({"id": named}) + "\n")
    return named


class Curves:
    """Shows each line of the attempt's metrics in the services, and waits for none of them."""

    def __init__(self, run: RunFolder, attempt: Attempt, resolved: Resolved) -> None:
        from hpc_gpt.reader.runs.figures import add_figures
        from hpc_gpt.reader.runs.own_run import figures_asked, read_own

        record = read_own(run, ends_only=True).record
        flops = add_figures(replace(record, step_s=_LONG_S, step_s_mean=None))
        self._flops = {name: rate * _LONG_S for name in FLOPS if (rate := getattr(flops, name))}
        settings = shown_settings({**record.settings, **figures_asked(resolved), "device": record.device})
        began = attempt.started().get("started") or 0.0
        shown = ShownRun(service_id(run, attempt), resolved.slug, f"{resolved.name}/{run.run_id}", began, settings)
        earlier = [read_last_stored_line(each.metrics) for each in run.attempts() if each.number < attempt.number]
        last = max((line.get("step", 0) for line in earlier), default=0)
        track, path, uri = resolved.track, run.path, os.environ.get("MLFLOW_TRACKING_URI", "")
        openers: dict[str, list[Callable[[], Sink]]] = {}
        if track.tensorboard:
            events = path / "tensorboard" / EVENT_FILE.format(number=attempt.number)
            openers["tensorboard"] = [lambda: TensorBoard(shown, events)]
        if project := track.wandb:
            openers["wandb"] = [
                lambda: Wandb(shown, path, project, last, resume="allow"),
                lambda: Wandb(shown, path, project, last, mode="offline"),
            ]
        if experiment := track.mlflow:
            server, local = lambda: Mlflow(shown, uri, experiment), (path / "mlruns").absolute().as_uri()
            openers["mlflow"] = [*[server] * bool(uri), lambda: Mlflow(shown, local, experiment)]
        self._sinks = [Background(*each) for each in openers.items()]

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes lines of metrics.jsonl, each step once."""
        rows = [self._row(line) for line in lines]
        for sink in self._sinks:
            sink.add(rows)

    def close(self, limit_s: float) -> None:
        """Waits at most `limit_s` for the services; a line says what one of them did not get."""
        until = time.monotonic() + limit_s
        for sink in self._sinks:
            sink.add((), ends=True)
        for sink in self._sinks:
            sink.wait(max(0.0, until - time.monotonic()))

    def _row(self, line: Mapping[str, Any]) -> CurveRow:
        figures = {tag: line.get(tag) for tag in _TAGS}
        figures |= source_tags(line)
        figures |= {name: flops / line["step_s"] for name, flops in self._flops.items() if line["step_s"]}
        known = {tag: float(figure) for tag, figure in figures.items() if figure is not None and math.isfinite(figure)}
        return line["step"], line["time"], known
