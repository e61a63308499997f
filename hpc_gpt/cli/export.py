"""`hpc-gpt export`: a run's weights for other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from hpc_gpt.cli import completion
from hpc_gpt.paths import logs_folder
from hpc_gpt.runs.run_folder import find_run


@click.command()
@click.argument("run", shell_complete=completion.runs)
@click.option("--format", "form", type=click.Choice(["hf"]), default="hf", show_default=True, help="What to write.")
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), help="The new folder; RUN-hf in this folder unless given."
)
@click.option("--step", type=int, help="The checkpoint of this step; the newest unless given.")
def export(run: str, form: str, out: Path | None, step: int | None) -> None:
    """Write the weights of RUN for transformers.

    Writes the newest intact checkpoint as a folder with safetensors and config.json, which
    transformers.AutoModelForCausalLM.from_pretrained loads as GPT-2. Needs pip install 'hpc-gpt[hf]'.
    """
    found = find_run(run, logs_folder())
    folder = out or Path(f"{found.run_id}-{form}")
    # In another process: the launcher never imports torch.
    command = [sys.executable, "-m", "hpc_gpt.train.export", str(found.path), str(folder)]
    command += [] if step is None else [str(step)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)
