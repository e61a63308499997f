"""MLflow, by a package that stands in for it: one run of all attempts, each step once, and no secret."""

import json
import sys

import pytest

from hpc_gpt.core.sinks import ShownRun, shown_settings
from hpc_gpt.core.sinks.mlflow import Mlflow
from tests.core.sinks.stand_ins import put_mlflow

RUN = ShownRun(
    "20261101-1",
    "demo",
    "demo/20261101-1",
    100.0,
    shown_settings({"train": {"lr": 0.5}, "hub_token": "hf_x", "n": None}),
)


@pytest.fixture(autouse=True)
def mlflow(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(put_mlflow(tmp_path / "own"))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
                 "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    for name in ("mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


def rows(*steps: int):
    return [(step, 100.0 + step, {"loss": 1.0, "loss_eval_by/<b>": 2.0}) for step in steps]


def test_attempts_are_one_run_and_each_step_is_sent_once(tmp_path):
    for first, last in ((1, 120), (101, 130)):
        sink = Mlflow(RUN, (tmp_path / "mlruns").as_uri(), "gpt")
        sink.add(rows(*range(first, last + 1)))
        sink.add(rows(last))  # as after a fault
        sink.close()
    (run,) = json.loads((tmp_path / "mlruns.json").read_text())["runs"]
    assert [step for key, _, _, step in run["metrics"] if key == "loss"] == list(range(1, 131))
    assert run["metrics"][1] == ["loss_eval_by/_b_", 2.0, 101_000, 1]
    assert (run["name"], run["params"]) == ("demo/20261101-1", {"train.lr": "0.5"})
    assert run["status"] == ["RUNNING", "FINISHED", "RUNNING", "FINISHED"]
