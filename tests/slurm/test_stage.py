"""A profile's `stage` on a real cluster: ranks run from an unpacked environment whose original is gone."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import put
from tests.slurm.launcher import PAIR, PROFILE, SINGLE, Job
from tests.slurm.stories import Teller, story
from tests.staged import make_archive

EIGHT = ("--engine", "ddp", "--gpus", "8", "--nodes", "2", "--tp", "1", "--pp", "1")
STEPS = ("--set", "train.steps=2", "--set", "train.save_every=0")


class Staged(NamedTuple):
    """A run from an archive: what each Python of it noted at its start, the folder it was below, and the archive."""

    job: Job
    seen: list[tuple[str, str]]
    tmp: Path
    archive: Path


class Site:
    """A profile with an archive. No other Python is there: the one that HPC_GPT_PYTHON names is gone, and so is the
    archive's original."""

    def __init__(self, teller: Teller, name: str, top: str = "") -> None:
        self.place = teller.launcher.place(f"{name} of 'a' $HOME \"x\"")
        self.archive = make_archive(self.place / "an environment.tar")
        (self.place / "tmp").mkdir()
        site = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 4")
        profile = f"stage = {json.dumps(str(self.archive))}\n{top}"
        self.words = ("--cluster", teller.launcher.profile(name, profile, site))
        self.environment = {
            "TMPDIR": str(self.place / "tmp"),
            "STAGE_SEEN": str(self.place / "seen"),
            "HPC_GPT_PYTHON": "/gone/python",
        }

    def seen(self, job: Job) -> Staged:
        lines = [line.split(" ", 1) for line in (self.place / "seen").read_text().splitlines()]
        return Staged(job, [(rank, prefix) for rank, prefix in lines], self.place / "tmp", self.archive)


@story
def two_ranks(teller: Teller) -> Staged:
    site = Site(teller, "staged")
    job = teller.launcher.submit(*site.words, *PAIR, *STEPS, **site.environment)
    job.wait_end()
    return site.seen(job)


# Gives each virtual node its own $TMPDIR, as a site's prolog does.
PROLOG = """#!/bin/bash
mkdir -p "$TMPDIR/$SLURMD_NODENAME"
echo "export TMPDIR=$TMPDIR/$SLURMD_NODENAME"
"""


@story
def eight_ranks(teller: Teller) -> Staged:
    """On two nodes, which are probed first, by the same Python."""
    prolog = put(teller.launcher.folder / "prolog", PROLOG)
    site = Site(teller, "staged-eight", f'preflight = true\nsrun = ["--task-prolog={prolog}"]\n')
    job = teller.launcher.submit(*site.words, *EIGHT, *STEPS, **site.environment)
    job.wait_end()
    return site.seen(job)


def check(found: Staged, ranks: int) -> None:
    """Every Python ran from below $TMPDIR, nothing of it is left, and provenance and figures say so."""
    job, seen, tmp, archive = found
    assert {rank for rank, _ in seen} >= {str(rank) for rank in range(ranks)}
    assert {Path(prefix).name for _, prefix in seen} == {"environment"}
    assert {Path(prefix).parent.name for _, prefix in seen} == {"1"}
    # A node keeps the compilers' caches, hpc-gpt-cache-UID, for the next attempt.
    assert not list(tmp.rglob("hpc-gpt-[0-9]*")), "nothing of it is left"
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert json.loads((job.run.path / "provenance.json").read_text())["stage_sha256"] == sha256
    assert f"stage: {archive}, SHA-256 {sha256}, " in job.log()
    start = json.loads((job.run.attempt(1).folder / "start.json").read_text())
    assert sum(start["start_parts"].values()) == pytest.approx(start["start_s"], rel=0.05)
    assert start["start_parts"]["staging"] > 0


def test_two_ranks_run_from_tmpdir_and_the_original_is_gone(told: Teller) -> None:
    found = told(two_ranks)
    assert found.job.ended() == ["done"], found.job.log()
    check(found, 2)
    assert {prefix for _, prefix in found.seen} == {f"{found.tmp}/hpc-gpt-0-{found.job.id}/1/environment"}
    # The virtual nodes are one machine, with one $TMPDIR.
    assert found.job.log().count(" is unpacked on ") == 1


@pytest.mark.long
def test_eight_ranks_run_each_from_its_own_nodes_tmpdir(told: Teller) -> None:
    found = told(eight_ranks)
    assert found.job.ended() == ["done"], found.job.log()
    check(found, 8)
    nodes = found.job.nodes()
    assert len(nodes) == 2
    folder = f"hpc-gpt-0-{found.job.id}/1/environment"
    of_ranks = {f"{found.tmp}/{node}/{folder}" for node in nodes}
    assert {prefix for rank, prefix in found.seen if rank != "-"} == of_ranks
    assert {prefix for _, prefix in found.seen} == of_ranks | {f"{found.tmp}/{folder}"}
    assert found.job.log().count(" is unpacked on ") == 3


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
