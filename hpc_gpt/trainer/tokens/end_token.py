"""The token that ends a document, which `data.mask_documents` needs to keep documents apart."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.rules.data import SET_END_TOKEN
from hpc_gpt.trainer.tokens.sources import file_pieces
from hpc_gpt.trainer.tokens.token_file import LOOK_AT_ONCE, LOOK_TOKENS, parts_looked_at
from hpc_gpt.trainer.tokens.tokenizer import CHAR, CharTokenizer, open_tokenizer

_SET_IT = f"{SET_END_TOKEN}, or data.mask_documents = false"


def end_token(resolved: Resolved) -> int | None:
    """The number of the end token: data.end_token, or the tokenizer's. None unless the run masks documents.

    Raises DataError if there is none, or it is not in the model's vocabulary.
    """
    data, vocab = resolved.data, resolved.model.vocab
    if not data.mask_documents:
        return None
    end = data.end_token
    if end is None:
        # The table of characters is beside the token file, so it is not opened here.
        end = CharTokenizer.end if data.tokenizer == CHAR else open_tokenizer(data.tokenizer).end
    if end is None:
        raise DataError(
            f"data.mask_documents is true, but tokenizer {data.tokenizer} has no token that ends a document", _SET_IT
        )
    if not 0 <= end < vocab:
        raise DataError(f"the end token is {end}, but the model's vocabulary has tokens 0 to {vocab - 1}", _SET_IT)
    return end


def check_end_token(resolved: Resolved, tokens: NDArray[Any], where: Path) -> None:
    """Raises DataError if the run masks documents, and its end token is not among the `tokens` [count] of a file."""
    end = end_token(resolved)
    if end is not None and not any((np.asarray(part) == end).any() for _, part in parts_looked_at(tokens)):
        _refuse(end, f"{min(len(tokens), LOOK_TOKENS):,} tokens of {where}")


def check_end_of_stream(resolved: Resolved, shard: Path) -> None:
    """Raises DataError if the run masks documents, and its end token is not among the first tokens of a `shard`. The
    tokenizer's own end token always passes, as the stream writes it after each document."""
    end, tokenizer = end_token(resolved), open_tokenizer(resolved.data.tokenizer, resolved.data.begin_token)
    if end in (None, tokenizer.end):
        return
    count = 0
    for tokens in tokenizer.encode(file_pieces(shard), str(shard)):
        if (tokens == end).any():
            return
        count += len(tokens)
        if count >= LOOK_AT_ONCE:
            break
    _refuse(end, f"the first {count:,} tokens of {shard}")


def _refuse(end: int | None, what: str) -> None:
    raise DataError(f"data.mask_documents is true, but none of {what} is the end token {end}", _SET_IT)
