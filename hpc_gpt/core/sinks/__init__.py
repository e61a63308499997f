"""The services that show the curves of a run: a module each, which opens a sink. The trainer uses them while it trains
(`[track]`), `report` for its exports. A library is imported when its sink is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.secrets import without_secrets
from hpc_gpt.core.tables import flat

# Figures of a step that are inversely proportional to its seconds.
FLOPS = ("tflops_seed", "tflops_hardware", "tflops_model")
# Keys of a line of metrics.jsonl, and of a record, with a figure of the evaluation for each source of a mixture.
BY_SOURCE = ("loss_eval_by", "bpb_by")
CurveRow = tuple[int, float, dict[str, float]]  # step, epoch seconds, {tag: figure}


@dataclass(frozen=True)
class ShownRun:
    """A run with all its restarts, as the services show it: by its `id` one of those of `group`."""

    id: str
    group: str
    title: str
    began: float  # epoch seconds
    settings: Mapping[str, bool | float | str]  # of `shown_settings`


class Sink(Protocol):
    """A service that is open for one run. Its methods may raise anything, and block."""

    def add(self, rows: Sequence[CurveRow]) -> None:
        """Shows rows by ascending step. Steps that are there already are replaced, or left out."""

    def close(self) -> None:
        """Returns when everything has arrived."""


def need_package(package: str) -> Any:
    """Imports a package and returns it. Raises UserError if it is missing or incomplete."""
    try:
        return import_module(package)
    except ImportError as fault:
        text = f"the curves need the package {package}, which is not installed: {fault}"
        raise UserError(text, f"pip install 'hpc-gpt[{package}]'") from None


def shown_settings(settings: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Settings under dotted keys, without secrets, in types that every service accepts."""
    known = {plain_text(key): value for key, value in flat(without_secrets(settings)).items() if value is not None}
    is_number = {key: isinstance(value, int | float) and abs(value) < 2**53 for key, value in known.items()}
    return {key: value if is_number[key] else plain_text(str(value))[:1000] for key, value in known.items()}


def source_tags(figures: Mapping[str, Any]) -> dict[str, float]:
    """{loss_eval_by/NAME: figure} for the BY_SOURCE of `figures`, without those that are not known."""
    known = ((key, name, value) for key in BY_SOURCE for name, value in (figures.get(key) or {}).items())
    return {f"{key}/{plain_text(name)}": value for key, name, value in known if value is not None}


def plain_text(text: str) -> str:
    """The text without characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
