"""Offline runs of W&B: read back from wandb's own protobufs, and made without a network."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.report.exports import EXPORT_MARK, FLOPS, PROJECT, write_offline_runs
from tests.report.exported_runs import log_run, restarted_run
from tests.report.wandb_file import read_records


def records(folder: Path, kind: str) -> list:
    (path,) = folder.glob("run-*.wandb")
    return [getattr(each, kind) for each in read_records(path) if each.WhichOneof("record_type") == kind]


def rows(folder: Path) -> list[dict]:
    """The run's history as W&B shows it: the step's row as it was written last."""
    by_step = {}
    for line in records(folder, "history"):
        by_step[line.step.num] = {"/".join(item.nested_key): json.loads(item.value_json) for item in line.item}
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture
def network(monkeypatch):
    """Whatever asks the network is sent to a port of this machine; the test sees who came."""
    came = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            came.append(connection.recv(200))
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    yield came
    listener.close()


def test_a_run_over_its_restarts_is_one_run_without_a_network(tmp_path, network):
    by_source = {"web": 1.25, "code": 2.5}
    run, log = restarted_run(tmp_path / "logs", by_source), log_run(tmp_path, run="../../x", name="<b>")
    environment = dict(os.environ)
    own, other = write_offline_runs([run, log], tmp_path / "out")
    assert network == []
    assert dict(os.environ) == environment
    assert own == tmp_path / "out" / "wandb" / f"offline-run-20231114_221320-{run.record.run}"
    history = rows(own)
    assert [row["_step"] for row in history] == list(range(1, 9))
    assert [row["loss"] for row in history[4:]] == [4, 3, 2, 1]
    assert history[7]["loss_eval"] == 1.5
    assert {name: history[7][f"loss_eval_by/{name}"] for name in by_source} == by_source
    assert history[7]["_timestamp"] == 1_700_000_108
    assert history[1]["tflops_model"] == pytest.approx(run.record.tflops_model)
    assert {"lr", "grad_norm", "skipped", "step_s", "tokens_per_s"} <= set(history[0])
    (made,) = records(own, "run")
    assert (made.run_id, made.project, made.run_group) == (run.record.run, PROJECT, "demo")
    assert (made.host, made.display_name) == ("", f"demo/{run.record.run}")
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for each in records(own, "summary")
        for item in each.update
    }
    figures = ("step_s", "tokens_per_s", *FLOPS, "mfu", "hfu", "loss_eval", "skipped_steps", "nan_steps", "gpu_hours")
    known = {name: value for name in figures if (value := getattr(run.record, name)) is not None}
    assert {name: summary.get(name) for name in (*known, "ended")} == {**known, "ended": "done"}
    assert len(known) > 5
    assert {name: summary[f"loss_eval_by/{name}"] for name in by_source} == by_source
    assert not {path.name for path in own.iterdir()} & {"logs", "tmp"}
    assert json.loads((own / EXPORT_MARK).read_text()) == {"written_by": "hpc-gpt report --wandb"}
    config = {item.key: json.loads(item.value_json) for item in made.config.update}
    assert (config["tp"], config["train.lr"]) == (2, 0.001)
    # Names stay within the folder, and secrets out of the file.
    assert other.parent == own.parent
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["logs", "out"]
    text = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    for secret in (
        b"hf_secret",
        b"0123456789012345",
        socket.gethostname().encode() if len(socket.gethostname()) > 4 else b"\0\0\1\1",
    ):
        assert secret not in text
    assert [row["loss"] for row in rows(other) if "loss" in row] == [3, 2, 1]


def test_a_second_export_replaces_the_first_and_nothing_else(tmp_path):
    run = restarted_run(tmp_path / "logs")
    (others := tmp_path / "out" / "wandb" / "offline-run-20200101_000000-theirs").mkdir(parents=True)
    (others / "run-theirs.wandb").write_bytes(b"theirs")
    first = write_offline_runs([run], tmp_path / "out")
    assert write_offline_runs([run], tmp_path / "out") == first
    assert len(rows(first[0])) == 8
    assert sorted(entry.name for entry in others.parent.iterdir()) == sorted([others.name, first[0].name])
    assert (others / "run-theirs.wandb").read_bytes() == b"theirs"
    # What stands in its place and is not ours is left as it is.
    (first[0] / EXPORT_MARK).unlink()
    with pytest.raises(RunFolderError, match="not from an export"):
        write_offline_runs([run], tmp_path / "out")
    assert len(rows(first[0])) == 8
