"""The size of checkpoints, how many there will be, and the space for them."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints import disk_space
from hpc_gpt.core.checkpoints.disk_space import (
    checkpoints_to_come,
    free_files,
    lack_of_files,
    space_needed_gib,
    steps_between_saves,
)
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from tests.programs import put


def resolved(**train):
    return resolve(
        load_experiment("demo", {f"train.{key}": value for key, value in train.items()}), load_profile("local")
    )


@pytest.mark.parametrize(
    ("train", "step", "count"),
    [
        ({"steps": 100, "save_every": 0}, 0, 1),
        ({"steps": 100, "save_every": 10}, 0, 11),
        ({"steps": 100, "save_every": 10}, 60, 5),
        ({"steps": 100, "save_every": 10, "keep_last": 2}, 0, 3),
        ({"steps": 100, "save_every": 10, "keep_last": 2}, 60, 1),
        ({"steps": 100, "save_every": 10, "keep_last": 2, "keep_every": 50}, 0, 5),
        ({"steps": 100, "save_every": 60, "keep_last": 5}, 0, 2),
        ({"steps": 100, "save_every": 10}, 100, 0),
        ({"steps": 100, "save_every": 0, "save_last": False}, 0, 0),
        ({"steps": 100, "save_every": 10, "save_last": False}, 0, 9),
        ({"steps": 105, "save_every": 10, "save_last": False}, 0, 10),
        ({"steps": 100, "save_every": 0, "save_minutes": 30.0, "keep_last": 3}, 0, 4),
        ({"steps": 100, "save_every": 0, "save_minutes": 30.0, "keep_last": 3}, 60, 1),
        ({"steps": 100, "save_every": 0, "save_minutes": 30.0, "keep_last": 3, "save_at": (5, 50)}, 0, 6),
        ({"steps": 100, "save_every": 0, "save_minutes": 30.0}, 0, 2),
        ({"steps": 100, "save_every": 0, "save_at": (5, 50, 100)}, 20, 2),
    ],
)
def test_checkpoints_to_come(train, step, count):
    assert checkpoints_to_come(resolved(**train), step) == count


def test_room_is_that_of_weights_and_optimizer(tmp_path):
    run = resolved(steps=100, save_every=0, dtype="fp32")
    one, every = space_needed_gib(run, RunFolder(tmp_path))
    assert one == every
    assert one == 12 * run.model.params / GIB


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({"save_every": 0}, 0),
        ({"save_every": 50}, 50),
        ({"save_every": 0, "save_minutes": 30.0}, 900),
        ({"save_minutes": 0.01}, 1),
        ({"save_every": 50, "save_minutes": 1.0}, 30),
    ],
)
def test_the_clock_or_the_step_saves_whichever_is_first(train, steps):
    assert steps_between_saves(resolved(**train).train, step_s=2.0) == steps


LFS = """#!/bin/bash
case "$*" in
"project -d {place}") echo "    7 P {place}" ;;
"quota -q -u {uid} {place}") echo "{place}  220  0  0  -  120  0  0  -" ;;
"quota -q -g {gid} {place}") echo "{place}  220*  200  300  6d  900  1000  1200  -" ;;
"quota -q -p 7 {place}") printf '%s\\n' "{place}" "       220  0  0  -  990*  500  1000  6d" ;;
esac
"""


def test_files_that_a_quota_of_lustre_still_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Lustre is at hand: its client's answers, in the form of its manual."""
    tool = put(tmp_path / "bin" / "lfs", LFS.format(place=tmp_path, uid=os.getuid(), gid=tmp_path.stat().st_gid))
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    quotas = {place: free for place, free in free_files(tmp_path / "logs").items() if "(lfs quota" in place}
    assert quotas == {
        f"the group's quota at {tmp_path} (lfs quota -g)": 300,
        f"the project's quota at {tmp_path} (lfs quota -p)": 10,
    }
    runs = [resolved(steps=10, save_every=0)] * 3
    place, least = f"the project's quota at {tmp_path} (lfs quota -p)", 3 * (60 + 4 * 4 + 5 + 4)  # of four ranks
    assert lack_of_files(runs, tmp_path / "logs") == (
        f"up to {least} files are to come, and {place} still allows 10: without them nothing is saved"
    )
    monkeypatch.setattr(disk_space, "free_files", lambda _: {"a disk": least})
    assert lack_of_files(runs, tmp_path) == ""
    monkeypatch.setattr(disk_space, "free_files", lambda _: {})
    assert lack_of_files(runs, tmp_path) == ""
