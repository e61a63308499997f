"""Changes since a run was submitted, as `submit --resume RUN --dry-run` notes them."""

import dataclasses
import hashlib
import json
import zlib
from pathlib import Path

import pytest

from hpc_gpt.core.files import experiments_dir
from hpc_gpt.core.runs.provenance import STAGE_KEY, collect
from hpc_gpt.core.runs.run_folder import RunFolder, create_run
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.changes import change_notes
from hpc_gpt.launcher.render import render_script
from tests.cli.command import in_process
from tests.made_runs import add_attempt


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of the demo on random tokens, with a checkpoint, as it is when nothing has changed."""
    resolved = resolve(load_experiment("demo", {"data.source": "random"}), load_profile("local"))
    text = (experiments_dir() / "demo.toml").read_text()
    run = create_run(tmp_path / "logs", resolved, render_script(resolved), text, {"provenance.json": collect()})
    run.add_submission({"scheduler": "local", "job_id": "7"})
    add_attempt(run, 10, "stopped", job_id="7")
    (checkpoint := run.checkpoints / "step-00000010").mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * 1000)
    files = {"weights": {"bytes": 1000, "crc32": zlib.crc32(b"w" * 1000)}}
    (checkpoint / "complete.json").write_text(json.dumps({"schema": 1, "step": 10, "data": "random", "files": files}))
    return run


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_without_a_change_there_is_no_note(run: RunFolder) -> None:
    assert change_notes(run, run.resolved()) == []
    assert "note: " not in in_process("submit", "--resume", run.path, "--dry-run", code=0).stderr


CHANGES = {
    "versions here differ from those at the submission: submitit 0.": lambda run: edit(
        run.path / "provenance.json", '"submitit": "', '"submitit": "0.'
    ),
    "data random has changed (SHA-256 random…, checkpoint step-00000010 read 0123456789ab…): the trainer will": (
        lambda run: edit(run.checkpoints / "step-00000010" / "complete.json", '"random"', '"0123456789abcdef"')
    ),
    "resolved.json differs from the settings in job.sh": lambda run: edit(
        run.path / "resolved.json", '"steps": ', '"steps": 9'
    ),
}


@pytest.mark.parametrize("note", CHANGES)
def test_a_dry_resumption_notes_it(run: RunFolder, note: str) -> None:
    CHANGES[note](run)
    done = in_process("submit", "--resume", run.path, "--dry-run")
    assert f"note: {note}" in " ".join(done.stderr.split())
    assert len(change_notes(run, run.resolved())) == 1


def test_the_profiles_archive_is_another(tmp_path: Path) -> None:
    (archive := tmp_path / "environment.tar").write_bytes(b"1")
    resolved = resolve(load_experiment("demo"), dataclasses.replace(load_profile("local"), stage=str(archive)))
    tables = {"provenance.json": {STAGE_KEY: hashlib.sha256(b"0").hexdigest()}}
    run = create_run(tmp_path / "logs", resolved, "", "", tables)
    (note,) = change_notes(run, resolved)
    assert note == (
        f"{archive} has changed (SHA-256 6b86b273ff34…, was 5feceb66ffc8…): the next attempt runs from the new one"
    )
    archive.unlink()
    assert change_notes(run, resolved) == []
