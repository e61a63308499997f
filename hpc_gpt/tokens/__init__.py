"""Tokens: how they are made from text, what holds them, and which ones a run reads. No torch here."""
