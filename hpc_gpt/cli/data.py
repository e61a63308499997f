"""hpc-gpt data"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("source")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The token file; by default NAME.tokens here.")
@click.option("--tokenizer", default="byte", show_default=True, help="What cuts text into tokens.")
def data(source: str, output: Path | None, tokenizer: str) -> None:
    """Make a token file from SOURCE.

    SOURCE is a text file, a jsonl file, a folder of them, or `stdlib`, which is the Python standard library's own
    sources on this machine.

    \b
    hpc-gpt data corpus.jsonl -o corpus.tokens
    hpc-gpt submit --set data.source=tokens --set data.path=corpus.tokens
    """
    from hpc_gpt.errors import DataError
    from hpc_gpt.tokens.build import build_stdlib, build_tokens, stdlib_path

    if source == "stdlib":
        path = output or stdlib_path()
        if output is not None and output.exists():
            raise DataError(f"{output} is there already", "give another name, or remove it first")
        file = build_stdlib(path)
    else:
        path = output or Path(Path(source.rstrip("/")).name).with_suffix(".tokens")
        file = build_tokens(source, path, tokenizer)
    click.echo(f"{path}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
    if source != "stdlib":
        click.echo(f"next: hpc-gpt submit --set data.source=tokens --set data.path={path}", err=True)
