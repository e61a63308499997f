"""Ranks that stand still are shown where, and started again."""

from pathlib import Path

import pytest

from tests.distributed.ranks import launch_ranks


@pytest.mark.long
def test_ranks_that_stand_still_are_started_once_more_in_a_folder_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "given").touch()
    with pytest.warns(UserWarning, match=r"(?s)ranks ended with \[-9, -9\].*standing_worker.py"):
        said = launch_ranks("tests.distributed.standing_worker", 2, folder, timeout_s=20.0)
    assert said == "done\ndone\n"
    assert {path.name for path in folder.iterdir()} == {"given", "left", "rank-0.log", "rank-1.log"}
