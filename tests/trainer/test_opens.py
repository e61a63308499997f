"""What a rank opens that is not its node's first: no more with more ranks and shards."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.settings.experiment import Engine
from tests.trainer.launch import Launch, new_run, settings

WHEN_SILENT = re.compile(r"/attempts/2/(beats(/.*)?|ended\.json|rendezvous)$")


def opened(folder: Path, engine: str, dp: int, shards: int) -> list[str]:
    """What the last rank opens below the run and the data, in an attempt that resumes another's checkpoint."""
    (data := folder / "data").mkdir(parents=True)
    for number in range(shards):
        (data / f"{number:03}.txt").write_text("Nobody opens what another has read. " * 200)
    resolved = settings(data, {"tp": 1, "pp": 1, "dp": dp}, Engine(name=engine), steps=1, save_last=True)
    resolved = replace(resolved, data=replace(resolved.data, source="stream"))
    run = new_run(folder / "logs", resolved)
    for attempt in (1, 2):
        counted = os.pathsep.join([str(folder / f"opens-{attempt}-{{rank}}"), str(folder / "logs"), str(data)])
        launched = Launch(run, dp, COUNT_OPENS_IN=counted)
        assert set(launched.wait()) == {0}, launched.log
    assert "resumed after step 1" in launched.log
    calls = (folder / f"opens-2-{dp - 1}").read_text().splitlines()
    # But for what it looks at where the first of its node has not answered for some seconds, as on a busy machine.
    return [call for call in calls if not WHEN_SILENT.search(call)]


@pytest.mark.long(but="first")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed-3d"])
def test_more_ranks_and_shards_are_no_more_opens_of_one(tmp_path: Path, engine: str) -> None:
    few, many = opened(tmp_path / "few", engine, 2, 4), opened(tmp_path / "many", engine, 4, 60)
    assert 0 < len(many) <= len(few), "\n".join(many)
    lists = [call for call in many if call.startswith(("os.listdir", "os.scandir"))]
    assert not lists, "the first rank alone lists"
