"""What a rank writes is what there was when it was copied, no more of it than needed, and summed up rightly."""

import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles, _compact, lacks_memory, node_free_bytes
from hpc_gpt.trainer.checkpoints.sharded import CachedPlan, put_sharded


def test_what_training_changes_after_the_copy_is_not_written(tmp_path: Path) -> None:
    weight, groups = torch.ones(5), [{"lr": 1.0}]
    files, copies = RankFiles(), HostCopies()
    files.put("sub/state.pt", {"w": weight, "again": weight, "groups": groups})
    files.copy(copies)
    weight.fill_(9)
    groups[0]["lr"] = 2.0
    files.write(tmp_path)
    found = torch.load(tmp_path / "sub" / "state.pt", weights_only=True)
    assert (found["w"].tolist(), found["w"].data_ptr()) == ([1.0] * 5, found["again"].data_ptr())
    assert found["groups"] == [{"lr": 1.0}]
    # The next one needs no more memory.
    again = RankFiles()
    again.put("state.pt", {"w": weight})
    assert copies.missing_bytes(again.tensors) == 0
    again.copy(copies)
    assert again.tensors[0].data_ptr() == files.tensors[0].data_ptr()


@pytest.mark.parametrize("copied", [True, False])
def test_sums_are_the_files_and_a_view_is_written_alone(tmp_path: Path, copied: bool) -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    files = RankFiles()
    files.put("a.pt", OrderedDict(part=flat[100:200], turned=flat[:6].view(2, 3).t()))
    files.put_text("b.json", "{}\n")
    if copied:
        files.copy(HostCopies())
    sums, notes = files.write(tmp_path)
    assert notes == []
    for name, each in sums.items():
        data = (tmp_path / name).read_bytes()
        assert each == {"bytes": len(data), "crc32": zlib.crc32(data)}
    assert sorted(sums) == ["a.pt", "b.json"]
    assert sums["a.pt"]["bytes"] < 8192
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert type(found) is OrderedDict
    assert found["part"].tolist() == flat[100:200].tolist()
    assert found["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_view_without_gaps_is_written_from_where_it_lies() -> None:
    """A training whose states are all views of a few buffers has no room for copies of them where a save says so."""
    flat = torch.arange(1 << 10, dtype=torch.float32)
    for view in (flat[100:200].view(10, 10), flat[3], flat.bfloat16()[8:10], (flat > 3)[1:8]):
        own = _compact(view)
        assert (own.data_ptr(), own.untyped_storage().nbytes()) == (view.data_ptr(), view.nbytes)
        assert torch.equal(own, view)
    assert _compact(flat) is flat


def test_pieces_are_planned_by_the_peers_over_no_device_group(tmp_path: Path) -> None:
    """There is none here."""
    files, weight = RankFiles(), torch.arange(6.0)
    put_sharded(files, "dcp", {"w": weight}, {"w": weight}, CachedPlan())
    sums, notes = files.write(tmp_path)
    files.finish(tmp_path, notes)
    assert sorted(sums) == ["dcp/__0_0.distcp"]
    assert (tmp_path / "dcp" / ".metadata").stat().st_size


def test_a_plan_is_kept_until_what_is_saved_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saves overlap: a plan is made for the next one before the last is finished."""
    planned: list[int] = []
    plan = DefaultSavePlanner.create_global_plan
    monkeypatch.setattr(
        DefaultSavePlanner, "create_global_plan", lambda self, plans: (planned.append(len(saves)), plan(self, plans))[1]
    )
    kept, saves = CachedPlan(), []
    for tensors in (
        {"w": torch.arange(6.0)},
        {"w": torch.arange(6.0) + 1},
        {"w": torch.arange(6.0) + 2, "moment": torch.ones(3)},
        {"w": torch.arange(6.0) + 3, "moment": torch.ones(3)},
        {"w": torch.arange(8.0), "moment": torch.ones(3)},
        {"w": torch.arange(8.0).half(), "moment": torch.ones(3)},
    ):
        put_sharded(files := RankFiles(), "dcp", tensors, tensors, kept)
        saves.append((tmp_path / str(len(saves)), files, tensors))
    assert planned == [0, 2, 4, 5]
    for folder, files, tensors in saves:
        folder.mkdir()
        files.finish(folder, files.write(folder)[1])
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        state_dict_loader.load(found, storage_reader=FileSystemReader(folder / "dcp"), no_dist=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_too_little_memory_is_said_with_figures() -> None:
    free = node_free_bytes()
    assert free is not None
    assert (lacks_memory(0, 10**9), lacks_memory(1 << 20, 1)) == ("", "")
    assert "on the node, for 8 ranks" in lacks_memory(free // 4, 8)
