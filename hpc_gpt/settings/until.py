"""`--until tokens=30e9`, `steps=N`, `loss=X`: how far a run is to train, as settings of [train]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.batch import Batch

_FORMS = "--until tokens=30e9, --until steps=5000 or --until loss=2.9"
_MOST = 10**12  # steps that no run takes: what is above is a slip


@dataclass(frozen=True)
class Until:
    """What was asked for; None for what was not. Of `steps` and `tokens` one at most is given."""

    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None

    def settings(self, batch: Batch, seq: int) -> dict[str, Any]:
        """The keys of [train] that it settles, for a run of this batch and sequence length."""
        steps = self.steps
        if self.tokens is not None:
            steps = -(-self.tokens // (batch.global_batch * seq))
            if steps > _MOST:
                raise ConfigError(f"{self.tokens:g} tokens are {steps:g} steps of {batch.global_batch} x {seq}", _FORMS)
        return ({} if steps is None else {"steps": steps}) | ({} if self.loss is None else {"until_loss": self.loss})

    def words(self, batch: Batch, seq: int) -> str:
        """What the settings mean, for the user."""
        said = []
        if self.tokens is not None:
            each = batch.global_batch * seq
            steps = -(-self.tokens // each)
            said.append(
                f"{self.tokens:,} tokens are {steps:,} steps of {batch.global_batch} x {seq} = {each:,} tokens each"
            )
        elif self.steps is not None:
            said.append(f"{self.steps:,} steps, {self.steps * batch.global_batch * seq:,} tokens")
        if self.loss is not None:
            said.append(f"until the loss is {self.loss:g} or less")
        return ", ".join(said)


def parse_until(texts: Sequence[str]) -> Until:
    """The wishes of one command line. Raises ConfigError for what is no wish, or two that contradict each other."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or name not in ("tokens", "steps", "loss"):
            raise ConfigError(f"--until {text!r} is none of tokens=, steps= and loss=", f"for example {_FORMS}")
        if name in found:
            raise ConfigError(f"--until {name}= is given twice", "leave one out")
        found[name] = _number(name, raw)
    if {"tokens", "steps"} <= set(found):
        raise ConfigError(
            f"--until steps={found['steps']:.0f} and tokens={found['tokens']:g} both say when to end",
            "give one of the two",
        )
    steps, tokens = (None if name not in found else int(found[name]) for name in ("steps", "tokens"))
    return Until(steps, tokens, found.get("loss"))


def check_against(until: Until, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """ConfigError where `settings`, those of `until`, contradict what else the command line gives (dotted key ->
    value)."""
    for key, value in settings.items():
        other = given.get(f"train.{key}")
        if other is not None and other != value:
            asked = "tokens" if key == "steps" and until.tokens is not None else {"until_loss": "loss"}.get(key, key)
            raise ConfigError(
                f"--until {asked}={getattr(until, asked):g} means train.{key} = {value:g}, but the command line also "
                f"gives train.{key} = {other}",
                "leave one out",
            )


def _number(name: str, raw: str) -> float:
    """A count above 0, whole for steps and tokens (`30e9` and `30_000` are), or a loss above 0."""
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    whole = name == "loss" or value == math.floor(value) if math.isfinite(value) else False
    if not whole or value <= 0 or (name == "steps" and value > _MOST):
        kind = "a loss above 0" if name == "loss" else f"a whole number of {name} above 0"
        raise ConfigError(f"--until {name}={raw} is not {kind}", f"for example {_FORMS}")
    return value
