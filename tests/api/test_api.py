"""hpc_gpt.api: what the verbs have, as values; the process it is called in stays as it was."""

import ast
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.sweep import make_stand_ins
from hpc_gpt import api
from hpc_gpt.api import Run, plan, read_runs, submit
from hpc_gpt.core.errors import ConfigError, JobFailed, JobRefused, LayoutError, NoSuchRun
from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.runs import snapshot
from hpc_gpt.core.runs.code_archive import code_sha256, read_code
from hpc_gpt.core.runs.work_archive import unpack_work
from tests.cli.command import in_process
from tests.launcher.local.conftest import RESTING
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, unsubmitted_run, with_attempt
from tests.test_imports import MODULES, imports_of, own_module, package_of, room_of
from tests.waiting import wait_for

SMALL = {"layout.gpus": 1, "layout.tp": 1, "layout.pp": 1, "layout.micro_batches": 1, "data.source": "random"}


def done_run(steps: int = 6, **more):
    return with_attempt(make_run(logs_dir(), train__steps=steps), steps, **more)


def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]


def test_nothing_heavy_is_imported_and_the_process_is_unchanged(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", RESTING["PYTHONPATH"])
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    before = os.getcwd(), dict(os.environ), handlers(), os.umask(0o22), threading.active_count()
    os.umask(before[3])
    assert plan(model="gpt2", gpus=8, cluster="a100-80g-8")
    run = submit("demo", {**SMALL, "train.steps": 10**6}, cluster="local")
    wait_for("its first step", lambda: run.status().step, run.stdout)
    assert run.save(wait=True).startswith("saved after step ")
    with pytest.raises(TimeoutError, match="is running after 0 s"):
        run.wait(timeout_s=0)
    stopped = run.stop(wait=True)
    assert f"ended as stopped after step {run.status().step}" in stopped
    assert (run.done(), run.wait().state, run.cancel()) == (True, "stopped", False)
    with pytest.raises(JobRefused, match="nothing to stop, it ended as stopped"):
        run.stop()
    assert (run.result().ended, len(run.metrics()["loss"])) == ("stopped", run.status().step)
    assert run.id in run._repr_html_()
    assert run.id in read_runs(run.folder)._repr_html_()
    # One takes note of the run's supervisor, which ends after its run.
    wait_for("the end of its thread", lambda: threading.active_count() <= before[4])
    assert (os.getcwd(), dict(os.environ), handlers(), os.umask(0o22), threading.active_count()) == before
    assert capfd.readouterr() == ("", "")


def test_a_second_submission_gets_what_was_edited_since(tmp_path, monkeypatch):
    make_stand_ins(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    code = {f"hpc_gpt/{name}": Path(name) for name in ("__init__.py", "core/files.py")}
    (tmp_path / "core").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(snapshot, "code_files", lambda: code)

    def edit(text: str) -> None:
        for path in (*code.values(), Path("mine/train.py"), Path("environment.tar")):
            path.write_text(text)
        stage = f'stage = "{tmp_path}/environment.tar"'
        Path("site.toml").write_text(f'{stage}\nchain = "none"\n[environment]\nEDITED = "{text}"\n')
        Path("mine.toml").write_text(
            f'[engine]\nname = "command"\n[command]\nrun = "python train.py {text}"\nworkdir = "mine"\n'
        )

    def read(run: Run) -> dict[str, object]:
        provenance = json.loads((run.folder / "provenance.json").read_text())
        return {
            "work": (unpack_work(run.folder) / "train.py").read_text(),
            "code": read_code(run.folder)["hpc_gpt/core/files.py"].decode(),
            "stage": provenance["stage_sha256"] == hashlib.sha256(Path("environment.tar").read_bytes()).hexdigest(),
            "sums": provenance["code_sha256"] == code_sha256(read_code(run.folder)),
            "command": json.loads((run.folder / "resolved.json").read_text())["command"]["run"].split()[-1],
            "environment": "EDITED=second" in (run.folder / "job.sh").read_text(),
        }

    edit("first!")
    whole = {"stage": True, "sums": True}
    first = submit("mine.toml", cluster="site.toml")
    assert read(first) == {"work": "first!", "code": "first!", "command": "first!", "environment": False, **whole}
    edit("second")
    second = submit("mine.toml", cluster="site.toml")
    assert read(second) == {"work": "second", "code": "second", "command": "second", "environment": True, **whole}


def test_no_torch_and_no_click_are_loaded():
    program = (
        "import json, sys\nfrom hpc_gpt.api import plan, read_runs\n"
        "plan(model='gpt2', gpus=8, cluster='a100-80g-8'); read_runs()\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "deepspeed", "click"} & {*json.loads(done.stdout)}


def test_the_verbs_call_what_it_calls():
    """The functions of the working packages that the API imports are functions that a verb imports, too."""
    does = {"launcher", "report", "planner"}

    def used(path: Path) -> set[str]:
        return {name for name, _ in imports_of(path) if room_of(package_of(own_module(name))) in does}

    by_verbs = set().union(*(used(path) for module, path in MODULES.items() if room_of(package_of(module)) == "cli"))
    # Beside types: what turns the answer of another function into a value, and the end of a wait, which a verb prints.
    own = {"RunStatus", "Figures", "until_over", "check_end", "read_one", "runs_html"}
    functions = {name for name in used(Path(api.__file__)) if name.rpartition(".")[2] not in own}
    assert len(functions) > 10
    assert functions - by_verbs == set()


def test_it_is_typed_and_says_what_it_gives():
    tree = ast.parse(Path(api.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__init__"):
            assert node.returns is not None, node.name
    assert (Path(api.__file__).parent / "py.typed").is_file()


def test_plan_is_what_the_verb_finds(tmp_path):
    for words, given in (
        (("--model", "llama3.1-8b", "--gpus", "64"), {"model": "llama3.1-8b", "gpus": 64}),
        (("demo", "--set", "model.seq=256"), {"experiment": "demo", "settings": {"model.seq": 256}}),
    ):
        rows = plan(**given, cluster="a100-80g-8")
        shown = json.loads(in_process("plan", *words, "--cluster", "a100-80g-8", "--json").stdout)["candidates"]
        assert [str(row.layout) for row in rows] == [each["layout"] for each in shown]
        assert [row.figures.step_s for row in rows] == [each["figures"]["step_s"] for each in shown]
        assert [row.memory_gib for row in rows] == [each["memory_gib"] for each in shown]


def test_errors_are_the_verbs_own():
    with pytest.raises(LayoutError, match="does not fit"):
        plan(model="llama3.1-70b", gpus=1, cluster="jean-zay-v100-16g")
    with pytest.raises(ConfigError, match="unknown key train"):
        submit("demo", {"train.stepz": 3}, cluster="local")
    with pytest.raises(NoSuchRun, match="no run 'nothing'"):
        Run("nothing")
    with pytest.raises(NoSuchRun):
        read_runs("nothing")
    assert not list(logs_dir().glob("*/*"))


def test_a_job_script_is_submitted_as_the_verb_does(tmp_path, monkeypatch):
    make_stand_ins(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    text = '#!/bin/bash\n#SBATCH --nodes=2\necho "$@"\n'
    (tmp_path / "train.slurm").write_text(text)
    run = submit("train.slurm", {"job.account": "abc"}, args=["--lr", "a b"], sbatch=["--time=2:00:00"])
    job = (run.folder / "job.sh").read_text()
    assert [line for line in job.splitlines() if line.startswith("#SBATCH")][:4] == [
        "#SBATCH --nodes=2", "#SBATCH --account=abc", "#SBATCH --time=2:00:00", "#SBATCH --job-name=train.slurm",
    ]  # fmt: skip
    shown = in_process("render", "--time=2:00:00", "--account=abc", "train.slurm", "--lr", "a b", cwd=tmp_path).stdout
    assert [line for line in job.splitlines() if "a b" in line] == [
        line for line in shown.splitlines() if "a b" in line
    ]
    with pytest.raises(ConfigError, match=r"row and until need an experiment; train\.slurm is a job script"):
        submit("train.slurm", until=["steps=5"])
    with pytest.raises(ConfigError, match="args and sbatch need a job script; demo does not begin with #!"):
        submit("demo", args=["--lr"])


def test_a_run_that_failed_raises_at_its_result():
    failed = Run(done_run(ended="gpu_memory", cause="out of memory").path)
    assert failed.wait().state == "gpu_memory"
    with pytest.raises(JobFailed, match="gpu_memory"):
        failed.result()
    assert failed.record().ended == "gpu_memory"


def test_steps_that_were_trained_again_are_left_out():
    run = done_run(6, ended="error")
    add_attempt(run, [metrics_line(step, loss=9.0) for step in range(5, 9)], started=STARTED + 9999, resumed_step=4)
    metrics = Run(run.run_id).metrics()
    assert (metrics["step"].tolist(), metrics["loss"][4:].tolist()) == ([*range(1, 9)], [9.0] * 4)
    assert isinstance(metrics["step_s"], np.ndarray)
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(ConfigError, match="pandas is not installed here"):
            metrics.to_pandas()
    else:
        assert metrics.to_pandas()["step"].tolist() == metrics["step"].tolist()


def test_the_columns_of_a_run_without_steps_are_empty():
    metrics = Run(unsubmitted_run().run_id).metrics()
    assert (metrics["step"].tolist(), metrics["loss"].tolist(), metrics["step_s"].size) == ([], [], 0)


def test_a_run_is_one_of_another_program_too(tmp_path):
    log = tmp_path / "nano.log"
    log.write_text("".join(f"iter {step}: loss {5 - step / 10:.4f}, time 100.00ms, mfu 30.00%\n" for step in range(20)))
    ours = done_run()
    (other,) = [run for run in read_runs(tmp_path, ours.path) if run.id != ours.run_id]
    assert other.metrics()["loss"][0] == 5.0
    with pytest.raises(ConfigError, match="known by its log alone"):
        other.stop()
    assert read_runs(tmp_path).unread == []


def test_a_notebook_shows_a_table_and_curves_without_a_script():
    runs = [done_run(), done_run()]
    (one,) = [Run(run.path) for run in runs[:1]]
    page = read_runs()._repr_html_()
    assert one.id in one._repr_html_()
    assert all(run.run_id in page for run in runs)
    assert page.count('class="line s') == 2
    assert page.count("color:#3274d9") == page.count("color:#c4621d") == 1
    assert "<table>" in page
    assert "<svg" in page
    assert "<script" not in page
    assert "<b>" not in page
