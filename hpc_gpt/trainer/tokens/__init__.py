"""Tokens: making them from text, their files, and which ones a run reads. No torch here."""
