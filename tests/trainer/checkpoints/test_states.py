"""The format of checkpoints: what any ranks have saved is read by any others, to the bit."""

import json
import math
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles, map_file
from hpc_gpt.trainer.checkpoints.states import Held, SavedIndex, SavedStates, Share, put_states
from hpc_gpt.trainer.model.tensor_parallel import Split
from hpc_gpt.trainer.ranks import Peers
from tests.conftest import REPOSITORY
from tests.limits import lower_limit, open_files_left

# name -> (shape of the whole parameter with padded rows, rows that are saved, split over tp)
PARAMETERS: dict[str, tuple[tuple[int, ...], int, Split | None]] = {
    "embedding.weight": ((24, 5), 21, Split(0)),
    "qkv.weight": ((24, 4), 24, Split(0, (16, 4, 4))),
    "qkv.bias": ((24,), 24, Split(0, 3)),
    "projection.weight": ((6, 8), 6, Split(1)),
    "norm.weight": ((7,), 7, None),
    "experts.up.weight": ((4, 16, 3), 4, Split(1, 2)),
    "experts.down.weight": ((4, 3, 8), 4, Split(2)),
}
KINDS = ("weight", "exp_avg")


class Together(Peers):
    """The ranks of one process, each on a thread."""

    def __init__(self, rank: int, size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.is_first = rank, size, rank == 0
        self._values, self._barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def gather(self, value: Any) -> list[Any]:
        values = self.all_gather(value)
        return values if self.is_first else []

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


def on_ranks(size: int, work: Callable[[Peers], None]) -> None:
    """Calls `work` on so many ranks."""
    barrier, values = threading.Barrier(size, timeout=60), [None] * size
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(Together(rank, size, values, barrier))
        except BaseException as fault:
            faults.append(fault)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def whole(name: str, kind: str) -> Tensor:
    shape, kept, _ = PARAMETERS[name]
    value = torch.rand(shape, generator=torch.Generator().manual_seed(sum(map(ord, name + kind))))
    value[kept:] = 0
    return value


def shares_of(how: str, tp: int, dp: int, rank: int) -> list[Share]:
    """What a rank of tp x dp holds: whole shares, rows of them, elements of one flat buffer, or its transposed
    matrices."""
    tp_rank, dp_rank = rank % tp, rank // tp
    shares, at = list[Share](), 0
    sizes = {name: math.prod(shape) // (tp if split else 1) for name, (shape, _, split) in PARAMETERS.items()}
    part = -(-sum(sizes.values()) // dp)
    for name, (shape, kept, split) in PARAMETERS.items():
        size = sizes[name]
        rows = shape[0] // (tp if split and split.dim == 0 else 1)
        first, last = 0, size
        if how == "rows":
            each = -(-rows // dp)
            first, last = (min(dp_rank + more, 10**9) * each * (size // rows) for more in (0, 1))
        elif how == "flat":
            first, last = part * dp_rank - at, part * (dp_rank + 1) - at
            at += size
        first, last = max(0, min(first, size)), max(0, min(last, size))
        turned = how == "transposed" and name == "projection.weight"
        shares.append(Share(name, shape[::-1] if turned else shape, split, tp_rank, tp, first, last - first,
                            shape[1] if turned else kept, turned))  # fmt: skip
    return shares


def held_by(share: Share, kind: str) -> Tensor:
    value = whole(share.name, kind)
    value = value.t() if share.transposed else value
    held = value if share.split is None else share.split.shard(value, share.tp_rank, share.tp)
    return held.reshape(-1)[share.first : share.first + share.count].clone()


def save(folder: Path, how: str, tp: int, dp: int) -> None:
    folder.mkdir()

    def work(peers: Peers) -> None:
        files, last = RankFiles(peers), SavedIndex()
        shares = shares_of(how, tp, dp, peers.rank)
        if how == "whole" and peers.rank >= tp:
            shares = []
        shares = [share for share in shares if share.split or share.tp_rank == 0]
        held = [Held(share, kind, held_by(share, kind)) for kind in KINDS for share in shares]
        put_states(files, held, {"settings": {"layout.tp": tp}, "optimizer": {}}, last)
        files.copy(HostCopies())
        files.write(folder)

    on_ranks(tp * dp, work)


LAYOUTS = [("whole", 1, 1), ("whole", 2, 2), ("rows", 1, 3), ("rows", 2, 2), ("rows", 4, 1), ("rows", 1, 30),
           ("flat", 1, 3), ("flat", 2, 2), ("flat", 4, 2), ("transposed", 1, 1)]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Path]:
    base = tmp_path_factory.mktemp("saved")
    folders = {layout: base / "-".join(map(str, layout)) for layout in LAYOUTS}
    for layout, folder in folders.items():
        save(folder, *layout)
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_read_at_each_to_the_bit(saved: dict[Any, Path], layout: tuple[str, int, int]) -> None:
    for how, tp, dp in LAYOUTS:
        states = SavedStates(saved[layout])
        for rank in range(tp * dp):
            for share in shares_of(how, tp, dp, rank):
                for kind in KINDS:
                    memory = torch.zeros(share.count)
                    states.read(share, kind, memory)
                    assert torch.equal(memory, held_by(share, kind)), (share, kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_parameters_have_no_padding(saved: dict[Any, Path], layout: tuple[str, int, int]) -> None:
    states = SavedStates(saved[layout])
    assert set(states.names) == PARAMETERS.keys()
    for name, (_, kept, _) in PARAMETERS.items():
        assert states.kinds(name) == ["exp_avg"]
        assert torch.equal(states.whole(name), whole(name, "weight")[:kept])


def shown_reader() -> Callable[..., dict[str, Any]]:
    """The function of docs/checkpoints.md that reads a checkpoint with numpy alone."""
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    reader: Callable[..., dict[str, Any]] = names["read_checkpoint"]
    return reader


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pages_twenty_lines_read_each_layout(saved: dict[Any, Path], layout: tuple[str, int, int]) -> None:
    for kind in KINDS:
        found = shown_reader()(saved[layout], kind)
        assert found.keys() == PARAMETERS.keys()
        for name, (_, kept, _) in PARAMETERS.items():
            assert np.array_equal(found[name], whole(name, kind)[:kept].numpy())


def test_files_are_in_safetensors_layout_and_aligned(saved: dict[Any, Path]) -> None:
    from safetensors.numpy import load_file

    folder = saved["rows", 2, 2]
    index = json.loads((folder / "states.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"states-{rank:05d}.safetensors" for rank in range(4)), "states.json",
    ]  # fmt: skip
    flat = load_file(folder / "states-00002.safetensors")["float32"]
    raw = np.fromfile(folder / "states-00002.safetensors", np.uint8)
    assert raw[-flat.nbytes :].tobytes() == flat.tobytes()
    offsets = [run[1] for entry in index["parameters"].values() for kind in entry["kinds"].values()
               for run in kind["runs"]]  # fmt: skip
    assert sum(offset % 64 == 0 for offset in offsets) > len(offsets) / 2  # the others are within a rank's tensor


def test_many_ranks_of_equal_shares_are_a_few_entries(saved: dict[Any, Path]) -> None:
    index = json.loads((saved["rows", 1, 30] / "states.json").read_text())
    # 24 rows on the first 24 of 30 ranks; offsets differ where a rank lacks a part of an earlier parameter.
    runs = index["parameters"]["qkv.weight"]["kinds"]["weight"]["runs"]
    assert sum(run[5] for run in runs) == 24
    assert len(runs) == 2


def test_what_is_missing_is_said(saved: dict[Any, Path], tmp_path: Path) -> None:
    folder = saved["rows", 1, 3]
    states = SavedStates(folder)
    with pytest.raises(CheckpointError, match="holds no other"):
        states.whole("other")
    with pytest.raises(CheckpointError, match=r"holds no muon of norm\.weight"):
        states.whole("norm.weight", "muon")
    index = json.loads((folder / "states.json").read_text())
    for change, words in (
        (lambda: index.update(format=2), "of format 2, and this version reads 1"),
        (lambda: index["parameters"]["norm.weight"]["kinds"]["weight"]["runs"].pop(), "holds 6 of the 7 elements of"),
    ):
        change()
        (tmp_path / "states.json").write_text(json.dumps(index))
        for path in folder.glob("*.safetensors"):
            if not (tmp_path / path.name).exists():
                (tmp_path / path.name).symlink_to(path)
        with pytest.raises(CheckpointError, match=words):
            SavedStates(tmp_path).whole("norm.weight")
        index["format"] = 1


def test_files_that_are_read_do_not_stay_open(saved: dict[Any, Path]) -> None:
    with open_files_left(2):
        states = SavedStates(saved["rows", 1, 30])
        for name, (_, kept, _) in PARAMETERS.items():
            assert torch.equal(states.whole(name), whole(name, "weight")[:kept])


def test_few_maps_at_a_time_are_enough(saved: dict[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_gpt.trainer.checkpoints.states._MAX_MAPS", 2)
    states = SavedStates(saved["rows", 1, 30])
    for name, (_, kept, _) in PARAMETERS.items():
        assert torch.equal(states.whole(name), whole(name, "weight")[:kept])
        assert len(states._maps) <= 2


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as fault:
        read()
    return f"{fault.value}; {fault.value.hint}"


def test_only_contents_are_said_to_be_damaged(saved: dict[Any, Path], tmp_path: Path) -> None:
    states = SavedStates(saved["rows", 1, 30])
    with open_files_left(0):
        for read in (lambda: states.whole("norm.weight"), lambda: SavedStates(saved["rows", 1, 30])):
            words = refused(read)
            assert "cannot be read: Too many open files; this process may open no more files" in words
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1 << 41)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with lower_limit(resource.RLIMIT_AS, used + (1 << 30)):
        words = refused(lambda: map_file(big))
    assert "cannot be read: Cannot allocate memory; this host has no memory for it, or the process has all" in words
    assert "vm.max_map_count" in words
    (tmp_path / "link").symlink_to("link")
    assert "nothing is known of its contents" in refused(lambda: map_file(tmp_path / "link"))
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        assert "the checkpoint is damaged" in refused(lambda path=path: map_file(path))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no step", "holds exp_avg of w, but no step"),
        ("half a weight", "holds 3 of the 6 elements of w"),
        ("no weight", "holds no weight of w"),
        ("no parameter", "holds no w"),
    ],
)
def test_a_checkpoint_that_none_can_load_fails_at_its_save(fault: str, said: str) -> None:
    files, value = RankFiles(), torch.ones(6)
    whole = Share("w", (6,), None, 0, 1, 0, 6, 6)
    weight, moment = Held(whole, "weight", value), Held(whole, "exp_avg", value)
    half = Held(Share("w", (6,), None, 0, 1, 0, 3, 6), "weight", value[:3])
    held = {"no step": [weight, moment], "half a weight": [half, moment], "no weight": [moment], "no parameter": []}[
        fault
    ]
    about = {"step": 7, "settings": {"layout.tp": 1}, "optimizer": {} if fault == "no step" else {"step": 7.0}}
    with pytest.raises(CheckpointError, match=f"step 7 cannot be saved: the checkpoint {said}"):
        put_states(files, held, about, SavedIndex(), ["w"])


def test_places_are_sent_once_until_they_change(tmp_path: Path) -> None:
    sizes = [3, 3, 4, 4]
    sent = list[int]()

    def work(peers: Peers) -> None:
        last = SavedIndex()
        gather = peers.gather
        for number, size in enumerate(sizes):
            files = RankFiles(peers)

            def counted(value: Any, number: int = number) -> Sequence[Any]:
                sent.extend([number] * (peers.rank == 0 and not isinstance(value[0], bool)))
                return gather(value)

            peers.gather = counted  # type: ignore[method-assign]
            share = Share("w", (2 * size,), None, 0, 1, peers.rank * size, size, 2 * size)
            value = torch.arange(peers.rank * size, (peers.rank + 1) * size) + 0.5
            put_states(files, [Held(share, "weight", value)], {"settings": {"layout.tp": 1}, "optimizer": {}}, last)
            if peers.is_first:
                (tmp_path / str(number)).mkdir()
            peers.all_gather(None)
            files.write(tmp_path / str(number))

    on_ranks(2, work)
    assert sent == [0, 2]
    for number, size in enumerate(sizes):
        assert torch.equal(SavedStates(tmp_path / str(number)).whole("w"), torch.arange(2 * size) + 0.5)
