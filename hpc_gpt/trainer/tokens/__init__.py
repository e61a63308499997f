"""Tokens: tokenizers, token files, and the samples that a run reads. No torch here."""
