"""Checkpoints: whole or not at all, checked, and taken up again, also by another layout."""
