"""A profile's `stage` on a real cluster: ranks run from an unpacked environment whose original is gone."""

import hashlib
import json

import pytest

from tests.slurm.launcher import PAIR, PROFILE
from tests.slurm.stories import Teller, storied
from tests.staged import make_archive


@pytest.mark.long
@storied
def test_two_ranks_run_from_tmpdir_and_the_original_is_gone(teller: Teller) -> None:
    """No other Python is there: the one that HPC_GPT_PYTHON names is gone, and so is the archive's original."""
    place = teller.launcher.place("staged of 'a' $HOME \"x\"")
    archive = make_archive(place / "an environment.tar")
    (tmp := place / "tmp").mkdir()
    site = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 4")
    words = ("--cluster", teller.launcher.profile("staged", f"stage = {json.dumps(str(archive))}\n", site), *PAIR)
    steps = ("--set", "train.steps=2", "--set", "train.save_every=0")
    environment = {"TMPDIR": str(tmp), "STAGE_SEEN": str(place / "seen"), "HPC_GPT_PYTHON": "/gone/python"}
    job = teller.launcher.submit(*words, *steps, **environment)
    job.wait_end()
    assert job.ended() == ["done"], job.log()
    # What each Python of it has noted at its start.
    seen = [line.split(" ", 1) for line in (place / "seen").read_text().splitlines()]
    assert {rank for rank, _ in seen} >= {"0", "1"}
    assert {prefix for _, prefix in seen} == {f"{tmp}/hpc-gpt-0-{job.id}/1/environment"}
    # A node keeps the compilers' caches, hpc-gpt-cache-UID, for the next attempt.
    assert not list(tmp.rglob("hpc-gpt-[0-9]*")), "nothing of it is left"
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert json.loads((job.run.path / "provenance.json").read_text())["stage_sha256"] == sha256
    assert f"stage: {archive}, SHA-256 {sha256}, " in job.log()
    start = json.loads((job.run.attempt(1).folder / "start.json").read_text())
    assert sum(start["start_parts"].values()) == pytest.approx(start["start_s"], rel=0.05)
    assert start["start_parts"]["staging"] > 0
    # The virtual nodes are one machine, with one $TMPDIR.
    assert job.log().count(" is unpacked on ") == 1
