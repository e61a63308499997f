"""A run with [notify], as a test reads it: the events that its command got."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.core.runs.run_folder import RunFolder

EVENTS = ("first_step", "ended", "failed", "retried", "stopped")
KEYS = {"event", "run", "name", "folder", "attempt", "job", "ended", "cause", "node", "rank", "share",
        "checkpoint", "step", "steps", "loss", "gpu_hours", "hours_left", "next"}  # fmt: skip


def around(told: Path, *more: str) -> list[str]:
    """The options of a run whose command appends each of EVENTS, and the events `more`, to `told`."""
    keys = {"notify.command": ["tee", "-a", str(told)], "notify.on": (*EVENTS, *more)}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def events_of(run: RunFolder, told: Path) -> list[dict[str, Any]]:
    """The events of a run, by attempt and time. Each is whole, of this run and its attempt's job, and came once."""
    found = [json.loads(line) for line in told.read_text().splitlines()]
    names = [(each["checkpoint"] or each["attempt"], each["event"]) for each in found]
    assert len(set(names)) == len(names), names
    for each in found:
        assert set(each) == KEYS
        assert (each["run"], each["folder"]) == (run.run_id, str(run.path))
        assert each["job"] == run.attempt(each["attempt"]).started()["job_id"]
        assert each["gpu_hours"] >= 0
    order = ["first_step", "saved"]
    return sorted(found, key=lambda each: (each["attempt"], (*order, each["event"]).index(each["event"])))


def named(events: Sequence[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """The events, of each its name, its attempt and those keys."""
    return [tuple(event[key] for key in ("event", "attempt", *keys)) for event in events]
