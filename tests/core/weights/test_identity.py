"""Is a folder of weights still the one that a run was submitted with? By headers, and by two blocks of each tensor."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.folder import EDGE, changes_since, check_unchanged, identity_of, read_folder
from hpc_gpt.core.weights.names import stored_sizes
from tests.core.weights.test_folder import LLAMA, write_file, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "weights", LLAMA)


def stored(folder: Path) -> dict[str, Any]:
    """What provenance.json says of a folder."""
    found: dict[str, Any] = json.loads(json.dumps(identity_of(read_folder(folder))))
    return found


def overwrite(file: Path, at: int, content: bytes = b"\1") -> None:
    """Writes in place: the inode stays."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def test_another_header_or_config_is_a_change_of_the_file(folder: Path) -> None:
    then = stored(folder)
    assert changes_since(read_folder(folder), then).files == {}
    write_file(folder / "model.safetensors", stored_sizes(LLAMA) | {"model.norm.weight": (33,)})
    (folder / "config.json").write_text(json.dumps(config_of(LLAMA) | {"use_cache": False}))
    how = "changed, added or removed"
    assert changes_since(read_folder(folder), then).files == {"config.json": how, "model.safetensors": how}
    with pytest.raises(ConfigError, match=r"has changed since the run was submitted: config\.json \(changed.*, model"):
        check_unchanged(read_folder(folder), then)


def test_other_weights_of_equal_shapes_are_refused_by_tensor(tmp_path: Path) -> None:
    # A tensor of several blocks, of which the middle is not looked at.
    shape = ModelShape(64, 2, 4, vocab=256, seq=16)
    folder = write_folder(tmp_path / "gpt2", shape)
    then, file = stored(folder), folder / "model.safetensors"
    times = file.stat()
    found = read_folder(folder).weights
    embedding, other = found["transformer.wte.weight"], found["transformer.h.1.ln_1.bias"]
    assert embedding.end - embedding.begin > 4 * EDGE
    for at in (embedding.begin, embedding.end - 1, other.begin + 5):
        overwrite(file, at)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ConfigError, match=r"model\.safetensors \(other numbers in transformer\.(wte|h\.1\.ln_1)"):
            check_unchanged(read_folder(folder), then)
        overwrite(file, at, b"\0")
    assert check_unchanged(read_folder(folder), then) != "", "written twice"
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert check_unchanged(read_folder(folder), then) == ""


def test_a_copy_is_a_note(folder: Path) -> None:
    then, file = stored(folder), folder / "model.safetensors"
    shutil.copy2(file, folder / "copy")
    (folder / "copy").rename(file)  # another inode, the same time
    assert check_unchanged(read_folder(folder), then).startswith("model.safetensors: another modification time or")


def test_a_single_file_beside_the_index_is_another_folder(folder: Path) -> None:
    then, file = stored(folder), folder / "model.safetensors"
    of_an_index = {"model-00001-of-00001.safetensors": then["files"][file.name]}
    indexed = {**then, "index": "0" * 64, "files": of_an_index}
    with pytest.raises(
        ConfigError, match=r"model\.safetensors \(is used instead of model\.safetensors\.index\.json, from"
    ):
        check_unchanged(read_folder(folder), indexed)
