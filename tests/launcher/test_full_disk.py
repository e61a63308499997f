"""What job.sh does at a start on a full disk: bash runs that part of it; Slurm's clients and python are stand-ins."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.render import render_script
from tests.programs import put, ran
from tests.trainer.filling import fill

PYTHON = """#!/bin/bash
case "$2" in
hpc_gpt.launcher.attempts.notify) exit 1 ;;
*) echo "hpc-gpt-next $ANSWER" ;;
esac
"""


class Script:
    """A script's functions, in a bash that writes here-documents to files in `disk`, as each before 5.1 does."""

    def __init__(self, tmp_path: Path, disk: Path, chain: str = "requeue") -> None:
        keys = {"notify.command": ["true"]}
        resolved = resolve(load_experiment("demo", keys), replace(load_profile("generic-slurm"), chain=chain))
        self.text = render_script(resolved)
        clients = tmp_path / "clients"
        for name, text in {"python": PYTHON, **dict.fromkeys(("squeue", "sacct", "scancel"), "#!/bin/bash\n")}.items():
            put(clients / name, text)
        (disk / "run").mkdir()
        self.environment = {
            "PATH": f"{clients}:{os.environ['PATH']}", "TMPDIR": str(disk), "BASH_COMPAT": "50", "SLURM_JOB_ID": "7",
            "HPC_GPT_RUN": str(disk / "run"), "n": "1", "attempt": str(disk / "run"), "HPC_GPT_JOB": "7",
        }  # fmt: skip

    def run(self, *lines: str, **more: str) -> subprocess.CompletedProcess[str]:
        functions = self.text[self.text.index("# === ") : self.text.rindex("\nmain\n")]
        part = "\n".join(["set -o pipefail", functions, "python=(python)", *lines])
        (script := Path(self.environment["PATH"].partition(":")[0]) / "job.sh").write_text(part)
        return ran("bash", script, env=self.environment | more)


@pytest.mark.parametrize("chain", ["requeue", "singleton", "none"])
def test_a_refused_start_ends_whatever_fails(tmp_path: Path, small_disk: Path, chain: str) -> None:
    script = Script(tmp_path, small_disk, chain)
    fill(small_disk)
    done = script.run("ask_to_start", "echo the ranks start", ANSWER="stop 3 8,9")
    assert (done.returncode, done.stdout) == (3, "notify: its process ended with exit code 1\n"), done.stderr
    for port in ("1700000000 12345", "- 12345", "-"):
        go = script.run("ask_to_start", 'echo "$HPC_GPT_STOP_AT $MASTER_PORT"', ANSWER=f"go {port}")
        assert go.stdout.strip() == port


def test_a_second_start_finds_the_script_and_settings_there(tmp_path: Path, small_disk: Path) -> None:
    script = Script(tmp_path, small_disk)
    lines = ("make_run_folder", "echo made")
    first = script.run(*lines)
    assert first.stdout == "made\n", first.stderr
    fill(small_disk)
    second = script.run(*lines)
    assert (second.returncode, second.stdout, second.stderr) == (0, "made\n", "")
    (small_disk / "run" / "resolved.json").unlink()
    (small_disk / "run" / "job.sh").write_bytes(b"")
    assert re.match(r"Error: HPC_GPT_RUN names the run of another script", script.run(*lines).stderr)


def test_no_part_of_a_script_needs_a_file_for_a_text() -> None:
    """A here-string is a file in bash before 5.1."""
    for keys in ({}, {"notify.command": ["true"], "after.run": "true", "track.tensorboard": True}):
        for changes in ({}, {"chain": "singleton"}, {"stage": "/env.tar"}, {"stage": "warm"}):
            script = render_script(
                resolve(load_experiment("demo", keys), replace(load_profile("generic-slurm"), **changes))
            )
            assert "<<<" not in script
