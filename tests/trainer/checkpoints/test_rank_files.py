"""What a rank writes is what there was when it was copied, no more of it than needed, and summed up rightly."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles, lacks_memory, node_free_bytes


def test_what_training_changes_after_the_copy_is_not_written(tmp_path: Path) -> None:
    weight, files, copies = torch.ones(5), RankFiles(), HostCopies()
    [place] = files.put_tensors("a", [weight])
    files.copy(copies)
    weight.fill_(9)
    files.write(tmp_path)
    assert np.fromfile(tmp_path / "a", np.float32, 5, offset=place).tolist() == [1.0] * 5
    # The next one needs no more memory.
    again = RankFiles()
    again.put_tensors("a", [weight])
    assert copies.missing_bytes(again.tensors) == 0
    again.copy(copies)
    assert again.tensors[0].data_ptr() == files.tensors[0].data_ptr()


@pytest.mark.parametrize("copied", [True, False])
def test_sums_are_the_files_and_a_view_is_written_alone(tmp_path: Path, copied: bool) -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    files = RankFiles()
    part, turned = files.put_tensors("a", [flat[100:200], flat[:6].view(2, 3).t()])
    files.put_bytes("b.json", b"{}\n")
    if copied:
        files.copy(HostCopies())
    sums = files.write(tmp_path)
    for name, each in sums.items():
        data = (tmp_path / name).read_bytes()
        assert each == {"bytes": len(data), "crc32": zlib.crc32(data)}
    assert sorted(sums) == ["a", "b.json"]
    assert sums["a"]["bytes"] < 1024
    assert np.fromfile(tmp_path / "a", np.float32, 100, offset=part).tolist() == flat[100:200].tolist()
    assert np.fromfile(tmp_path / "a", np.float32, 6, offset=turned).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_too_little_memory_is_said_with_figures() -> None:
    free = node_free_bytes()
    assert free is not None
    assert (lacks_memory(0, 10**9), lacks_memory(1 << 20, 1)) == ("", "")
    assert "on the node, for 8 ranks" in lacks_memory(free // 4, 8)
