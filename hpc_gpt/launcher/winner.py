"""`submit --winner RACE`: the settings of the row that won a race, or of another of its rows, over an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import GOOD
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.find_runs import find_run
from hpc_gpt.core.runs.race import is_race, read_rows
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.request import Request, choose_profile, requested_file
from hpc_gpt.reader.records import BENCH_FILE, read_records


@dataclass(frozen=True)
class Winner:
    """A row of a race: its name and its `keys` over the experiment, by dotted key. `why`: the race's reason for its
    win, empty for a row that the user has named."""

    race: RunFolder
    row: str
    keys: Mapping[str, Any]
    why: str = ""

    @property
    def line(self) -> str:
        keys = ", ".join(f"{key} = {value}" for key, value in self.keys.items())
        return f"from race {self.race.run_id}, row {self.row}: {keys}" + (f" ({self.why})" if self.why else "")

    def over(self, request: Request) -> Request:
        """The request with the row: by name, if the experiment has rows, else by its keys; options override both. The
        run's provenance.json names the race. Raises ConfigError for an experiment with other rows, and for a job
        script."""
        if request.script is not None:
            raise ConfigError("--winner needs an EXPERIMENT; a job script is not one", "name the experiment that raced")
        provenance = {"winner": {"race": self.race.run_id, "row": self.row}}
        rows = [row.name for row in requested_file(request, choose_profile(request, False)).rows or ()]
        if self.row in rows:
            return replace(request, row=self.row, sized=True, provenance=provenance)
        if rows:
            raise ConfigError(
                f"{request.experiment} has no row {self.row!r}, which won race {self.race.run_id}",
                "name the experiment that raced",
            )
        keys = {**self.keys, **request.overrides}
        return replace(request, overrides=keys, sized=True, provenance=provenance)

    def check(self, resolved: Resolved) -> None:
        """Raises ConfigError if the run with these settings is another training than the race's."""
        ours, theirs = _decides(resolved), _decides(self.race.resolved())
        if differ := [key for key in ours if ours[key] != theirs[key]]:
            others = ", ".join(f"{key} {theirs[key]}, not {ours[key]}" for key in differ)
            raise ConfigError(
                f"race {self.race.run_id} measured another training: {others}",
                "race this experiment: submit --race",
            )


def _decides(resolved: Resolved) -> dict[str, Any]:
    model = resolved.model
    return {
        "model": f"with {model.params:,} parameters, {model.layers} layers, {model.hidden} wide",
        "seq": model.seq,
        "global batch": resolved.batch.global_batch,
        "device": resolved.cluster.device,
        "GPUs": resolved.gpus,
    }


def find_winner(name: str, logs: Path) -> Winner:
    """The row that RACE, or RACE#2, means. Raises NoSuchRun for an unknown race, ConfigError for a row that cannot be
    used."""
    of, mark, number = name.rpartition("#") if "#" in name else (name, "", "")
    run = find_run(of, logs)
    if not is_race(run):
        raise ConfigError(f"{run.run_id} is not a race", "submit --race makes one; --branch takes a run's checkpoint")
    rows, _ = read_rows(run)
    file = run.path / BENCH_FILE
    result = read_stored(file).get("race") or {}
    records = read_records(file) or []
    if not result.get("is_over") or len(records) != len(rows):
        raise ConfigError(f"race {run.run_id} is not over", f"hpc-gpt status {run.run_id}")
    if mark:
        if not (number.isascii() and number.isdecimal() and 0 < int(number) <= len(rows)):
            raise ConfigError(f"race {run.run_id} has rows 1 to {len(rows)}, and no {number!r}", f"use {of}#1")
        place = int(number) - 1
    else:
        won = [at for at, record in enumerate(records) if record.run == result.get("winner")]
        if not won:
            raise ConfigError(f"race {run.run_id}: {result.get('why')}", f"name a row, as {run.run_id}#1")
        place = won[0]
    if records[place].ended not in GOOD or not records[place].step_s:
        cause = records[place].cause or records[place].ended
        raise ConfigError(
            f"row {rows[place].name!r} of race {run.run_id} was not measured: {cause}", "take another row"
        )
    return Winner(run, rows[place].name, rows[place].keys, "" if mark else str(result.get("why") or ""))
