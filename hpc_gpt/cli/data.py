"""hpc-gpt data"""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click


@click.command()
@click.argument("source")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The token file; by default NAME.tokens here.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, char, a tokenizer.json, or tiktoken:NAME.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["tokens", "megatron"]),
    default="tokens",
    show_default=True,
    help="megatron: its pair of files, OUTPUT.bin and OUTPUT.idx.",
)
def data(source: str, output: Path | None, tokenizer: str, form: str) -> None:
    """Make a token file from SOURCE.

    SOURCE is a text file, a jsonl file, either by gzip or Zstandard, a folder of them, or `stdlib`, which is the
    Python standard library's own sources on this machine. Tokenizer `char` writes its table beside the token file.

    \b
    hpc-gpt data corpus.jsonl -o corpus.tokens
    hpc-gpt submit --set data.source=tokens --set data.path=corpus.tokens
    """
    from hpc_gpt.tokens.build import STDLIB, build_megatron, build_stdlib, build_tokens, stdlib_path

    if source == STDLIB and output is None and tokenizer == "byte" and form == "tokens":
        file = build_stdlib()
        click.echo(f"{stdlib_path()}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
        return
    name = Path(Path(source.rstrip("/")).name)
    if form == "megatron":
        path = output or name.with_suffix("")
        count = build_megatron(source, path, tokenizer)
        click.echo(f"{path}.bin, {path}.idx: {count} tokens, tokenizer {tokenizer}")
    else:
        path = output or name.with_suffix(".tokens")
        file = build_tokens(source, path, tokenizer)
        click.echo(f"{path}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
    words = "" if tokenizer == "byte" else f" --set {quote(f'data.tokenizer={tokenizer}')}"
    click.echo(f"next: hpc-gpt submit --set data.source={form} --set {quote(f'data.path={path}')}{words}", err=True)
