"""hpc-gpt export"""

import os
import subprocess
import sys
from pathlib import Path

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.run_argument import chosen_run
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import check_package


@verb(170)
@click.argument("run", shell_complete=completers.runs)
def export(run: str, form: str, out: Path | None, dtype: str, step: int | None) -> None:
    """Write the weights of RUN for transformers.

    Writes the newest intact checkpoint as a folder with safetensors and config.json, which
    transformers.AutoModelForCausalLM.from_pretrained loads. The class is GPT-2, Llama, Mistral,
    Qwen2, Qwen3 or SmolLM3: the one that the run began from, if that has such a shape. The
    tokenizer's files are copied if data.tokenizer is a tokenizer.json. An export that is killed
    leaves .NAME.PID, which you may remove. Needs pip install 'hpc-gpt[train]'.
    """
    exported = chosen_run(run)
    engine_named(exported.resolved().engine.name).check_export()  # before torch is asked for
    for package in ("torch", "safetensors"):
        check_package(package, "the export")
    folder = out or Path(f"{exported.run_id}-{form}")
    # In another process: the launcher never imports torch.
    command = [sys.executable, "-m", "hpc_gpt.trainer.export", str(exported.path), str(folder), dtype]
    command += [] if step is None else [str(step)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)
