"""A run with [notify] and [track], as a test reads it: the events that its command got, and TensorBoard's curve."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_gpt.core.runs.run_folder import RunFolder

EVENTS = ("first_step", "ended", "failed", "retried", "stopped")
KEYS = {"event", "run", "name", "folder", "attempt", "job", "ended", "cause", "node", "rank", "share", "step",
        "steps", "loss", "gpu_hours", "hours_left", "next"}  # fmt: skip


def around(told: Path, track: bool = True) -> list[str]:
    """The options of a run whose command appends each event to `told`, and which TensorBoard follows."""
    keys = {"notify.command": ["tee", "-a", str(told)], "notify.on": EVENTS, "track.tensorboard": track}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def events_of(run: RunFolder, told: Path) -> list[dict[str, Any]]:
    """The events of a run, by attempt and time. Each is whole, of this run and its attempt's job, and came once."""
    found = [json.loads(line) for line in told.read_text().splitlines()]
    names = [(each["attempt"], each["event"]) for each in found]
    assert len(set(names)) == len(names), names
    for each in found:
        assert set(each) == KEYS
        assert (each["run"], each["folder"]) == (run.run_id, str(run.path))
        assert each["job"] == run.attempt(each["attempt"]).started()["job_id"]
        assert each["gpu_hours"] >= 0
    return sorted(found, key=lambda each: (each["attempt"], each["event"] != "first_step"))


def named(events: Sequence[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """The events, of each its name, its attempt and those keys."""
    return [tuple(event[key] for key in ("event", "attempt", *keys)) for event in events]


def curve(run: RunFolder) -> dict[int, float]:
    """{step: loss} as TensorBoard reads it, each step once."""
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert len(dict(found)) == len(found), found
    return dict(found)
