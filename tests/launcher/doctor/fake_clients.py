"""Slurm's clients that print what a test says."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest


def fake_clients(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, str]) -> Path:
    """Puts scontrol, sinfo and sacctmgr into the PATH of ada. Returns the folder of what they print, a file each by
    their words; they know no other ones."""
    for name in ("scontrol", "sinfo", "sacctmgr"):
        (folder / name).write_text(f'#!/bin/bash\ncat "{folder}/answers/${{0##*/}} $*" || exit 1\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    (printed := folder / "answers").mkdir()
    for words, text in answers.items():
        (printed / words).write_text(text)
    return printed
