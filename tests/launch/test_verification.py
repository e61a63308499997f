"""What `verify` says of a run that is as it was submitted, and of each thing that may differ."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest

from hpc_gpt.core.files import experiments_dir
from hpc_gpt.core.runs.provenance import STAGE_KEY, collect
from hpc_gpt.core.runs.run_folder import RunFolder, create_run
from hpc_gpt.core.runs.snapshot import take_snapshot, unpack_code
from hpc_gpt.core.runs.unpack import CODE_ARCHIVE, CODE_KEY
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.launch.render import render_script
from hpc_gpt.launcher.launch.verification import MEANS, verify_run
from tests.cli.command import hpc_gpt, in_process


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of the demo on random tokens, with a checkpoint, as it is when nothing has changed."""
    resolved = resolve(load_experiment("demo", {"data.source": "random"}), load_profile("local"))
    provenance = {**collect(), CODE_KEY: take_snapshot().sha256}
    text = (experiments_dir() / "demo.toml").read_text()
    tables = {"provenance.json": provenance}
    found = create_run(tmp_path / "logs", resolved, render_script(resolved), text, tables, [take_snapshot()])
    found.add_submission({"scheduler": "local", "job_id": None})
    unpack_code(found.path)
    (checkpoint := found.checkpoints / "step-00000010").mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * 1000)
    files = {"weights": {"bytes": 1000, "crc32": zlib.crc32(b"w" * 1000)}}
    (checkpoint / "complete.json").write_text(json.dumps({"schema": 1, "step": 10, "data": "random", "files": files}))
    return found


def replace(path: Path, content: bytes) -> None:
    """Not in place: the other runs of this process have the same file by other names."""
    path.unlink()
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def test_the_environments_archive_is_another(tmp_path: Path) -> None:
    (archive := tmp_path / "environment.tar").write_bytes(b"1")
    resolved = resolve(load_experiment("demo"), dataclasses.replace(load_profile("local"), stage=str(archive)))
    tables = {"provenance.json": {STAGE_KEY: hashlib.sha256(b"0").hexdigest()}}
    run = create_run(tmp_path / "logs", resolved, "", "", tables)
    (found,) = [each for each in verify_run(run).differences if each.check == "stage"]
    assert (found.name, found.words) == (str(archive), "SHA-256 6b86b273ff34…, but 5feceb66ffc8… was submitted")
    archive.unlink()
    assert verify_run(run).not_checked["stage"] == f"{archive} cannot be read here"


def test_nothing_differs_of_a_run_just_submitted(run: RunFolder) -> None:
    found = verify_run(run)
    assert (found.differences, found.not_checked) == ((), {})
    done = in_process("verify", run.path)
    assert (done.code, done.stdout) == (0, f"{run.run_id}: equal to what was submitted\n")


def _second_checkpoint(run: RunFolder) -> Path:
    """One after the run's own, as sound as that."""
    later = run.checkpoints / "step-00000020"
    shutil.copytree(run.checkpoints / "step-00000010", later)
    edit(later / "complete.json", '"step": 10', '"step": 20')
    return later


DAMAGES = {
    "archive": lambda run: replace(run.path / CODE_ARCHIVE, b"nothing"),
    # Sound, but not the one that was submitted: its sum alone shows it.
    "archive of another sum": lambda run: edit(run.path / "provenance.json", f'"{CODE_KEY}": "', f'"{CODE_KEY}": "0'),
    "unpacked": lambda run: (run.path / "code" / "hpc_gpt" / "batch.py").write_text("edited"),
    "versions": lambda run: edit(run.path / "provenance.json", '"submitit": "', '"submitit": "0.'),
    "experiment": lambda run: edit(run.path / "experiment.toml", "name", "nom"),
    "data": lambda run: edit(run.checkpoints / "step-00000010" / "complete.json", '"random"', '"0123456789abcdef"'),
    "script": lambda run: edit(run.job_script, "set -o pipefail", "set -o pipefail -x"),
    "settings": lambda run: edit(run.path / "resolved.json", '"seed": ', '"seed": 9'),
    "checkpoint": lambda run: (_second_checkpoint(run) / "weights").write_bytes(b"w" * 999 + b"v"),
    "checkpoints": lambda run: (run.checkpoints / "step-00000010" / "weights").write_bytes(b"w" * 999 + b"v"),
}


@pytest.mark.parametrize("check", DAMAGES)
def test_what_differs_is_named(run: RunFolder, check: str) -> None:
    DAMAGES[check](run)
    check = check.partition(" ")[0]
    found = verify_run(run)
    assert check in {one.check for one in found.differences}, found
    assert {one.check for one in found.differences} <= {check, "script"}  # what is rendered follows from the settings
    told = json.loads(in_process("verify", run.path, "--json", code=1).stdout)
    assert (told["schema"], told["equal"]) == (1, False)
    assert next(one["means"] for one in told["differences"] if one["check"] == check) == MEANS[check]
    assert re.search(f"^{check} ", in_process("verify", run.path).stdout, re.MULTILINE)


@pytest.mark.parametrize("files", [{"weights": 3}, {"../../resolved.json": {"bytes": 1}}, {"pipe": {"bytes": 1}}])
def test_a_checkpoint_whose_list_of_files_is_damaged_is_told(run: RunFolder, files: dict[str, object]) -> None:
    complete = run.checkpoints / "step-00000010" / "complete.json"
    os.mkfifo(complete.with_name("pipe"))
    complete.write_text(json.dumps({"schema": 1, "step": 10, "data": 5, "files": files}))
    (found,) = [one for one in verify_run(run).differences if one.check == "checkpoints"]
    assert "complete.json is damaged" in found.words
    done = in_process("verify", run.path).stdout
    assert "none is sound: submit --resume refuses the run" in done
    assert MEANS["checkpoint"] not in done


def test_a_changed_profile_tells_no_value_of_its_environment(run: RunFolder, tmp_path: Path) -> None:
    (clusters := tmp_path / "config" / "clusters").mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "templates" / "clusters" / "local.toml"
    (clusters / "local.toml").write_text(f'{shipped.read_text()}\n[environment]\nA_TOKEN = "hidden"\n')
    done = in_process("verify", run.path)
    assert "profile     environment: changed\n" in done.stdout
    assert "hidden" not in done.stdout + done.stderr


def test_a_run_that_is_none_exits_with_5() -> None:
    hpc_gpt("verify", "no-such-run", code=5)


def test_the_experiments_file_is_found_by_another_name(run: RunFolder, tmp_path: Path) -> None:
    (file := tmp_path / "mine.toml").write_text(f"{(experiments_dir() / 'demo.toml').read_text()}\n# another line\n")
    provenance = run.path / "provenance.json"
    provenance.write_text(json.dumps({**json.loads(provenance.read_text()), "experiment_file": str(file)}))
    edit(run.path / "resolved.json", '"name": "demo"', '"name": "another"')
    (found,) = [one for one in verify_run(run).differences if one.check == "experiment"]
    assert found.name == str(file)
    file.unlink()
    assert "no experiment 'another'" in verify_run(run).not_checked["experiment"]
