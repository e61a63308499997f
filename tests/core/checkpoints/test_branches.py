"""Which checkpoint a branch begins from, and that its run keeps it as long as the branch needs it."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints import branches
from hpc_gpt.core.checkpoints.branches import CheckpointHold, reserved_steps
from hpc_gpt.core.checkpoints.find_checkpoints import newest_sound
from hpc_gpt.core.checkpoints.lineage import (
    Parent,
    branched_at,
    checkpoint_sources,
    parent_of,
    resume_point,
    saved_steps,
)
from hpc_gpt.core.checkpoints.retention import Removal, Retention
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.processes.lock import process_holder, text_of
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder, create_run
from hpc_gpt.core.runs.snapshot import take_snapshot
from tests.made_runs import add_checkpoint, make_run


def begun_from(
    tmp_path: Path, parent: RunFolder | None, step: int = 0, branch: bool = False, **saved: bool
) -> RunFolder:
    """A run with checkpoints `step_N`, damaged ones False."""
    run = make_run(tmp_path, submit=False)
    if parent is not None:
        write_once(run.path / RESUMED_FROM, json.dumps(Parent(parent.run_id, str(parent.path), step, branch).note))
    for name, sound in saved.items():
        add_checkpoint(run, int(name.removeprefix("step_")), not sound)
    return run


@pytest.fixture
def first(tmp_path: Path) -> RunFolder:
    return begun_from(tmp_path, None, step_4=True, step_8=True, step_12=True)


def test_a_branch_begins_after_its_step_until_it_has_its_own(tmp_path, first):
    own = begun_from(tmp_path, first, 8, branch=True)
    assert checkpoint_sources(own) == [(own, None), (first, 8)]
    assert (resume_point(own).step, branched_at(own), branched_at(first)) == (8, 8, 0)
    assert newest_sound(first.checkpoints, step=8)[0] == first.checkpoints / "step-00000008"
    shutil.rmtree(first.checkpoints / "step-00000008")
    assert resume_point(own) is None, "an earlier one is of another training"
    add_checkpoint(own, 10)
    assert resume_point(own).step == 10


def test_a_run_that_resumes_a_branch_goes_back_no_further(tmp_path, first):
    own = begun_from(tmp_path, first, 8, branch=True)
    resumed = begun_from(tmp_path, own, 8)
    assert checkpoint_sources(resumed) == [(resumed, None), (own, None), (first, 8)]
    assert branched_at(resumed) == 8
    plain = begun_from(tmp_path, first, 12)
    assert checkpoint_sources(plain) == [(plain, None), (first, None)]


def test_the_checkpoint_of_a_step_may_be_an_ancestors(tmp_path, first):
    resumed = begun_from(tmp_path, first, 8, step_16=True)
    assert saved_steps(resumed) == [4, 8, 16], "12 is of another run, which went on"
    assert [parent_of(resumed, True, step)[1].step for step in (None, 4, 16)] == [16, 4, 16]
    # Of a branch only the step that it begins from: what was before is its parent's.
    own = begun_from(tmp_path, first, 8, branch=True, step_10=True)
    assert saved_steps(own) == [8, 10]
    assert checkpoint_sources(own, 4) == [(own, 4)]
    further = begun_from(tmp_path, own, 8, branch=True)
    assert checkpoint_sources(further) == [(further, None), (own, 8), (first, 8)]
    assert resume_point(further).step == 8


def test_a_step_without_a_sound_checkpoint_is_named_with_others(tmp_path, first):
    words = "has no checkpoint of step 7; it has checkpoints of steps 4, 8, 12"
    with pytest.raises(ConfigError, match=words) as refused:
        parent_of(first, True, 7)
    assert refused.value.hint == f"--branch {first.run_id}@8"
    with pytest.raises(ConfigError, match=r"has no checkpoint to branch from$"):
        parent_of(begun_from(tmp_path, None), True, None)
    damaged = begun_from(tmp_path, None, step_4=True, step_8=False)
    with pytest.raises(ConfigError, match="step-00000008: weights has 300 bytes, not 700"):
        parent_of(damaged, True, 8)
    assert parent_of(damaged, True, None)[0] == Parent(damaged.run_id, str(damaged.path), 4, branch=True)


def test_retention_spares_it_until_the_branch_has_its_own(tmp_path, first):
    own = begun_from(tmp_path, None)
    CheckpointHold(first, 4, is_live=lambda: True).place(own.path)
    assert reserved_steps(first.path) == {4}
    assert not own.checkpoints.exists()
    keeps_one = Retention(keep_last=1)
    assert keeps_one.apply(first.checkpoints, 12) == ["step-00000008"]
    place = add_checkpoint(own, 6, damaged=True)
    assert reserved_steps(first.path) == {4}, "what the branch could not load is none"
    shutil.rmtree(place)
    add_checkpoint(own, 6)
    assert reserved_steps(first.path) == set()
    assert keeps_one.apply(first.checkpoints, 12) == ["step-00000004"]


def test_a_training_removes_nothing_that_an_export_reads(first):
    with branches.reading(first):
        assert Retention(keep_last=1).apply(first.checkpoints, 12) == []
        aside = branches.set_aside(first.checkpoints / "step-00000004", ".deleting-")
        assert branches.put_back(aside), "whoever deletes asks last"
    assert Retention(keep_last=1).apply(first.checkpoints, 12) == ["step-00000008", "step-00000004"]
    assert list((first.path / "branches").iterdir()) == []


def test_a_dead_readers_note_of_the_same_pid_is_replaced(first):
    """As a container has it after a restart; and a process that reads in two places reads until both have ended."""
    own = process_holder(os.getpid())
    (first.path / "branches").mkdir(exist_ok=True)
    dead = first.path / "branches" / f"reader.{own.host}.{own.pid}.json"
    dead.write_text(text_of(replace(own, pid_start="1", boot=None)))
    assert not branches.is_read(first.path)
    with branches.reading(first):
        assert (branches.is_read(first.path), dead.exists()) == (True, False)
        with branches.reading(first):
            pass
        assert branches.is_read(first.path)
    assert not branches.is_read(first.path)


@pytest.mark.parametrize("remover", ["retention", "deletion"])
def test_whoever_removes_asks_at_the_moment_of_removal(tmp_path, first, monkeypatch, remover):
    own, rename = begun_from(tmp_path, None), branches.set_aside

    def reserved_meanwhile(path: Path, prefix: str) -> Path:
        aside = rename(path, prefix)
        write_once(
            first.path / "branches" / f"branch.{own.run_id}.json", json.dumps({"path": str(own.path), "step": 4})
        )
        return aside

    monkeypatch.setattr(branches, "set_aside", reserved_meanwhile)
    removal = Removal(first.checkpoints, Retention(keep_last=1))
    if remover == "retention":
        assert removal.retain(12) == ["step-00000008"]
    else:  # it was set aside by a remover that died before it asked
        reserved_meanwhile(first.checkpoints / "step-00000004", ".deleting-")
        removal.begin()
    removal.wait()
    assert newest_sound(first.checkpoints, step=4)[0] == first.checkpoints / "step-00000004"
    assert not list(first.checkpoints.glob(".deleting-*"))
    add_checkpoint(own, 6)
    removal.retain(12)
    removal.wait()
    assert [path.name for path in first.checkpoints.iterdir()] == ["step-00000012"]


def test_what_is_half_removed_is_not_given_its_name_again(tmp_path, first):
    own = begun_from(tmp_path, None)
    CheckpointHold(first, 4, is_live=lambda: True).place(own.path)
    aside = branches.set_aside(first.checkpoints / "step-00000004", ".deleting-")
    (aside / "weights").unlink()
    removal = Removal(first.checkpoints, Retention(keep_last=1))
    removal.begin()
    removal.wait()
    assert sorted(path.name for path in first.checkpoints.iterdir()) == ["step-00000008", "step-00000012"]


def test_a_branch_that_slurm_refused_needs_none_until_submitted(tmp_path, first):
    own = begun_from(tmp_path, None)
    CheckpointHold(first, 4, is_live=lambda: True).place(own.path)
    line = {"scheduler": "slurm", "job_id": None, "refused": None}
    own.add_submission({**line, "lost": "Socket timed out on send/recv operation"})
    assert reserved_steps(first.path) == {4}, "it may be queued"
    own.add_submission({**line, "refused": "Invalid qos specification"})
    assert reserved_steps(first.path) == set()
    own.add_submission({**line, "job_id": "4711"})
    assert reserved_steps(first.path) == {4}


def test_a_removed_branch_needs_none_and_one_out_of_sight_may(tmp_path, first):
    own = begun_from(tmp_path, None)
    CheckpointHold(first, 4, is_live=lambda: True).place(own.path)
    shutil.rmtree(own.path)
    assert reserved_steps(first.path) == set()
    note = {"path": "/not/mounted/here/run", "step": 8}
    write_once(first.path / "branches" / "branch.far.json", json.dumps(note))
    assert reserved_steps(first.path) == {8}
    write_once(first.path / "branches" / "branch.damaged.json", "{")
    write_once(first.path / "branches" / "branch.other.json", json.dumps({"path": 3, "step": "x"}))
    assert reserved_steps(first.path) == {8}


def test_what_cannot_be_reserved_is_linked(tmp_path, first):
    (first.path / "branches").touch()  # a file in place of the folder
    own = begun_from(tmp_path, None)
    CheckpointHold(first, 8, is_live=lambda: True).place(own.path)
    before, linked = (run.checkpoints / "step-00000008" / "weights" for run in (first, own))
    assert before.samefile(linked)
    Retention(keep_last=1).apply(first.checkpoints, 12)
    assert not before.exists()
    assert resume_point(own).step == 8


@pytest.fixture
def other_disk() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_what_cannot_be_reserved_or_linked_is_refused(first, other_disk):
    (first.path / "branches").touch()
    logs = other_disk / "logs"

    def made(is_live: bool) -> RunFolder:
        hold = CheckpointHold(first, 8, lambda: is_live)
        return create_run(logs, first.resolved(), "#!/bin/sh\n", "", {}, archives=[hold])

    with pytest.raises(RunFolderError, match="trains and may remove its checkpoint step-00000008: ") as refused:
        made(is_live=True)
    assert "HPC_GPT_LOGS" in refused.value.hint
    assert list(logs.glob("*/*")) == [], "nothing is left of it"
    assert list(made(is_live=False).checkpoints.glob("*")) == []


def test_a_checkpoint_that_is_removed_meanwhile_leaves_no_run(tmp_path, first):
    hold = CheckpointHold(first, 8, is_live=lambda: True)
    shutil.rmtree(first.checkpoints / "step-00000008")
    with pytest.raises(RunFolderError, match=r"checkpoint step-00000008 of run .* was removed just now"):
        create_run(tmp_path / "new", first.resolved(), "#!/bin/sh\n", "", {}, archives=[take_snapshot(), hold])
    assert list((tmp_path / "new").glob("*/*")) == []
