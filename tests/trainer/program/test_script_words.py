"""Words after a job script: its own, unless they are options of the verb, which are refused there."""

from pathlib import Path

import pytest

from tests.cli.command import in_process
from tests.programs import ran

SCRIPT = '#!/bin/bash\n#SBATCH -N 1 --time=9\ntouch ran\nprintf "%s," "$@"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a b.slurm").write_text(SCRIPT)
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("HPC_GPT_CLUSTER", "generic-slurm")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ("--lr 1 --seed 2 --amp -x", "--lr,1,--seed,2,--amp,-x,"),
        ("-- --dry-run --cluster local", "--dry-run,--cluster,local,"),
        ("--lr 1 -- --json -- x", "--lr,1,--json,--,x,"),
        ("--", ","),
    ],
)
def test_other_words_and_all_after_dashes_are_the_scripts(place: Path, words: str, got: str) -> None:
    rendered = in_process("render", "--cluster", "local", "a b.slurm", *words.split(), cwd=place, code=0)
    (place / "job.sh").write_text(rendered.stdout)
    environment = {"HPC_GPT_RUN": str(place / "run"), "PATH": "/usr/bin:/bin"}
    (line,) = (each for each in rendered.stdout.splitlines() if "/slurm_script" in each and "<&3" in each)
    own = line.partition('slurm_script"')[2].partition(" <&3")[0]
    said = ran("bash", "-c", f'printf "%s," {own}', env=environment, code=0)
    assert said.stdout == got


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--dry-run", "--dry-run"),
        ("--dry-run", "--lr 1 --dry-run --dry-run x"),
        ("--cluster local --dry-run", "--cluster other --dry-run --lr a=1"),
        ("--dry-run --cluster=local", "--cluster=other"),
    ],
)
def test_an_option_before_the_script_too_is_the_scripts(place: Path, before: str, after: str) -> None:
    said = in_process("submit", *before.split(), "--script", "a b.slurm", *after.split(), cwd=place, code=0)
    assert f'slurm_script" {after} <&3' in said.stdout
    assert not (place / "logs").exists()
    # Another one is refused, as before.
    other = in_process("submit", *before.split(), "a b.slurm", *after.split(), "--json", cwd=place, code=2)
    assert "--json is after a b.slurm, so it would go to the script" in other.stderr


def test_usage_shows_the_scripts_words() -> None:
    for verb in ("submit", "render", "doctor"):
        assert f"Usage: hpc-gpt {verb} [OPTIONS] [EXPERIMENT] [ARGS]…\n" in in_process(verb, "--help").stdout
