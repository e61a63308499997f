"""Tokens: how they are made from text, what holds them, and which ones a run reads. No torch here."""

from __future__ import annotations

from hpc_gpt.tokens.build import build_stdlib, build_tokens, stdlib_path
from hpc_gpt.tokens.run_data import data_path, ensure_data, located
from hpc_gpt.tokens.token_file import TokenFile, open_tokens

__all__ = [
    "TokenFile",
    "build_stdlib",
    "build_tokens",
    "data_path",
    "ensure_data",
    "located",
    "open_tokens",
    "stdlib_path",
]
