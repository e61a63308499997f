"""Is a folder of weights still the one that a run was submitted with? By sizes, headers and config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.folder import check_unchanged, read_folder
from hpc_gpt.core.weights.names import stored_sizes
from tests.core.weights.test_folder import LLAMA, write_file, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "weights", LLAMA)


def stored(folder: Path) -> dict[str, Any]:
    """What provenance.json says of a folder."""
    found: dict[str, Any] = json.loads(json.dumps(read_folder(folder).identity))
    return found


def test_another_header_or_config_is_a_change_of_the_file(folder: Path) -> None:
    then = stored(folder)
    check_unchanged(read_folder(folder), then)
    write_file(folder / "model.safetensors", stored_sizes(LLAMA) | {"model.norm.weight": (33,)})
    (folder / "config.json").write_text(json.dumps(config_of(LLAMA) | {"use_cache": False}))
    with pytest.raises(
        ConfigError, match=r"has changed since the run was submitted: config\.json, model\.safetensors$"
    ):
        check_unchanged(read_folder(folder), then)


def test_a_single_file_beside_the_index_is_another_folder(folder: Path) -> None:
    then, file = stored(folder), folder / "model.safetensors"
    of_an_index = {"model-00001-of-00001.safetensors": then["files"][file.name]}
    indexed = {**then, "index": "0" * 64, "files": of_an_index}
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is used instead of model\.safetensors\.index\.json, from"
    ):
        check_unchanged(read_folder(folder), indexed)
