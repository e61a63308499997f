"""Bad input: one line and a hint, the documented exit code, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import error_of, in_process, without_slurm
from tests.made_runs import unsubmitted_run


def nothing_written() -> bool:
    return not Path(os.environ["HPC_GPT_LOGS"]).exists()


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["demo", "--tp", "3"], "layout tp3-pp2-dp1 needs 6 GPUs (3 x 2 x 1 = 6), but there are 4", "--tp 2"),
        (["demo", "--gpus", "8", "--tp", "8", "--pp", "1"], "span nodes", "--allow-tp-across-nodes"),
        (["demo", "--gpus", "16", "--nodes", "2"], "2 nodes of 4 GPUs give 8", "--nodes 4"),
        (["demo", "--zero-stage", "2"], "pp 2 with ZeRO-2", "--zero-stage 1"),
        (["demo", "--pp", "8", "--gpus", "8", "--tp", "1"], "but the model has 4", "--pp 4"),
        (["demo", "--set", "model.heads=6", "--tp", "4", "--pp", "1"], "128 is not a multiple of heads 6", "divide"),
        (["demo", "--gbs", "33", "--mbs", "8"], "33 is not a multiple", "--global-batch-size 32"),
        (["demo", "--set", "train.stepz=3"], "unknown key train.stepz; did you mean steps", "help keys"),
        (["demo", "--set", "text=3"], "unknown key text; known here: name, model", "help keys"),
        (["demo", "--set", "trian.steps=3"], "your options: unknown key trian; did you mean train?", "help keys"),
        (["demo", "--set", "data=3"], "your options: data: input should be a table", "help keys"),
        (["demo", "--set", "train.zero_stage=1"], "train.zero_stage; did you mean engine.zero_stage?", "help keys"),
        (["demo", "--set", "train.steps"], "not KEY=VALUE", "train.steps=20"),
        (
            ["demo", "--set", "train.steps=many"],
            "train.steps: input should be a whole number, not the text",
            "help keys",
        ),
        (["demo", "--engine", "deepseed-3d"], "your options: engine.name: input should be", "help keys"),
        (["demo", "--set", "engine.compile=blok"], "or 'whole'; did you mean block?", "help keys"),
        (
            ["demo", "--set", "engine.partition=foo"],
            "'layers' or 'parameters', or input should be a list",
            "help keys",
        ),
        (["demo", "--set", "model.preset=gpt3"], "no model preset 'gpt3'", "gpt2"),
        (["dmo"], "no experiment 'dmo'", "did you mean demo?"),
        (["demo", "--cluster", "jeanzay"], "no cluster profile 'jeanzay'", "did you mean jean-zay"),
        (["demo", "--template", "nosuch.sh.j2"], "no template 'nosuch.sh.j2'", "base.sh.j2"),
        (["demo", "-t", "soon"], "job.time 'soon' is no time limit", "--set"),
        (["demo", "-J", "two\nlines"], "job.name holds a newline", "--set"),
        (["demo", "-n", "4"], "-n is sbatch's number of tasks", "-G 4"),
        (["demo", "--gpus", "four"], "'four' is not a valid integer", "--help"),
        (["demo", "--gpsu", "4"], "No such option", "--help"),
        (["demo", "--lr", "1e-4"], "No such option '--lr'.", "use --set train.lr=VALUE"),
    ],
)
@pytest.mark.parametrize("verb", ["render", "submit"])
def test_what_cannot_run_is_refused_before_anything_is_written(verb, arguments, message, hint, tmp_path):
    cluster = [] if verb == "render" or "--cluster" in arguments else ["--cluster", "generic-slurm"]
    done = in_process(verb, *arguments, *cluster, cwd=tmp_path)
    assert done.code == 2
    assert done.stdout == ""
    said, hinted = error_of(done)
    assert message in said
    assert hint in hinted
    assert nothing_written()
    assert not list(tmp_path.glob("*.*"))


@pytest.mark.parametrize(("name", "what"), [("a\\b", "a backslash"), ("a\nb", "a newline")])
def test_a_logs_folder_that_sbatchs_output_cannot_carry_is_refused_and_not_made(tmp_path, monkeypatch, name, what):
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / name))
    done = in_process("submit", "demo", "--cluster", "generic-slurm", cwd=tmp_path)
    assert done.code == 2
    message, hint = error_of(done)
    assert message.startswith("HPC_GPT_LOGS: ")
    assert f"holds {what}, which sbatch's --output cannot carry" in message
    assert "set HPC_GPT_LOGS" in hint
    assert not any(tmp_path.iterdir())


def test_a_syntax_error_is_named_with_file_and_line(tmp_path):
    (tmp_path / "bad.toml").write_text("[train]\nsteps = = 3\n")
    done = in_process("render", "bad.toml", cwd=tmp_path)
    assert done.code == 2
    assert "bad.toml" in error_of(done)[0]
    assert "line 2" in error_of(done)[0]


def test_all_faults_of_a_file_come_at_once(tmp_path):
    (tmp_path / "bad.toml").write_text('[train]\nstepz = 3\ndtype = "fp8"\n[modl]\n')
    message, _ = error_of(in_process("render", "bad.toml", cwd=tmp_path))
    assert len(message.splitlines()) == 3


def test_a_guessed_profile_without_sbatch_is_refused_only_when_a_job_would_queue(tmp_path):
    bare = without_slurm(tmp_path)
    done = in_process("submit", "demo", environment=bare)
    assert done.code == 2
    message, hint = error_of(done)
    assert "no sbatch here" in message
    assert "local" in hint
    assert "jean-zay-v100-32g" in hint
    assert nothing_written()
    assert in_process("render", "demo", environment=bare).code == 0
    assert in_process("submit", "demo", "--dry-run", environment=bare).code == 0


def test_a_chosen_profile_without_sbatch_is_slurm_not_reachable(tmp_path):
    done = in_process("submit", "demo", "--cluster", "generic-slurm", environment=without_slurm(tmp_path))
    assert done.code == 4
    assert "no sbatch" in error_of(done)[0]
    assert nothing_written()


def test_a_missing_token_file_is_refused_before_anything_starts(tmp_path):
    done = in_process(
        "submit", "demo", "--cluster", "local", "--set", "data.source=tokens", "--set", "data.path=no.tokens"
    )
    assert done.code == 2
    assert "no.tokens" in error_of(done)[0]
    assert nothing_written()


def test_a_run_whose_token_file_is_not_here_is_not_started_again(own_folders):
    run = unsubmitted_run(data__source="tokens", data__path="elsewhere.tokens")
    done = in_process("submit", "--resume", run.run_id)
    assert done.code == 2
    assert "elsewhere.tokens" in error_of(done)[0]
    assert not run.submissions()


@pytest.mark.parametrize("logs", ["/proc/runs", "/dev/null/runs"])
def test_a_logs_folder_that_cannot_be_written_is_a_failure(logs, tmp_path):
    arguments = ("submit", "demo", "--cluster", "local", "--set", "data.source=random")
    done = in_process(*arguments, environment={"HPC_GPT_LOGS": logs})
    assert done.code == 1
    assert logs in error_of(done)[0]


@pytest.mark.parametrize("verb", [["status"], ["logs"], ["cancel", "--yes"], ["submit", "--resume"]])
def test_an_unknown_run_is_exit_5(verb):
    done = in_process(*verb, "20260101-000000-abcd")
    assert done.code == 5
    assert "no run '20260101-000000-abcd'" in error_of(done)[0]


def test_an_unknown_verb_gets_a_close_match():
    done = in_process("stauts")
    assert done.code == 2
    assert "did you mean status?" in error_of(done)[1]


@pytest.mark.parametrize("group", [[], ["profile"]])
def test_nothing_given_shows_the_help_not_an_error(group):
    done = in_process(*group)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == in_process(*group, "--help").stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("demo",), "EXPERIMENT would be another"),
        (("--smoke",), "--smoke would be another"),
        (("--gpus", "8"), "has no checkpoint to resume from"),
    ],
)
def test_what_a_resumed_run_cannot_take(made_run, options, said):
    done = in_process("submit", "--resume", made_run.run_id, *options)
    assert done.code == 2
    assert said in error_of(done)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlr = 1e-4\n  steps = 5\n  steps = 6\n", "steps is given twice (at line 4, column 3)"),
        ("[train]\nsteps = 5\n[job]\n[train] # again\nlr = 1e-4\n", "[train] is given twice (at line 4, column 1)"),
        ("data = {path = 'a', path = 'b'}\n", "path is given twice (at line 1, column 1)"),
        ("name = 'a'\nname = ['b',\n'c']\n", "name is given twice (at line 2, column 1)"),
    ],
)
def test_a_key_given_twice_in_a_file_is_said_with_its_place(tmp_path, text, words):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    done = in_process("render", file)
    assert (done.code, error_of(done)) == (2, (f"{file}: {words}", "keep one of them"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "submit demo --cluster local --dry-run",
            1,
            "Error: the current folder was deleted\n\nhint: cd to a folder that",
        ),
        ("data stdlib -o x", 2, "hint: the current folder was deleted: cd to a folder that is there\n"),
    ],
)
def test_a_current_folder_that_was_deleted_is_named(tmp_path, words, code, said):
    (gone := tmp_path / "gone").mkdir()
    script = f"unset HPC_GPT_LOGS; rmdir '{gone}' && exec '{sys.executable}' -P -m hpc_gpt {words}"
    done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
