"""Which checkpoints of other programs are whole: by the writer's mark, their files, or the checkpoint before."""

import json
import zipfile
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints.whole_checkpoints import fault_of_checkpoint, is_being_written

Files = dict[str, bytes]


def archive(path: Path, cut_bytes: int = 0) -> bytes:
    """A file as torch.save writes it, without its last bytes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"weights" * 50)
    data = path.read_bytes()
    path.unlink()
    return data[: len(data) - cut_bytes]


def safetensors(cut_bytes: int = 0) -> bytes:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    return data[: len(data) - cut_bytes]


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
DCP = {"__0_0.distcp": b"x", ".metadata": b"m"}
TRAINER = {"model.safetensors": safetensors(), "optimizer.pt": b"o", "trainer_state.json": b"{}"}
MEGATRON = {"mp_rank_00/model_optim_rng.pt": b"w"}
DEEPSPEED = {"mp_rank_00_model_states.pt": b"w", "zero_pp_rank_0_mp_rank_00_optim_states.pt": b"o"}
ACCELERATE = {"model.safetensors": safetensors(), "optimizer.bin": b"o", "random_states_0.pkl": b"r"}


def less(files: Files, *names: str) -> Files:
    return {name: data for name, data in files.items() if name not in names}


# name, files of the checkpoint, files beside it, (name, files) of the one before, what is wrong
WRITERS: dict[str, tuple[str, Files, Files, tuple[str, Files] | None, str | None]] = {
    "torchtitan": ("step-20", DCP, {}, None, None),
    "torchtitan, cut": ("step-20", less(DCP, ".metadata"), {}, None, "has no .metadata"),
    "torchtitan, nothing yet": ("step-20", {"a": b"x"}, {}, ("step-10", DCP), "has no .metadata"),
    "nemo 2": ("step=20", {"weights/__0_0.distcp": b"x"}, {}, None, "has no .metadata"),
    "nemo, unfinished": ("step=20", DCP, {"step=20-unfinished": b""}, None, "has step=20-unfinished beside it"),
    "trainer": ("checkpoint-20", TRAINER, {}, None, None),
    "trainer, cut": ("checkpoint-20", less(TRAINER, "trainer_state.json"), {}, None, "has no trainer_state.json"),
    "trainer, early": ("checkpoint-20", {"config.json": b"{}"}, {}, ("checkpoint-10", TRAINER),
                       "has no trainer_state.json"),
    "megatron": ("iter_0000020", MEGATRON, {"latest_checkpointed_iteration.txt": b"20"}, None, None),
    "megatron, older": ("iter_0000010", MEGATRON, {"latest_checkpointed_iteration.txt": b"20"}, None, None),
    "megatron, cut": ("iter_0000030", MEGATRON, {"latest_checkpointed_iteration.txt": b"20"}, None,
                      "is not in latest_checkpointed_iteration.txt, which names 20"),
    "deepspeed": ("global_step20", DEEPSPEED, {"latest": b"global_step20"}, None, None),
    "deepspeed, cut": ("global_step30", DEEPSPEED, {"latest": b"global_step20"}, None,
                       "is not in latest, which names 20"),
    "orbax": ("20", {"manifest": b"x", "commit_success.txt": b""}, {}, None, None),
    "orbax, cut": ("30", {"manifest": b"x"}, {}, ("20", {"commit_success.txt": b"ok"}), "has no commit_success.txt"),
    "accelerate": ("step_20", ACCELERATE, {}, ("step_10", ACCELERATE), None),
    "accelerate, cut": ("step_20", less(ACCELERATE, "random_states_0.pkl"), {}, ("step_10", ACCELERATE),
                        "has no random_states_0.pkl, as the one before has"),
    "accelerate, empty": ("step_20", ACCELERATE | {"optimizer.bin": b""}, {}, ("step_10", ACCELERATE),
                          "has an empty optimizer.bin"),
    "accelerate, first": ("step_10", less(ACCELERATE, "optimizer.bin"), {}, None, None),
    "safetensors, cut": ("step_20", {"model.safetensors": safetensors(3)}, {}, None,
                         "has model.safetensors of 88 bytes, fewer than its header states"),
    "shards": ("step_20", {"model.safetensors.index.json": INDEX, "model-1.safetensors": safetensors()}, {}, None,
               "has no model-2.safetensors, which model.safetensors.index.json names"),
    "nothing": ("step_20", {}, {}, None, "is empty"),
}  # fmt: skip


def put(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_is_whole_by_its_writers_sign(tmp_path: Path, writer: str) -> None:
    name, files, beside, before, fault = WRITERS[writer]
    put(tmp_path, beside)
    earlier = None if before is None else put(tmp_path / before[0], before[1])
    assert fault_of_checkpoint(put(tmp_path / name, files), earlier) == fault


@pytest.mark.parametrize("cut_bytes", [0, 1, 40])
def test_an_archive_of_torch_is_whole_with_its_end(tmp_path: Path, cut_bytes: int) -> None:
    """Lightning's .ckpt, nanoGPT's ckpt.pt: a checkpoint of one file."""
    (path := tmp_path / "ckpt.pt").write_bytes(archive(tmp_path / "all", cut_bytes))
    assert (fault_of_checkpoint(path) is None) == (cut_bytes < 22)


@pytest.mark.parametrize(
    ("name", "beside", "is_whole"),
    [
        ("last.pt", "last.pt.tmp", True),
        ("last", "tmp-last", True),
        ("last", "last-unfinished", False),  # NeMo writes it in place
        ("step-20.pt", "step-20.pt.tmp", False),
        ("step-20", "step-20.incomplete", False),
    ],
)
def test_what_a_kill_left_of_the_next_save(tmp_path: Path, name: str, beside: str, is_whole: bool) -> None:
    (path := tmp_path / name).write_bytes(archive(tmp_path / "all"))
    (tmp_path / beside).write_bytes(archive(tmp_path / "all", 30))
    assert (fault_of_checkpoint(path) is None) == is_whole


def test_a_file_that_torch_wrote_can_be_read_and_is_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.zeros(1000)}, path := tmp_path / "ckpt.pt")
    assert fault_of_checkpoint(path) is None
    data = path.read_bytes()
    for length in range(5, len(data) - 22, len(data) // 7):
        path.write_bytes(data[:length])
        assert fault_of_checkpoint(path) == "has ckpt.pt without its end"


@pytest.mark.parametrize(
    "name",
    ["30.orbax-checkpoint-tmp-1758", "step=30-last-unfinished", "ckpt.pt.tmp", "tmp-checkpoint-30", "a.incomplete"],
)
def test_a_name_says_that_it_is_being_written(name: str) -> None:
    assert is_being_written(Path(name))
    assert not is_being_written(Path("checkpoint-30"))
