"""Of which model, layout and arithmetic a checkpoint is."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import check_identity, put_identity, read_identity
from tests.trainer.launch import settings

RESOLVED = settings(Path("none.tokens"), {"tp": 2, "pp": 1, "dp": 2})
DP_AND_STAGE = frozenset({"layout.dp", "engine.zero_stage"})


def write(folder: Path, resolved: Resolved) -> None:
    files = RankFiles()
    put_identity(files, resolved, 20)
    files.write(folder)


def test_the_same_run_differs_in_nothing_convertibles_are_told(tmp_path: Path) -> None:
    write(tmp_path, RESOLVED)
    assert read_identity(tmp_path)["step"] == 20
    assert check_identity(tmp_path, RESOLVED) == frozenset()
    wider = replace(RESOLVED, layout=Layout(2, 1, 4))
    assert check_identity(tmp_path, wider, DP_AND_STAGE) == {"layout.dp"}


def test_cp_may_be_converted(tmp_path: Path) -> None:
    plain, wide = (replace(RESOLVED, layout=Layout(2, 1, 2, cp)) for cp in (1, 2))
    for saved, resumed, words in (
        (plain, wide, "is 1 in it and 2 in this run"),
        (wide, plain, "is 2 in it and 1 in this run"),
    ):
        (folder := tmp_path / str(saved.layout)).mkdir()
        write(folder, saved)
        assert check_identity(folder, saved) == frozenset()
        assert check_identity(folder, resumed, frozenset({"layout.cp"})) == {"layout.cp"}
        with pytest.raises(CheckpointError, match=rf"layout\.cp {words}"):
            check_identity(folder, resumed)
