"""What the verbs that read a run say of it, each in a process of its own, as a user would ask."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hpc_gpt.runs.run_folder import RunFolder

_PATIENCE_S = 120


def read_back(run: RunFolder, environment: Mapping[str, str]) -> tuple[str, bool]:
    """(what `report` and `why` say of a finished run, whether they agree with each other and with its folder)."""
    report, words = _ask("report", run, environment)
    why, more = _ask("why", run, environment)
    if report is None or why is None:
        return words or more, False
    (record,) = report["records"]
    attempts = len(record["attempts"])
    losses = f"loss {record['loss_first']:.3f} -> {record['loss_last']:.3f}"
    said = f"report: {record['ended']}, attempts {attempts}, {losses}; why: {why['ended']}"
    return said, record["ended"] == why["ended"] == "done" and attempts == len(run.attempts())


def first_cause(run: RunFolder, environment: Mapping[str, str]) -> str | None:
    """The first cause over all ranks of a run that failed, as `why` has it: its class and its words."""
    why, _ = _ask("why", run, environment)
    if why is None or not why.get("ended") or why["ended"] in ("done", "pending", "running", "unknown"):
        return None
    return f"ended {why['ended']}" + (f": {why['cause']}" if why.get("cause") else "")


def _ask(verb: str, run: RunFolder, environment: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """(the JSON that the verb prints, None where it fails; its own words)."""
    done = subprocess.run(
        [sys.executable, "-m", "hpc_gpt", verb, str(run.path), "--json"],
        env={**environment, "HPC_GPT_LOGS": str(run.path.parent.parent)},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    words = f"hpc-gpt {verb} exits {done.returncode}: {done.stderr.strip()}"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return None, words
    return (found, words) if isinstance(found, dict) and done.returncode == 0 else (None, words)
