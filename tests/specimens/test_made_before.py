"""Runs and scripts of other versions: those of the minor version before are read, older ones are refused in a line.

`python -m tests.specimens` makes `made_at_VERSION.tar.xz`.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hpc_gpt.core.gone import GONE
from hpc_gpt.core.tables import flat
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.made_runs import a_run
from tests.specimens.__main__ import ARCHIVE

HERE = Path(__file__).parent
REFUSED = "resolved.json is of hpc-gpt 0.3.0, this version reads 0.4 and 0.5"
HINT = "use the version that wrote it: 0.3.0"


# 0.3's is refused by this version, in one line.
OLDER = HERE / "made_at_0.3.0.tar.xz"


def unpack(archive: Path, folder: Path) -> Path:
    """The run in an archive, unpacked below a folder."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [run] = (folder / "logs" / "small").iterdir()
    return run


@pytest.fixture
def own_logs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture(params=sorted(path.name for path in HERE.glob("made_at_*.tar.xz") if path != OLDER))
def specimen(request, own_logs) -> Path:
    """The folder of the run of a version that this one reads."""
    return unpack(HERE / request.param, own_logs)


def test_this_version_has_a_specimen():
    assert ARCHIVE.stat().st_size < 1 << 16


def test_a_specimen_is_shown_and_reported(specimen):
    kept = json.loads((specimen / "record.json").read_text())
    [status] = json.loads(in_process("status", specimen, "--json").stdout)["runs"]
    [record] = json.loads(in_process("report", specimen, "--json").stdout)["records"]
    why = json.loads(in_process("why", specimen, "--json").stdout)
    assert (status["state"], record["ended"], why["ended"]) == ("done", "done", "done")
    kept.pop("sources")
    kept.pop("config_hash")  # computed anew
    assert kept.pop("after", None) is None  # gone since 0.5
    before, now = flat(kept.pop("settings")), flat(record["settings"])
    assert {key: now[key] for key in before if key not in GONE} == {key: before[key] for key in before.keys() - GONE}
    for before, now in zip(kept.pop("attempts"), record["attempts"], strict=True):
        assert {key: now[key] for key in before} == before
    assert {key: record[key] for key in kept} == kept, "other keys are only ever added"
    assert in_process("submit", "--resume", specimen, "--until", "steps=8", "--dry-run").code == 0


@pytest.mark.long
def test_a_specimens_checkpoint_is_resumed(specimen):
    hpc_gpt("submit", "--resume", specimen, "--until", "steps=8", "--wait", code=0)
    [child] = [run for run in specimen.parent.iterdir() if run != specimen]
    assert "resumed after step 6 of 8" in (child / "attempts" / "1" / "log").read_text()
    lines = [json.loads(line) for line in (child / "attempts" / "1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 8]


@pytest.mark.long
def test_a_specimens_script_trains_with_this_versions_code(specimen, tmp_path):
    """As `bash job.sh`."""
    own = {"HPC_GPT_LOGS": str(tmp_path / "again"), "HPC_GPT_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", specimen / "job.sh"],
        env={**os.environ, **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "again" / "small").iterdir()
    assert json.loads((run / "attempts" / "1" / "ended.json").read_text())["ended"] == "done"


@pytest.fixture
def older(own_logs) -> Path:
    """The folder of a run that 0.3 wrote."""
    return unpack(OLDER, own_logs)


def test_a_run_of_0_3_is_not_continued(older):
    for words in (("--resume", older), ("--resume", older, "--set", "train.log_every=2"), ("--branch", f"{older}@6")):
        done = in_process("submit", *words, code=2)
        assert error_of(done) == (f"{older}: {REFUSED}", HINT), words
    assert [*older.parent.iterdir()] == [older]


def test_a_run_of_0_3_is_a_line_beside_others(older):
    sound = a_run(2).run_id
    rows = {row["run"]: row for row in json.loads(in_process("status", "--json", code=0).stdout)["runs"]}
    assert (rows[older.name]["state"], rows[older.name]["cause"]) == ("unknown", REFUSED)
    assert rows[sound]["cause"] is None
    assert REFUSED in in_process("status", code=0).stdout
    done = in_process("report", older.parents[1], "--json", code=1)
    assert [record["run"] for record in json.loads(done.stdout)["records"]] == [sound]
    assert f"{REFUSED}; {HINT}" in done.stderr


def test_a_script_of_0_3_ends_before_its_ranks(older, tmp_path):
    """Handed to bash as it is; tests/slurm/test_script.py hands one to sbatch."""
    own = {"HPC_GPT_LOGS": str(tmp_path / "again"), "HPC_GPT_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", older / "job.sh"], env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"{REFUSED}\n\nhint: render it again with this version, or {HINT}" in done.stderr
    [run] = (tmp_path / "again" / "small").iterdir()
    assert not (run / "attempts" / "1").exists()
