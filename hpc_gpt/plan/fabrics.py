"""What joins GPUs, by the words that profiles and tables of measurements use: `infiniband 8x200G`, `nvlink`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.tables import close_matches, read_toml

_FILE = Path(__file__).with_name("fabrics.toml")
# Inside a node; the others join nodes.
_INSIDE = ("nvlink", "pcie")
_RATE = re.compile(
    r"(?<![\w.])(?:(\d{1,3}) ?[xX] ?)?(\d{1,5}(?:\.\d{1,3})?) ?([gGtT])(B?)(?:b|bit|bps|bE|ps|bit/s|b/s|/s)?(?!\w)"
)
_PORTS = re.compile(r"(?<![\w.])(?:(\d{1,3}) ?[xX] ?)?([A-Za-z]{2,8}\d{0,3})(?!\w)")


@dataclass(frozen=True)
class Fabric:
    """`network_gb_s` of a whole node in one direction (GB/s of 1e9 bytes), 0 where only the node's own links are named.

    `inside` is nvlink or pcie where the words name one, with `generation` if they tell it.
    """

    network_gb_s: float = 0.0
    network_latency_s: float = 0.0
    inside: str | None = None
    generation: int | None = None


@functools.cache
def parse_fabric(words: str) -> Fabric:
    """A fabric from `KIND NxRATEG` (ports of a node x Gbit/s of each), `KIND RATEG` (of the whole node), `nvlink`,
    `pcie`, or several of these with `+` between; ConfigError for what is none.

    >>> parse_fabric("omni-path 4x100G").network_gb_s
    50.0
    """
    fabric = Fabric()
    for part in re.split(r"[+,]", words.replace("\N{MULTIPLICATION SIGN}", "x")):
        kind, _, rate = part.strip().partition(" ")
        name, generation = _named(kind.lower().replace("_", "-"), words)
        if name in _INSIDE:
            fabric = Fabric(fabric.network_gb_s, fabric.network_latency_s, name, generation or fabric.generation)
        else:
            gb_s = _node_gb_s(name, rate, words)
            latency_s = float(_kinds()[name]["latency_s"])
            fabric = Fabric(fabric.network_gb_s + gb_s, latency_s, fabric.inside, fabric.generation)
    return fabric


def link_gb_s(inside: str, generation: int) -> float:
    """GB/s of one GPU in one direction over its NVLinks or 16 PCI Express lanes of that generation; ConfigError."""
    rates = _kinds()[inside]["generations"]
    if str(generation) not in rates:
        raise ConfigError(f"no {inside} generation {generation} is known", f"known: {', '.join(rates)}")
    return float(rates[str(generation)])


def link_latency_s(inside: str) -> float:
    """Seconds of one message between two GPUs of a node."""
    return float(_kinds()[inside]["latency_s"])


@functools.cache
def _kinds() -> dict[str, Any]:
    return read_toml(_FILE)


def _named(kind: str, words: str) -> tuple[str, int | None]:
    """(the kind's own name, the generation behind it if any)."""
    plain, digits = kind.rstrip("0123456789"), kind[len(kind.rstrip("0123456789")) :]
    for name, table in _kinds().items():
        if kind == name or kind in table.get("aliases", ()):
            return name, None
        if plain == name and name in _INSIDE:
            return name, int(digits[:3])
    known = list(_kinds())
    raise ConfigError(
        f"fabric {words!r:.80}: no kind {kind!r:.40} is known",
        close_matches(kind, known) or f'write KIND NxRATEG, as "infiniband 4x200G"; kinds: {", ".join(known)}',
    )


def _node_gb_s(name: str, rate: str, words: str) -> float:
    """By the first rate among the words behind the kind, else by the first name of one that the kind has."""
    numbers, names = _RATE.search(rate), _kinds()[name]["ports"]
    ports = next((found for found in _PORTS.finditer(rate) if found[2].lower() in names), None)
    if numbers:
        each = float(numbers[2]) * (1000 if numbers[3] in "tT" else 1) * (8 if numbers[4] else 1)
        gbit_s = int(numbers[1] or 1) * each
    elif ports:
        gbit_s = int(ports[1] or 1) * float(names[ports[2].lower()])
    else:
        gbit_s = 0.0
    if gbit_s <= 0:
        raise ConfigError(
            f"fabric {words!r:.80} tells no rate", f'give the ports of a node and their Gbit/s, as "{name} 4x200G"'
        )
    return gbit_s / 8
