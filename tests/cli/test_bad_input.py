"""Bad input: one line and a hint, the documented exit code, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.api import submit
from hpc_gpt.core.errors import ConfigError
from tests.cli.command import error_of, in_process, without_slurm


def nothing_written() -> bool:
    return not Path(os.environ["HPC_GPT_LOGS"]).exists()


@pytest.mark.parametrize(("name", "what"), [("a\\b", "a backslash"), ("a\nb", "a newline")])
def test_a_logs_folder_that_sbatch_cannot_carry_is_refused(tmp_path, monkeypatch, name, what):
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / name))
    message, hint = error_of(in_process("submit", "demo", "--cluster", "generic-slurm", cwd=tmp_path, code=2))
    assert message.startswith("HPC_GPT_LOGS: ")
    assert f"holds {what}, which sbatch's --output cannot carry" in message
    assert "set HPC_GPT_LOGS" in hint
    assert not any(tmp_path.iterdir())


def test_a_guessed_profile_without_sbatch_may_all_but_queue(tmp_path):
    bare = without_slurm(tmp_path)
    message, hint = error_of(in_process("submit", "demo", environment=bare, code=2))
    assert "needs sbatch, which is not here" in message
    assert "local" in hint
    assert "hpc-gpt profile detect --name" in hint
    assert nothing_written()
    in_process("render", "demo", environment=bare, code=0)
    in_process("submit", "demo", "--dry-run", environment=bare, code=0)


def test_a_chosen_profile_without_sbatch_is_slurm_not_reachable(tmp_path):
    done = in_process("submit", "demo", "--cluster", "generic-slurm", environment=without_slurm(tmp_path), code=4)
    assert "no sbatch" in error_of(done)[0]
    assert nothing_written()


@pytest.mark.parametrize("group", [[], ["profile"]])
def test_nothing_given_shows_the_help_not_an_error(group):
    done = in_process(*group)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == in_process(*group, "--help").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "submit demo --cluster local --dry-run",
            1,
            "Error: the current folder was deleted\n\nhint: cd to a folder that",
        ),
        ("data stdlib -o x", 2, "hint: the current folder was deleted: cd to a folder that exists\n"),
    ],
)
def test_a_current_folder_that_was_deleted_is_named(tmp_path, words, code, said):
    (gone := tmp_path / "gone").mkdir()
    script = f"unset HPC_GPT_LOGS; rmdir '{gone}' && exec '{sys.executable}' -P -m hpc_gpt {words}"
    done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_json_and_python_have_each_fault_apart():
    settings = {"train.lr": -1.0, "data.workers": -1}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = in_process("submit", "demo", "--cluster", "local", "--json", *sets, code=2)
    told = json.loads(done.stderr.splitlines()[-1])
    assert [fault["keys"] for fault in told["faults"]] == [["data.workers"], ["train.lr"]]
    assert told["error"] == "\n".join(fault["message"] for fault in told["faults"])
    with pytest.raises(ConfigError) as refusal:
        submit("demo", settings, cluster="local")
    assert [fault.keys for fault in refusal.value.faults] == [("data.workers",), ("train.lr",)]
