"""Real trainings on this machine: to the end, at once, by hand, interrupted and taken up again, in odd places."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_gpt.files import read_json, read_json_lines
from hpc_gpt.runs.find_runs import list_runs
from hpc_gpt.runs.run_folder import RunFolder
from tests.cli.command import Done, hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.local.conftest import SMALL, ended, newest, status_of, wait_until


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]


@dataclass(frozen=True)
class Pair:
    """Two runs that trained the same at once, one submitted and waited for, one a script that bash was given."""

    logs: Path
    submitted: RunFolder
    waited: Done
    rendered: str
    by_hand: RunFolder


@pytest.fixture(scope="module")
def pair(tmp_path_factory, data_folder) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    odd = folder / 'it\'s a "folder" %j $HOME'
    odd.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HPC_GPT_")]:
            patch.delenv(name)
        patch.setenv("HPC_GPT_CONFIG", str(folder / "config"))
        patch.setenv("HPC_GPT_STATE", str(folder / "state"))
        patch.setenv("HPC_GPT_CACHE", str(folder / "cache"))
        patch.setenv("HPC_GPT_DATA", str(data_folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        rendered = in_process("render", *SMALL, "--set", "train.steps=3").stdout
        (odd / "job.sh").write_text(rendered)
        environment = {**os.environ, "HPC_GPT_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
        by_hand = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=odd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            logs = folder / "logs"
            patch.setenv("HPC_GPT_LOGS", str(logs))
            waited = hpc_gpt("submit", *SMALL, "--set", "train.steps=3", "--wait")
            said, _ = by_hand.communicate(timeout=300)
        finally:
            by_hand.kill()
        assert by_hand.returncode == 0, said
        assert waited.code == 0, waited.stderr
    (submitted,) = list_runs(logs)
    (run,) = list_runs(odd / "logs")
    return Pair(logs, submitted, waited, rendered, run)


@pytest.mark.long
@pytest.mark.xdist_group("local-pair")
def test_two_runs_at_once_one_by_hand_give_the_same_figures(pair):
    run, submitted = pair.by_hand, pair.submitted
    assert status_of(submitted).state == "done"
    assert status_of(run).state == "done"
    assert losses(run) == losses(submitted)
    assert len(losses(run)) == 3
    # What render prints, what runs and what the folder keeps are the same bytes; the folder is complete either way.
    assert run.job_script.read_text() == submitted.job_script.read_text() == pair.rendered
    kept = {"experiment.toml", "resolved.json", "job.sh", "ds_config.json", "provenance.json", "submissions.jsonl"}
    for folder in (run.path, submitted.path):
        assert kept <= {path.name for path in folder.iterdir()}
    assert (run.path / "resolved.json").read_text() == (submitted.path / "resolved.json").read_text()
    for folder in (run, submitted):
        [attempt] = folder.attempts()
        assert read_json(attempt.folder / "trainer.json")["attention_used"] == "flash"
        # On a CPU there is no GPU to watch, and nothing was compiled.
        measured = read_json(attempt.folder / "measured.json")
        assert "ds_config.json is not" not in attempt.log.read_text()
        assert measured.pop("skipped_shards") == 0
        assert measured.pop("attention_used") == "flash"
        assert set(measured.values()) == {None}
    given = REPOSITORY / "experiments" / "demo.toml"
    assert (submitted.path / "experiment.toml").read_bytes() == given.read_bytes(), "the file as the user gave it"


def test_ctrl_c_while_waiting_saves_and_stops_and_resume_goes_on(tmp_path, monkeypatch):
    logs = tmp_path / "logs with 'quotes' and %j"
    monkeypatch.setenv("HPC_GPT_LOGS", str(logs))
    command = [sys.executable, "-m", "hpc_gpt", "submit", *SMALL, "--set", "train.steps=100000", "--wait"]
    waiting = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list_runs(logs) and (status_of(newest()).step or 0) >= 2)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=300)
    assert waiting.returncode == 130, said
    run = newest()
    stopped = status_of(run)
    assert stopped.state == "stopped"
    assert list(run.checkpoints.glob("step-*/complete.json"))
    assert "asked to save and stop" in said

    assert hpc_gpt("submit", "--resume", run.run_id).code == 0
    assert in_process("submit", "--resume", run.run_id).code == 1  # it runs already
    wait_until(lambda: len(run.attempts()) == 2 and (status_of(run).step or 0) > stopped.step)
    assert hpc_gpt("cancel", run.run_id, "--yes").code == 0
    assert ended(run).state == "cancelled"
    steps = [line["step"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert status_of(run).attempts == 2
    log = in_process("logs", run.run_id, "--attempt", "1").stdout
    assert "ended stopped" in log
    assert in_process("logs", run.run_id, "--tail", "1").stdout.startswith("ended cancelled")
    assert in_process("logs", run.run_id, "-f").stdout == in_process("logs", run.run_id).stdout


@pytest.mark.long
@pytest.mark.xdist_group("local-pair")
def test_wait_ends_with_the_record_and_any_name_of_the_run_means_it(pair, monkeypatch):
    run = pair.submitted
    monkeypatch.setenv("HPC_GPT_LOGS", str(pair.logs))
    record = json.loads((run.path / "record.json").read_text())
    for formula in ("tflops_seed", "tflops_hardware", "tflops_model"):
        assert formula in pair.waited.stdout
        assert record[formula] > 0
    for name in (run.path, run.run_id, run.run_id[:-2], run.submissions()[0]["job_id"]):
        rows = json.loads(in_process("status", name, "--json").stdout)["runs"]
        assert [row["run"] for row in rows] == [run.run_id]
        assert (rows[0]["state"], rows[0]["step"], rows[0]["attempts"]) == ("done", 3, 1)
    line = in_process("status").stdout.splitlines()[1].split()
    assert line[:2] == [run.run_id, "demo"]


@pytest.mark.long
def test_a_stream_and_its_tokenizer_are_found_beside_the_experiment_wherever_it_is_submitted(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(Path(__file__).read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    tokenizer.train_from_iterator(["one two"], trainer)
    tokenizer.save(str(tmp_path / "table.json"))
    text = '[data]\nsource = "stream"\npath = "texts"\ntokenizer = "table.json"\neval_fraction = 0.5\n[model]\n'
    text += 'vocab = 512\n[engine]\nname = "ddp"\n[layout]\ngpus = 1\ntp = 1\npp = 1\n'
    (tmp_path / "mine.toml").write_text(f'extends = "{REPOSITORY}/experiments/demo.toml"\n{text}')
    given = ("--cluster", "local", "--set", "train.steps=2", "--set", "train.eval_every=2", "--wait")
    done = hpc_gpt("submit", "../mine.toml", *given, cwd=tmp_path / "elsewhere")
    assert done.code == 0, done.stderr
    assert len(losses(newest())) == 2
