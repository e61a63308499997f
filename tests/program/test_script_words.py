"""Words after a job script: its own, unless they are options of the verb, which are refused there."""

import subprocess
from pathlib import Path

import pytest

from tests.cli.command import error_of, in_process

SCRIPT = '#!/bin/bash\n#SBATCH -N 1 --time=9\ntouch ran\nprintf "%s," "$@"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a b.slurm").write_text(SCRIPT)
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("HPC_GPT_CLUSTER", "generic-slurm")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "of_verb", "of_script"),
    [
        ("submit F --dry-run", "submit --dry-run F", "submit F -- --dry-run"),
        ("submit F --cluster local", "submit --cluster local F", "submit F -- --cluster local"),
        ("submit F --cluster=local", "submit --cluster=local F", "submit F -- --cluster=local"),
        ("submit --dry-run F --script", "submit --dry-run --script F", "submit --dry-run F -- --script"),
        ("submit -t 7 F --lr 1 --here x", "submit -t 7 --here F --lr 1 x", "submit -t 7 F -- --lr 1 --here x"),
        (
            "submit F a --max-gpu-hours 3 --dry-run -- b",
            "submit --max-gpu-hours 3 --dry-run F a -- b",
            "submit F -- a --max-gpu-hours 3 --dry-run b",
        ),
        ("doctor F --json", "doctor --json F", "doctor F -- --json"),
        ("render F --cluster local", "render --cluster local F", "render F -- --cluster local"),
        ("rehearse F --cluster local", "rehearse --cluster local F", "rehearse F -- --cluster local"),
    ],
)
def test_a_verbs_option_after_the_script_is_refused_twice_put(place, line, of_verb, of_script):
    message, hint = error_of(in_process(*(word.replace("F", "a b.slurm") for word in line.split()), cwd=place, code=2))
    assert "is after a b.slurm, so it would go to the script: nothing was done" in message
    spelled = [f"hpc-gpt {each}".replace("F", "'a b.slurm'") for each in (of_verb, of_script)]
    assert hint == " or for the script: ".join((f"{spelled[0]},", spelled[1]))
    assert [path.name for path in place.iterdir()] == ["a b.slurm"]


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ("--lr 1 --seed 2 --force --json --wait", "--lr,1,--seed,2,--force,--json,--wait,"),
        ("-- --dry-run --cluster local", "--dry-run,--cluster,local,"),
        ("--lr 1 -- --here -- x", "--lr,1,--here,--,x,"),
        ("--", ","),
    ],
)
def test_other_words_and_all_after_dashes_are_the_scripts(place: Path, words: str, got: str) -> None:
    rendered = in_process("render", "--cluster", "local", "a b.slurm", *words.split(), cwd=place, code=0)
    (place / "job.sh").write_text(rendered.stdout)
    environment = {"HPC_GPT_RUN": str(place / "run"), "PATH": "/usr/bin:/bin"}
    (line,) = (each for each in rendered.stdout.splitlines() if "/slurm_script" in each and "<&3" in each)
    own = line.partition('slurm_script"')[2].partition(" <&3")[0]
    said = subprocess.run(
        ["bash", "-c", f'printf "%s," {own}'], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == got


def test_usage_shows_the_scripts_words() -> None:
    for verb in ("submit", "rehearse", "render", "doctor"):
        assert f"Usage: hpc-gpt {verb} [OPTIONS] [EXPERIMENT] [ARGS]…\n" in in_process(verb, "--help").stdout
