"""The Trainer of transformers itself in job scripts: its record is that of its log, and what its starts resume."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.command import in_process
from tests.launcher.local.conftest import newest
from tests.slurm.launcher import Job, Launcher
from tests.slurm.test_records_of_programs import OF_THE_RUN, record_of
from tests.slurm.test_resumptions import AT_ONCE, LOADED_NONE, check_never_loaded, spans, submit, text_of, wait_over

STEPS = 30
# A tiny model, whose batches take a while to collate. KIND says what it resumes; as its documentation has it, the
# newest checkpoint.
TRAIN = """\
import os, signal, time
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

KIND, ATTEMPT = os.environ.get("KIND"), int(os.environ["HPC_GPT_ATTEMPT"])


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Rows(list):
    def __getitem__(self, row):
        time.sleep(0.1)
        tokens = [(7 * row + at) % 60 for at in range(16)]
        return {"input_ids": tokens, "labels": tokens}


class Fault(TrainerCallback):
    def on_step_begin(self, settings, state, control, **_):
        if state.global_step == {"never": 13 + ATTEMPT, "older": 17 * ATTEMPT}.get(KIND):
            die()
        if KIND == "half" and ATTEMPT == 1 and state.global_step == 19:
            TrainerState.save_to_json = die


settings = TrainingArguments(
    "out", num_train_epochs=1, per_device_train_batch_size=2, learning_rate=1e-2,
    logging_steps=5 if KIND is None else 1, save_steps=10 if KIND is None else 5, report_to="none", use_cpu=True,
    log_level=os.environ.get("LOG_LEVEL", "warning"),
)  # fmt: skip
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Rows(range(60)), callbacks=[Fault()])
newest = get_last_checkpoint("out") if os.path.isdir("out") else None
if KIND == "half":
    newest = os.environ["HPC_GPT_RESUME_FROM"]
elif KIND == "older" and newest:
    newest = f"out/checkpoint-{int(newest.rpartition('-')[2]) - 5}"
trainer.train(resume_from_checkpoint=None if KIND == "never" else newest or None)
"""
SCRIPT = "#!/bin/bash\n#SBATCH --job-name=fit -N 1 --ntasks=1 --time=9 {options}\n{line}\n"
APART = "--output=%x.out --error=%x.err"
SRUN, PLAIN = f"srun {sys.executable} train.py", f"{sys.executable} train.py"
# {name: (options of the script, its line)}: the bar goes to stderr, in the same file or in one of its own.
SCRIPTS = {"srun": ("--output=%x.out", SRUN), "apart": (APART, SRUN), "plain": (APART, PLAIN)}


def check_record(own: dict, of_log: dict, out: Path) -> None:
    """Each field that the log has is the record's, and the losses are those that the Trainer itself has kept."""
    stated = {key: value for key, value in of_log.items() if value is not None and key not in OF_THE_RUN}
    assert {key: own[key] for key in stated} == stated
    kept = json.loads((out / f"checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in kept if "loss" in entry]
    (attempt,) = own["attempts"]
    assert (own["ended"], own["cause"], attempt["last_step"]) == ("done", f"{STEPS} of {STEPS} steps", STEPS)
    assert math.isclose(own["loss_first"], losses[0], abs_tol=1e-3)
    assert math.isclose(own["loss_last"], losses[-1], abs_tol=1e-3)
    assert 0.2 <= own["step_s"] < 0.4
    assert not any("rests on" in flag for flag in own["flags"])


@pytest.mark.long(but="srun")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_record_of_a_trainer(launcher: Launcher, name: str) -> None:
    place = launcher.place(f"trainer-{name}")
    (place / "train.py").write_text(TRAIN)
    options, line = SCRIPTS[name]
    (place / "fit.sh").write_text(SCRIPT.format(options=options, line=line))
    job = launcher.submit("fit.sh", cwd=place)
    job.wait_end()
    of_log = record_of(launcher, *map(str, sorted(place.glob("fit.[oe]*"))))
    check_record(record_of(launcher, str(job.run.path)), of_log, place / "out")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["", APART])
def test_the_record_of_a_trainer_on_this_machine(tmp_path: Path, options: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fit.sh").write_text(SCRIPT.format(options=options, line=PLAIN))
    in_process("submit", "--cluster", "local", "--wait", "fit.sh", cwd=tmp_path, code=0)
    run = newest()
    logs = [tmp_path / "fit.out", tmp_path / "fit.err"]  # the names by which two files are one job's
    for log, own in zip(logs, run.attempts()[0].logs, strict=False):
        shutil.copy(own, log)
    logs = [log for log in logs if log.exists()]
    own, of_log = (
        json.loads(in_process("report", *names, "--json", code=0).stdout)["records"]
        for names in ([str(run.path)], logs)
    )
    check_record(own[0], of_log[0], tmp_path / "out")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["warning", "info"])
def test_a_finished_trainer_that_starts_once_more_is_done(tmp_path: Path, level: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("sleep(0.1)", "sleep(0)"))
    line = f"LOG_LEVEL={level} {PLAIN}"
    (tmp_path / "fit.sh").write_text(SCRIPT.format(options="", line=line))
    for _ in range(2):
        in_process("submit", "--cluster", "local", "--wait", "fit.sh", cwd=tmp_path, code=0)
    why = in_process("why", str(newest().path)).stdout
    assert (": done: 30 of 30 steps" if level == "info" else ": done: exit code 0") in why


@pytest.mark.long
@pytest.mark.timeout(900)
def test_which_starts_of_a_trainer_began_again(launcher: Launcher) -> None:
    place = launcher.place("trainers")
    jobs: dict[str, Job] = {}
    for kind in ("never", "older", "half"):
        pattern = () if kind == "never" else ("--checkpoints", "out/checkpoint-*")
        line = 'echo "given ${HPC_GPT_RESUME_FROM-unset}"; ' + f"KIND={kind} {SRUN}"
        (place / kind).mkdir()
        (place / kind / "train.py").write_text(TRAIN)
        jobs[kind] = submit(launcher, place / kind, line, *AT_ONCE, *pattern)
    for job in jobs.values():
        wait_over(job)
    check_never_loaded(launcher, jobs["never"], [14, 15, 16], LOADED_NONE)
    for kind, steps in (("older", [(1, 17), (11, 30)]), ("half", [(1, 20), (16, 30)])):
        assert (jobs[kind].ended(), spans(launcher, jobs[kind])) == (["error", "done"], steps), kind
        assert "again" not in text_of(launcher, "why", jobs[kind])
    assert re.findall("(?m)^given (.*)", jobs["half"].log()) == ["", "out/checkpoint-15"]
