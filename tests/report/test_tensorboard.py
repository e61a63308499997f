"""Event files, read back by TensorBoard itself."""

import hashlib
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from hpc_gpt.core.errors import RunFolderError, UserError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.exports import EVENT_FILE, export_runs, started_name, write_events
from tests.conftest import REPOSITORY
from tests.made_runs import STARTED
from tests.programs import python
from tests.report.any_run import any_run
from tests.report.exported_runs import log_run, restarted_run


def read_back(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(path: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in read_back(path).Scalars(tag)]


def test_a_step_trained_again_is_there_once_in_the_same_run(tmp_path):
    run = restarted_run(tmp_path / "logs")
    (path,) = write_events([run], tmp_path / "out")
    assert path == tmp_path / "out" / "demo" / run.record.run / EVENT_FILE.format(number=0)
    losses = [(1, 6), (2, 4), (3, 2 + 4 / 3), (4, 3), (5, 4), (6, 3), (7, 2), (8, 1)]
    assert scalars(path, "loss") == losses
    assert scalars(path, "loss_eval") == [(8, 1.5)]
    at = [event.wall_time for event in read_back(path).Scalars("loss")]
    assert at == [STARTED + second for second in (1, 2, 3, 4, 105, 106, 107, 108)]


def test_every_curve_is_there_under_its_name(tmp_path):
    run = restarted_run(tmp_path / "logs")
    (path,) = write_events([run], tmp_path / "out")
    tags = read_back(path).Tags()["scalars"]
    flops = ["tflops_seed", "tflops_hardware", "tflops_model"]
    assert sorted(tags) == sorted(["loss", "loss_eval", "step_s", "tokens_per_s", "lr", "grad_norm", "skipped", *flops])
    assert scalars(path, "step_s")[0] == (1, 5.0)
    # The formula is of the step's own seconds: at the median's it is the record's figure.
    assert run.record.step_s == 0.5
    assert scalars(path, "tflops_model")[1] == (2, run.record.tflops_model)
    assert scalars(path, "tflops_model")[0] == (1, run.record.tflops_model / 10)


def test_a_mixture_has_a_curve_for_each_source(tmp_path):
    run = restarted_run(tmp_path / "logs", by_source={"web": 1.25, "code": float("nan"), "<b>": 2.5})
    (path,) = write_events([run], tmp_path / "out")
    by_source = {tag: scalars(path, tag) for tag in read_back(path).Tags()["scalars"] if tag.startswith("loss_eval_by")}
    assert by_source == {"loss_eval_by/web": [(8, 1.25)], "loss_eval_by/<b>": [(8, 2.5)]}


def test_a_log_without_times_of_day_counts_on_from_its_start(tmp_path):
    run = log_run(tmp_path, started="2026-01-01T00:00:00Z", global_batch=8, seq=128)
    (path,) = write_events([run], tmp_path / "out")
    assert scalars(path, "loss") == [(1, 3.0), (3, 2.0), (4, 1.0)]
    assert scalars(path, "skipped") == [(1, 0), (2, 1), (3, 0), (4, 0)]
    assert scalars(path, "tokens_per_s") == [(1, 256), (2, 512), (3, 512), (4, 512)]
    at = [event.wall_time for event in read_back(path).Scalars("step_s")]
    assert at == [1767225600.0 + second for second in (4, 6, 8, 10)]


def test_settings_are_there_without_secrets(tmp_path):
    (path,) = write_events([log_run(tmp_path)], tmp_path / "out")
    content = read_back(path).PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert (settings["gpus"].number_value, settings["arguments.lr"].number_value) == (64, 1e-4)
    assert settings["arguments.eos_token"].string_value == "</s>"
    assert "hf_secret" not in str(settings)
    assert b"hf_secret" not in path.read_bytes()


def test_a_second_export_replaces_the_first_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    run = restarted_run(tmp_path / "logs")
    (path,) = write_events([run], out)
    (others := path.with_name("events.out.tfevents.1.host")).write_bytes(b"")
    first = path.read_bytes()
    assert write_events([run, run], out) == [path]
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == (first, sorted([path, others]))


def test_a_run_has_one_id_of_its_name_or_its_path(tmp_path):
    def ids(*runs):
        return [made.id for made in export_runs(runs)]

    def path_digits(path):
        return hashlib.sha256(str(path).encode()).hexdigest()[:8]

    own = RunRead(Record(run="20261101-1", name="demo"), folder=tmp_path / "a")
    job = replace(own, record=replace(own.record, run="4711"))
    assert ids(own, own, job) == ["20261101-1", "demo-4711"]
    copy = replace(own, folder=tmp_path / "copy")
    assert ids(own, copy) == [f"20261101-1-{path_digits(run.folder)}" for run in (own, copy)]
    a, b = log_run(tmp_path / "a"), log_run(tmp_path / "b")
    of_a, of_b = (f"job-{path_digits(tmp_path / name / 'job.out')}" for name in "ab")
    assert (ids(a, b), ids(b, a)) == ([of_a, of_b], [of_b, of_a])
    twice = f"{of_a}-{of_a[4:]}"
    assert ids(a, replace(a)) == [twice, f"{twice}-2"]
    assert ids(RunRead(Record())) == [f"run-{path_digits(None)}"]


def test_a_folder_of_wandb_has_the_start_in_utc():
    last = "9999-12-31T23:59:59Z", "99991231_235959"
    for started, name in (("2026-01-02T03:04:05Z", "20260102_030405"), (None, "19700101_000000"), last):
        (made,) = export_runs([RunRead(Record(started=started))])
        assert started_name(made) == name
    assert started_name(replace(made, began=1e15, run=RunRead(Record()))) == "19700101_000000"
    assert started_name(replace(made, began=60.0, run=RunRead(Record()))) == "19700101_000100"


@pytest.mark.parametrize(
    "name",
    ["../../escape", "/etc/passwd", "a/b", "..", ".", "", "x" * 5000, "\x00\n\x1b[2J", "<script>", "naïve", "\udcff"],
)
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    out = tmp_path / "deep" / "out"
    (path,) = write_events([log_run(tmp_path, name=name, run=name)], out)
    assert path.resolve().is_relative_to(out.resolve())
    assert len(path.relative_to(out).parts) == 3
    assert all(len(part) < 120 and part.isascii() and part.isprintable() for part in path.relative_to(out).parts)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["deep"]
    assert scalars(path, "loss")


@settings(max_examples=50)
@given(run=any_run(), started=st.one_of(st.none(), st.text(), st.just("9999-12-31T23:59:59Z")))
def test_whatever_a_log_says_it_can_be_exported(run, started):
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, record=replace(run.record, started=started))
        (path,) = write_events([run], Path(folder))
        for tag in read_back(path).Tags()["scalars"]:
            steps = [step for step, _ in scalars(path, tag)]
            assert steps == sorted(set(steps))
        (exported,) = export_runs([run])
        assert started_name(exported).replace("_", "").isdecimal()


def test_a_link_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="leads to"):
        write_events([log_run(tmp_path)], tmp_path / "out")
    assert not any((tmp_path / "elsewhere").rglob("*events*"))


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunFolderError, match="out"):
        write_events([log_run(tmp_path)], tmp_path / "out")


def test_a_run_without_steps_has_its_settings(tmp_path):
    (path,) = write_events([RunRead(Record(run="r", gpus=4, step_s=math.nan))], tmp_path)
    assert read_back(path).Tags()["scalars"] == []


WITHOUT = """
import sys
sys.modules[{package!r}] = None
from pathlib import Path
from hpc_gpt.report.exports import {function}
try:
    {function}([], Path({folder!r}))
except Exception as fault:
    print(type(fault).__name__, fault, "|", fault.hint)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(("package", "function"), [("tensorboard", "write_events"), ("wandb", "write_offline_runs")])
def test_without_the_package_the_user_learns_what_to_install(tmp_path, package, function):
    text = WITHOUT.format(package=package, function=function, folder=str(tmp_path))
    done = python("-c", text, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, code=0)
    line = f"UserError the curves need the package {package}, which is not installed: import of {package} halted; "
    assert done.stdout == f"{line}None in sys.modules | pip install 'hpc-gpt[{package}]'\n"
    assert issubclass(RunFolderError, UserError)
