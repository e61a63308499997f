"""Lines for the user on a run's data: source, tokens, epochs, and the shares of a mixture's sources."""

import shlex
from collections.abc import Iterator

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.format import Line, counted, show_short
from hpc_gpt.core.settings.data_source import MIX, mixture_shares, phase_steps
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.trainer.tokens.build import STDLIB_SHARDS, stdlib_length
from hpc_gpt.trainer.tokens.end_token import end_token
from hpc_gpt.trainer.tokens.run_data import data_path, file_if_made, is_stdlib, mixture_use, sources_alone, split_tokens
from hpc_gpt.trainer.tokens.shard_stream import list_shards
from hpc_gpt.trainer.tokens.sources import left_out_line
from hpc_gpt.trainer.tokens.tokenizer import BYTE, CHAR, ByteTokenizer, open_tokenizer, table_path


def describe_data(resolved: Resolved) -> tuple[Line, ...]:
    """Lines for the user on the data of a run that `ensure_data` has accepted: source, tokens, epochs in all steps, the
    token that ends a document if attention is masked; and a note if they use less than a tenth of the model's
    vocabulary."""
    evaluates = resolved.train.eval_every and engine_named(resolved.engine.name).writes_metrics
    lines = (*_lines(resolved), *(_bytes_notes(resolved) if evaluates else ()))
    if not resolved.data.mask_documents:
        return lines
    first, *others = lines
    end = end_token(resolved)
    return (Line(first.label, f"{first.text}; attention within documents, which token {end} ends"), *others)


def _lines(resolved: Resolved) -> tuple[Line, ...]:
    data, vocab = resolved.data, resolved.model.vocab
    if data.source == "random":
        random = Line("data", "random tokens, to measure speed; nothing is learnt from them")
        return () if runs_program(resolved) else (random,)
    if data.source == MIX:
        return _describe_mixture(resolved)
    path = data_path(resolved)
    assert path is not None
    what = "Python's own sources" if is_stdlib(data) else str(path)
    used: int | None = None
    if data.source == "stream":
        used = open_tokenizer(data.tokenizer).vocab
        made = list_shards(path, resolved) if path.exists() else None
        size = sum(made.sizes) if made else split_tokens(stdlib_length(), data.eval_fraction)
        shards = len(made.training) if made else STDLIB_SHARDS - int(STDLIB_SHARDS * data.eval_fraction)
        length = f"{counted(shards, 'shard')} to train on, about {size:,} bytes of text"
        if path.is_dir() and (left := left_out_line(path)):
            length += f" ({left})"
        samples = size / resolved.model.seq if data.tokenizer == BYTE else 0.0
        unknown = "the number of tokens is known only when they are read"
    else:
        file = file_if_made(resolved, path)
        count = stdlib_length() if file is None else len(file.tokens)
        # Megatron's files do not state their vocabulary.
        used = ByteTokenizer.vocab if is_stdlib(data) else file.vocab if file is not None and file.tokenizer else None
        training = split_tokens(count, data.eval_fraction)
        length, unknown = f"{training:,} tokens to train on", ""
        samples = (training - 1) // resolved.model.seq
    by = f" by tokenizer {data.tokenizer}" if used is not None else ""
    steps, global_batch = resolved.data_steps, resolved.batch.global_batch
    epochs = (
        f"{show_short(steps * global_batch / samples)} epochs in {counted(steps, 'step')} of "
        f"{counted(global_batch, 'sample')}"
        if samples
        else unknown
    )
    lines = [Line("data", f"{what}{by}, {length}; {epochs}")]
    if samples and 0 < data.max_epochs < (times := steps * global_batch / samples):
        hint = f"above data.max_epochs = {data.max_epochs:g} a model learns little from further repetitions"
        lines.append(Line("note", f"each token is read {show_short(times)} times: {hint}"))
    if used is None or 10 * used >= vocab:
        return tuple(lines)
    share = f"at most {used:,} different tokens, {100 * used / vocab:.2g} % of the model's vocabulary of {vocab:,}"
    hint = f"--set model.vocab={used} makes its embedding smaller, and hpc-gpt data makes tokens from other text"
    return (*lines, Line("note", f"the data have {share}; {hint}"))


def _bytes_notes(resolved: Resolved) -> Iterator[Line]:
    """Yields a note for each file of the evaluation that lacks the bytes of its tokens."""
    for alone in (sources_alone(resolved) or {"": resolved}).values():
        path, tokenizer = data_path(alone), alone.data.tokenizer
        if path is None or alone.data.source == "stream":
            continue
        if (file := file_if_made(alone, path)) is not None and file.token_bytes is None:
            made_with = {BYTE: "TOKENIZER", CHAR: str(table_path(path))}.get(tokenizer, tokenizer)
            adds = f"hpc-gpt data --bytes {shlex.quote(str(path))} {shlex.quote(made_with)}"
            yield Line("note", f"bpb is null without the bytes of each token: {adds} adds them")


def _describe_mixture(resolved: Resolved) -> tuple[Line, ...]:
    """A line on the whole mixture, and one per source: shares, tokens, epochs in all steps."""
    data, seq = resolved.data, resolved.model.seq
    assert data.mix is not None
    steps, global_batch = resolved.data_steps, resolved.batch.global_batch
    begins = phase_steps(data.phases, global_batch * seq)
    phases = [
        f"phase {number} from step {resolved.data_from + begin + 1:,} on"
        + (", which is not reached" if begin >= steps else "")
        for number, begin in enumerate(begins[1:], 2)
    ]
    in_steps = f"{steps * global_batch * seq:,} tokens in {counted(steps, 'step')} of {counted(global_batch, 'sample')}"
    lines = [Line("data", f"a mixture of {counted(len(data.mix), 'source')}, {'; '.join([in_steps, *phases])}")]
    shares = mixture_shares(data.mix, data.phases)
    for name, use in mixture_use(resolved).items():
        of_phases = ", then ".join(f"{float(100 * share[name]):.3g} %" for share in shares)
        epochs = f"{show_short(use.epochs)} epochs of {use.size * seq:,}"
        lines.append(Line("data", f"{name}: {of_phases}, {use.samples * seq:,} tokens, {epochs} in {use.path}"))
    return tuple(lines)
