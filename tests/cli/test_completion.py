"""Completion: the scripts of three shells are fit for them, and TAB offers verbs, experiments, profiles, runs, keys."""

import os
import shutil
import subprocess

import pytest

from tests.cli.command import hpc_gpt, in_process


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_the_shell_can_read(shell):
    script = hpc_gpt("completion", shell, code=0)
    assert "_HPC_GPT_COMPLETE" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read its completion script")
    done = subprocess.run([shell, "-n"], input=script.stdout, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def offered(*words: str) -> list[str]:
    """What bash would be offered for the last of the words."""
    environment = {"_HPC_GPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["hpc-gpt", *words]),
                   "COMP_CWORD": str(len(words))}  # fmt: skip
    done = in_process(environment=environment)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_and_options():
    assert offered("re") == ["render", "requeue", "report"]
    assert "--pipeline-model-parallel-size" in offered("submit", "--pi")


def test_experiments():
    assert offered("submit", "memory-l") == ["memory-l", "memory-ladder"]
    assert {"demo", "gpt2-meg-ds-3d"} < set(offered("render", ""))
    assert not any("object" in name for name in offered("render", ""))


def test_experiments_of_this_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.toml", "mine $(too).toml", "mine.tokens"):
        (tmp_path / name).touch()
    assert offered("submit", "mi") == ["mi", "mingpt-fsdp", "mine.toml"]


def test_what_report_takes(made_run):
    assert offered("report", "memory") == ["memory", "memory-ladder", "memory-techniques"]
    assert offered("report", made_run.run_id[:6]) == [made_run.run_id[:6], made_run.run_id]
    assert "bench" not in offered("report", ""), "an experiment without rows"


@pytest.mark.parametrize("verb", ["report", "compare", "why"])
def test_where_a_log_may_be_named_the_shell_completes_files(verb):
    environment = {"_HPC_GPT_COMPLETE": "bash_complete", "COMP_WORDS": f"hpc-gpt {verb} ./lo", "COMP_CWORD": "2"}
    assert in_process(environment=environment).stdout.split() == ["file,./lo"]


def test_profiles():
    assert offered("submit", "--cluster", "jean") == ["jean-zay-v100-16g", "jean-zay-v100-32g"]
    assert offered("profile", "show", "lo") == ["local"]


def test_keys():
    assert offered("submit", "--set", "train.st") == ["train.steps="]


def test_values():
    assert offered("plan", "--engine", "deepspeed-") == ["deepspeed-3d", "deepspeed-zero"]
    assert offered("plan", "--recompute", "") == ["none", "selective", "full"]
    assert (offered("submit", "--model", "gpt2-x"), offered("submit", "--tp", "")) == (["gpt2-xl"], [])
    assert offered("bench", "--engines", "ddp,fs") == ["ddp,fsdp"]


def test_runs(made_run):
    for verb in ("status", "logs", "cancel"):
        assert offered(verb, made_run.run_id[:6]) == [made_run.run_id]
    assert offered("submit", "--resume", "") == [made_run.run_id, "demo"]


def test_no_runs_is_no_fault():
    assert not os.path.exists(os.environ["HPC_GPT_LOGS"])
    assert offered("status", "") == []
