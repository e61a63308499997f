"""hpc-gpt data and export: the files that a training reads, and those that others read of it"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from hpc_gpt.cli import completion
from hpc_gpt.cli.status import first_submit
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.run_folder import find_run

_DEMO_VOCAB = 256  # the demo reads bytes


@click.command()
@click.argument("source")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="The token file; NAME.tokens in this folder unless given."
)
@click.option("--tokenizer", default="byte", show_default=True, help="byte, char, a tokenizer.json, or tiktoken:NAME.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["tokens", "megatron"]),
    default="tokens",
    show_default=True,
    help="megatron: a pair of files, OUTPUT.bin and OUTPUT.idx.",
)
def data(source: str, output: Path | None, tokenizer: str, form: str) -> None:
    """Make a token file from SOURCE.

    SOURCE is a text file or a jsonl file, either also as .gz or .zst, a folder of these, or `stdlib`: the sources of
    the Python standard library on this machine. Tokenizer `char` writes its character table beside the token file.

    \b
    hpc-gpt data corpus.jsonl -o corpus.tokens
    hpc-gpt submit demo --set data.source=tokens --set data.path=corpus.tokens
    """
    from hpc_gpt.tokens.build import STDLIB, build_megatron, build_stdlib, build_tokens, stdlib_path
    from hpc_gpt.tokens.tokenizer import open_tokenizer

    if source == STDLIB and output is None and tokenizer == "byte" and form == "tokens":
        file = build_stdlib()
        click.echo(f"{stdlib_path()}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
        return
    name = Path(Path(source.rstrip("/")).name)
    if form == "megatron":
        path = output or name.with_suffix("")
        count, vocab = build_megatron(source, path, tokenizer), open_tokenizer(tokenizer).vocab
        click.echo(f"{path}.bin, {path}.idx: {count} tokens, tokenizer {tokenizer}")
    else:
        path = output or name.with_suffix(".tokens")
        file = build_tokens(source, path, tokenizer)
        vocab = file.vocab
        click.echo(f"{path}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
    settings = [f"data.source={form}", f"data.path={path}"]
    settings += [f"data.tokenizer={tokenizer}"] if tokenizer != "byte" else []
    settings += [f"model.vocab={vocab}"] if vocab > _DEMO_VOCAB else []
    click.echo(f"next: {first_submit(*settings)}", err=True)


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
