"""A run of our own, and where it lies."""

import pytest

from tests.made_runs import make_run


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def run(logs):
    return make_run(logs)
