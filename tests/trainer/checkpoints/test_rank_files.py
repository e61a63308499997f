"""What a rank writes is what there was when it was copied, no more of it than needed, and summed up rightly."""

import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles, _compact, lacks_memory, node_free_bytes


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
    sums = files.write(tmp_path)
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


def test_too_little_memory_is_said_with_figures() -> None:
    free = node_free_bytes()
    assert free is not None
    assert (lacks_memory(0, 10**9), lacks_memory(1 << 20, 1)) == ("", "")
    assert "on the node, for 8 ranks" in lacks_memory(free // 4, 8)
