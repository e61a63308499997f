"""A second report of many logs of other programs reads none of them, and says what a first one says."""

import os
import shutil
from pathlib import Path

import pytest

from hpc_gpt.reader.logs import source
from hpc_gpt.reader.logs.read_log import read_log
from hpc_gpt.reader.records import foreign_run
from hpc_gpt.report.gather import GatheredRuns, gather_paths
from tests.made_runs import make_old
from tests.reader.made_logs import dump, iterations, write_log

COUNT = 9
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\nsrun python train.py\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine logs of yesterday: of eight runs, and one that no reader knows; a script, and a file that is no log."""
    monkeypatch.setenv("HPC_GPT_CACHE", str(tmp_path / "cache"))
    for number in range(COUNT - 1):
        write_log(tmp_path / "lab" / f"run-{number}" / "main.log", dump(micro_batch_size=number + 1), iterations(1, 20))
    (tmp_path / "lab" / "notes.txt").write_text("nothing\n")
    (tmp_path / "lab" / "run-0" / "job.slurm").write_text(SCRIPT)
    (tmp_path / "lab" / "weights.dat").write_bytes(b"\x80\x02" + bytes(range(256)))
    make_old(tmp_path / "lab")
    return tmp_path / "lab"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The logs that were read."""
    logs: list[Path] = []
    monkeypatch.setattr(foreign_run, "read_log", lambda path: (logs.append(path), read_log(path))[1])
    return logs


def report(lab: Path) -> GatheredRuns:
    return gather_paths([str(lab)], lab.parent / "logs", records_only=True)


def shown(gathered: GatheredRuns) -> list[object]:
    tables = [record.to_tables() for record in gathered.records]
    flags = [record.all_flags for record in gathered.records]
    return [tables, flags, [list(run.files) for run in gathered.runs], gathered.notes, gathered.unread]


def anew(lab: Path) -> list[object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_GPT_CACHE", "off")
        return shown(report(lab))


def test_the_second_report_reads_no_log(lab: Path, read: list[Path]) -> None:
    first = shown(report(lab))
    assert (len(first[0]), len(read)) == (COUNT - 1, COUNT + 1)
    assert [note[:18] for note in first[3]] == ["skipped 2 paths: /"], first[3]
    read.clear()
    assert (shown(report(lab)), read) == (first, [])
    assert first == anew(lab)


@pytest.mark.parametrize(
    "change",
    [
        lambda lab: (lab / "run-3" / "main.log").open("a").write("\n".join(iterations(21, 30))),
        lambda lab: (lab / "run-3" / "main.log").write_text((lab / "run-3" / "main.log").read_text().swapcase()),
        lambda lab: (lab / "run-3" / "main.log").rename(lab / "run-3" / "other.log"),
        lambda lab: (lab / "run-3" / "main.log").unlink(),
        lambda lab: shutil.copytree(lab / "run-3", lab / "run-x"),
        lambda lab: (lab / "notes.txt").write_text("nothing else\n"),
    ],
    ids=["grown", "written", "renamed", "gone", "new", "unknown"],
)
def test_logs_of_which_one_changed_are_read(lab: Path, read: list[Path], change) -> None:
    report(lab)
    change(lab)
    read.clear()
    found = shown(report(lab))
    assert len(read) >= COUNT - 1
    assert found == anew(lab)


def test_logs_that_were_just_written_are_read_each_time(lab: Path, read: list[Path]) -> None:
    os.utime(lab / "run-3" / "main.log")
    for _ in range(2):
        read.clear()
        report(lab)
    assert len(read) == COUNT + 1


def test_what_the_disk_refused_is_read_again(lab: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.open

    def refuse(path, *more, **other):
        if Path(path).parts[-2:] == ("run-3", "main.log"):
            raise PermissionError(13, "Permission denied")
        return own(path, *more, **other)

    with monkeypatch.context() as patch:
        patch.setattr(source.os, "open", refuse)
        assert len(report(lab).records) == COUNT - 2
    assert len(report(lab).records) == COUNT - 1


def test_a_page_has_their_steps(lab: Path) -> None:
    report(lab)
    assert all(len(run.steps) for run in gather_paths([str(lab)], lab.parent / "logs").runs)


def test_logs_named_in_two_ways_are_read_each_time(
    lab: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths beside absolute ones have no common folder to cache them by."""
    monkeypatch.chdir(lab)
    paths = ["run-0", *(str(lab / f"run-{number}") for number in range(1, COUNT - 1)), str(lab / "notes.txt")]
    for _ in range(2):
        assert len(gather_paths(paths, lab.parent / "logs", records_only=True).records) == COUNT - 1
    assert len(read) == 2 * COUNT
