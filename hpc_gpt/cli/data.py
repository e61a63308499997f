"""hpc-gpt data"""

from pathlib import Path

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.run_argument import first_submit
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.format import counted, plain
from hpc_gpt.core.terminal import say, shows_life

_DEMO_VOCAB = 256  # the demo reads bytes


@verb(15)
@click.argument("source", shell_complete=completers.files)
def data(
    source: str, output: Path | None, tokenizer: str, form: str, text_key: str, begin_token: bool, bytes_of: Path | None
) -> None:
    """Make a token file from SOURCE.

    SOURCE is a text file or a jsonl file, either also as .gz or .zst, a Parquet file, a folder of these, or `stdlib`:
    the sources of the Python standard library on this machine. Tokenizer `char` writes its character table beside the
    token file.

    \b
    hpc-gpt data corpus.jsonl -o corpus.tokens
    hpc-gpt submit demo --set data.source=tokens --set data.path=corpus.tokens
    """
    from hpc_gpt.trainer.tokens.build import STDLIB, build_megatron, build_stdlib, build_tokens
    from hpc_gpt.trainer.tokens.sources import DocumentCount, check_text, text_files
    from hpc_gpt.trainer.tokens.token_file import stdlib_path
    from hpc_gpt.trainer.tokens.tokenizer import BYTE, open_tokenizer

    if bytes_of is not None:
        from hpc_gpt.trainer.tokens.run_data import add_token_bytes

        say(f"{add_token_bytes(bytes_of, source)}: the bytes of text of each token, for bits per byte (bpb)")
        return
    if source == STDLIB and output is None and tokenizer == BYTE and form == "tokens" and not begin_token:
        with shows_life("making the standard library's token file"):
            file = build_stdlib()
        say(f"{stdlib_path()}: {len(file.tokens)} tokens, vocabulary {file.vocab}, tokenizer {file.tokenizer}")
        return
    for path in text_files(Path(source), parquet=True) if source != STDLIB else []:
        if warning := check_text(path):
            say(plain(warning), err=True)
    name, documents = Path(Path(source.rstrip("/")).name), DocumentCount()
    path = output or name.with_suffix("" if form == "megatron" else ".tokens")
    with shows_life(f"making {path}", lambda: counted(documents.documents, "document")):
        if form == "megatron":
            count = build_megatron(source, path, tokenizer, begin_token, documents, text_key)
            vocab = open_tokenizer(tokenizer).vocab
            made = f"{path}.bin, {path}.idx: {count} tokens, tokenizer {tokenizer}"
        else:
            file = build_tokens(source, path, tokenizer, begin_token, documents, text_key)
            vocab = file.vocab
            made = f"{path}: {len(file.tokens)} tokens, vocabulary {vocab}, tokenizer {file.tokenizer}"
    say(made)
    for line in _files_lines(Path(source)) if source != STDLIB else []:
        say(line, err=True)
    if documents.empty:
        say(f"{counted(documents.documents, 'document')}, {documents.empty:,} of them without text", err=True)
    if tokenizer == BYTE and source != STDLIB:
        bytes_alone = f"each byte is a token, {_DEMO_VOCAB} in all"
        click.echo(f"note: {bytes_alone}; --tokenizer takes a model's tokenizer.json", err=True)
    settings = [f"data.source={form}", f"data.path={path}"]
    settings += [f"data.tokenizer={tokenizer}"] if tokenizer != "byte" else []
    settings += [f"model.vocab={vocab}"] if vocab > _DEMO_VOCAB else []
    click.echo(f"next: {first_submit(*settings)}", err=True)


def _files_lines(folder: Path) -> list[str]:
    """The lines on the files of a folder: those that were read, and those left out with the reason. None for a file."""
    if not folder.is_dir():
        return []
    from hpc_gpt.trainer.tokens.sources import left_out_line, listed_files, names_line

    taken = [str(path.relative_to(folder)) for path, why in listed_files(folder, parquet=True) if not why]
    return [*filter(None, (f"read: {names_line(taken)}", left_out_line(folder, parquet=True)))]
