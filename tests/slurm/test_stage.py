"""A profile's `stage` on a real cluster: ranks run from an unpacked environment whose original is gone."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.slurm.launcher import PAIR, PROFILE, SINGLE, Job
from tests.slurm.stories import Story, Teller, story
from tests.staged import make_archive

EIGHT = ("--engine", "ddp", "--gpus", "8", "--nodes", "2", "--tp", "1", "--pp", "1")
STEPS = ("--set", "train.steps=2", "--set", "train.save_every=0")


class Staged(NamedTuple):
    """A run from an archive: what each Python of it noted at its start, the folder it was below, and the archive."""

    job: Job
    seen: list[tuple[str, str]]
    tmp: Path
    archive: Path


def run_staged(teller: Teller, name: str, top: str, *words: str, **more: str) -> Staged:
    """No other Python is there: the one that HPC_GPT_PYTHON names is gone, and so is the archive's original."""
    launcher = teller.launcher
    place = launcher.place(f"{name} of 'a' $HOME \"x\"")
    archive = make_archive(place / "an environment.tar")
    (tmp := place / "tmp").mkdir()
    site = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 4")
    cluster = launcher.profile(name, f"stage = {json.dumps(str(archive))}\n{top}", site)
    asked = {"TMPDIR": str(tmp), "STAGE_SEEN": str(place / "seen"), "HPC_GPT_PYTHON": "/gone/python", **more}
    job = launcher.submit("--cluster", cluster, *words, *STEPS, **asked)
    job.wait_end()
    seen = [line.split(" ", 1) for line in (place / "seen").read_text().splitlines()]
    return Staged(job, [(rank, prefix) for rank, prefix in seen], tmp, archive)


@story
def two_ranks(teller: Teller) -> Staged:
    return run_staged(teller, "staged", "", *PAIR)


@story
def eight_ranks(teller: Teller) -> Staged:
    """Their nodes are probed first, by the same Python."""
    return run_staged(teller, "staged-eight", "preflight = true\n", *EIGHT)


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("case", "ranks"), [pytest.param(two_ranks, 2, id="2 ranks"), pytest.param(eight_ranks, 8, id="8 ranks")]
)
def test_ranks_run_from_below_tmpdir_and_the_original_is_gone(told: Teller, case: Story[Staged], ranks: int) -> None:
    job, seen, tmp, archive = told(case)
    assert job.ended() == ["done"], job.log()
    below = {prefix for _, prefix in seen}
    assert below == {f"{tmp}/hpc-gpt-0-{job.id}/1/environment"}
    assert {rank for rank, _ in seen} >= {str(rank) for rank in range(ranks)}
    # The virtual nodes are one machine, with one $TMPDIR.
    assert job.log().count(" is unpacked on ") == 1
    assert not list(tmp.glob("hpc-gpt-*")), "nothing of it is left"
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert json.loads((job.run.path / "provenance.json").read_text())["stage_sha256"] == sha256
    assert f"stage: {archive}, SHA-256 {sha256}, " in job.log()
    start = json.loads((job.run.attempt(1).folder / "start.json").read_text())
    assert sum(start["start_parts"].values()) == pytest.approx(start["start_s"], rel=0.05)
    assert start["start_parts"]["staging"] > 0


class Faulty(NamedTuple):
    """A run whose archive is damaged, and that archive."""

    job: Job
    archive: Path


@story
def damaged(teller: Teller) -> Faulty:
    launcher = teller.launcher
    (archive := launcher.folder / "damaged.tar.gz").write_bytes(b"no archive")
    cluster = launcher.profile("damaged", f'stage = "{archive}"\n')
    job = launcher.submit("--cluster", cluster, *PAIR)
    job.wait_end("FAILED")
    return Faulty(job, archive)


def test_a_damaged_archive_is_the_users_to_mend_and_no_attempt_follows(told: Teller) -> None:
    job, archive = told(damaged)
    (end,) = [attempt.ended() for attempt in job.run.attempts()]
    assert end["ended"] == "user_error"
    assert end["cause"].startswith(f"{job.nodes()[0]}: cannot unpack {archive}: ")
    assert job.restarts == 0
    assert "hint: is it a whole tar" in job.log()
    assert told.launcher.state(job) == "user_error"


@story
def warmed(teller: Teller) -> Job:
    job = teller.launcher.submit("--cluster", teller.launcher.profile("warm", 'stage = "warm"\n'), *SINGLE, *STEPS)
    job.wait_end()
    return job


@pytest.mark.long
def test_warm_reads_the_libraries_before_a_rank_imports(told: Teller) -> None:
    job = told(warmed)
    (node,) = job.nodes()
    log = job.log()
    assert f" shared libraries are read on {node} in " in log
    assert log.index(" shared libraries are read on ") < log.index("rendezvous")
    start = json.loads((job.run.attempt(1).folder / "start.json").read_text())
    assert start["start_parts"]["staging"] > 0
