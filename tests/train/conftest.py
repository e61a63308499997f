"""The text all of the trainer's tests train on."""

from pathlib import Path

import pytest

from hpc_gpt.tokens.build import build_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token file of this repository's own sources."""
    source = Path(__file__).resolve().parents[2] / "hpc_gpt" / "tokens"
    return build_tokens(source, tmp_path_factory.mktemp("tokens") / "own.tokens").path
