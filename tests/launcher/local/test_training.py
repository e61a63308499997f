"""Real trainings on this machine: to the end, at once, by hand, interrupted and taken up again, in odd places."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.around import around, events_of, named
from tests.cli.command import hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.launcher.local.conftest import ENDLESS, RESTING, SMALL, ended, newest, status_of, submit
from tests.waiting import wait_for


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]


@pytest.mark.long(always=True)
def test_ctrl_c_while_waiting_saves_and_stops_and_resume_goes_on(tmp_path, monkeypatch):
    logs = tmp_path / "logs with 'quotes' and %j"
    monkeypatch.setenv("HPC_GPT_LOGS", str(logs))
    # One rank, as it starts twice.
    alone = ("--gpus", "1", "--tp", "1", *ENDLESS)
    command = [sys.executable, "-m", "hpc_gpt", "submit", *SMALL, *alone, "--wait"]
    waiting = subprocess.Popen(command, env={**os.environ, **RESTING}, stderr=subprocess.PIPE, text=True)
    wait_for("two steps", lambda: list_runs(logs) and (status_of(newest()).step or 0) >= 2)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate()
    assert waiting.returncode == 130, said
    run = newest()
    stopped = status_of(run)
    assert stopped.state == "stopped"
    assert list(run.checkpoints.glob("step-*/complete.json"))
    assert "asked to save and stop" in said

    submit("--resume", run.run_id, environment=RESTING)
    assert in_process("submit", "--resume", run.run_id).code == 1  # it runs already
    wait_for("a second attempt trains", lambda: len(run.attempts()) == 2 and (status_of(run).step or 0) > stopped.step)
    in_process("cancel", run.run_id, "--yes", code=0)
    assert ended(run).state == "cancelled"
    steps = [line["step"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert status_of(run).attempts == 2
    log = in_process("logs", run.run_id, "--attempt", "1").stdout
    assert "ended stopped" in log
    assert in_process("logs", run.run_id, "--tail", "1").stdout.startswith("ended cancelled")
    assert in_process("logs", run.run_id, "-f").stdout == in_process("logs", run.run_id).stdout


@pytest.mark.long
def test_a_stream_and_its_tokenizer_are_beside_the_experiment(tmp_path):
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
    hpc_gpt("submit", "../mine.toml", *given, cwd=tmp_path / "elsewhere", code=0)
    assert len(losses(newest())) == 2


@pytest.mark.long
def test_moe_tiny_learns_and_balances_its_experts():
    """With half of its steps; without balance more tokens go to one expert, and the flag says so (seed 2 shows it)."""
    loads, flags = [], []
    for balance in ("loss", "none"):
        keys = ("train.steps=70", f"train.balance={balance}", "train.eval_every=0", "train.seed=2")
        settings = (word for key in keys for word in ("--set", key))
        hpc_gpt("submit", "moe-tiny", "--cluster", "local", *settings, "--wait", code=0)
        run = newest()
        record = json.loads((run.path / "record.json").read_text())
        assert record["loss_last"] < 0.6 * record["loss_first"]
        assert {"balance_loss", "expert_load", "experts_dead"} <= run.attempts()[0].last_metrics().keys()
        loads.append(record["expert_load"])
        flags.append([flag for flag in record["flags"] if "takes most tokens" in flag])
    assert loads[0] < 2 < 3 < loads[1]
    assert (flags[0], len(flags[1])) == ([], 1)


def test_a_run_here_has_its_events(tmp_path):
    told = tmp_path / "told"
    run = submit(*SMALL, "--set", "train.steps=3", *around(told, "saved"))
    assert ended(run).state == "done"
    wait_for("the events are told", lambda: told.exists() and told.read_text().count("\n") == 3)
    first, saved, last = named(events_of(run, told), "ended", "steps", "hours_left", "checkpoint")
    assert (first[:4], first[5]) == (("first_step", 1, None, 3), None)
    assert saved == ("saved", 1, None, 3, 0.0, str(run.checkpoints / "step-00000003"))
    assert last == ("ended", 1, "done", 3, 0.0, None)
