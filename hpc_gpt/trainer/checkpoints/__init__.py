"""Checkpoints: written whole or not at all, checked, and loaded again, also at another layout."""
