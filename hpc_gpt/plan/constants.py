"""What data sheets do not say about a machine: a handful of figures that published steps or one's own records settle.

A default is for any machine of which only the data sheet is known; `fit` moves them to rows of one cluster. Each is a
share of a data sheet's rate, or seconds. `SPREAD` says how far one may lie from its default: the standard deviation of
its logarithm, which `fit` holds against the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hpc_gpt.errors import ConfigError


@dataclass(frozen=True)
class Constants:
    """`gemm`: large products over the peak. `memory`: passes over activations against memory bandwidth.

    `attention`: fused attention's rate over that of large products. `host_s`: what the host needs to launch one pass
    over one layer. `node`, `network`: what collectives reach of a link, in a node and between nodes. `latency`: times
    the links' latency a hop of a collective takes. `exposed`: the part of communication that could be hidden behind
    compute and is not. `reduction`: what reducing gradients and gathering sharded parameters reach of the network, when
    every node speaks. `step_s`: seconds of a step beside all that (data, logs, clipping's and scaling's stops).
    """

    gemm: float = 0.765
    memory: float = 0.88
    attention: float = 0.43
    host_s: float = 1.1e-3
    node: float = 0.75
    network: float = 0.75
    latency: float = 1.1
    exposed: float = 0.22
    reduction: float = 0.60
    step_s: float = 0.025


DEFAULT = Constants()
SPREAD = Constants(
    gemm=0.08,
    memory=0.15,
    attention=0.25,
    host_s=0.6,
    node=0.25,
    network=0.3,
    latency=0.6,
    exposed=0.6,
    reduction=1.0,
    step_s=0.8,
)


def constants_from(tables: Mapping[str, float]) -> Constants:
    """Constants as a profile stores them. Those this version does not know are left out, those it lacks are default's.

    ConfigError for one that is not above 0.
    """
    names = {entry.name for entry in fields(Constants)}
    known = {name: value for name, value in tables.items() if name in names}
    for name, value in known.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"calibration.constants.{name} is {value}, but must be above 0", "calibrate anew")
    return Constants(**known)
