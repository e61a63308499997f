"""job.sh of a local run, started by hand under a Python that will not do: one line and a hint, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.launch.render import render_script


def start(tmp_path: Path, inside: Path) -> subprocess.CompletedProcess[str]:
    """Starts the demo's script under a Python that finds the modules in `inside` first."""
    script = tmp_path / "job.sh"
    script.write_text(render_script(resolve(load_experiment("demo"), load_profile("local"))))
    environment = os.environ | {"HPC_GPT_PYTHON": sys.executable, "HPC_GPT_RUN": str(tmp_path / "run")}
    environment["PYTHONPATH"] = str(inside)
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)


def test_a_python_without_submitit_is_named(tmp_path):
    (inside := tmp_path / "inside").mkdir()
    (inside / "submitit.py").write_text("raise ModuleNotFoundError('No module named submitit', name='submitit')\n")
    done = start(tmp_path, inside)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"Error: {sys.executable} lacks submitit, which a run on this machine needs\n\nhint: " in done.stderr
    assert "HPC_GPT_PYTHON=PYTHON bash job.sh" in done.stderr
