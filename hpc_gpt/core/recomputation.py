"""`engine.recompute`: the activations that the backward pass computes again, as a word, a share of the layers such as
1/4, or a list of modules such as layernorm,moe_act."""

import contextlib
import re
from functools import lru_cache
from typing import Literal, NamedTuple

from hpc_gpt.core.errors import ConfigError

# A word, a share as text, or modules separated by commas; `recomputation` reads it.
Recompute = Literal["none", "selective", "full"] | str
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")

# {module of Megatron-Core: our names of the linear layers that it computes again}, as `LayerKind.products` has them.
# Source: megatron/core/transformer/transformer_config.py, recompute_modules (main of August 2026). Those that a GPT
# does not have are left out (gdn_norm_out, gdp_in_proj, gdp_qkv, mhc).
_SHARED_EXPERTS = ("shared_gate", "shared.up", "shared.down")
MODULES: dict[str, tuple[str, ...]] = {
    "core_attn": (),
    "layernorm": (),
    "mla_up_proj": ("attention.q_b", "attention.kv_b"),
    "mlp": ("feed_forward.up", "feed_forward.down"),
    "moe": ("router", *_SHARED_EXPERTS, "experts.up", "experts.down"),
    "moe_act": (),
    "shared_experts": _SHARED_EXPERTS,
}
_SHARE = re.compile(r"([1-9]\d{0,2})/([1-9]\d{0,2})")
_HINT = "use none, selective or full, a share of the layers such as 1/4, or modules such as layernorm,moe_act"


class Recomputation(NamedTuple):
    """`share`: the share of the layers that are computed again as a whole. `modules`: what is computed again in every
    layer that has it; selective is attention's core."""

    share: float
    modules: frozenset[str]

    @property
    def linear(self) -> frozenset[str]:
        """The linear layers that are computed again in every layer."""
        return frozenset(name for module in self.modules for name in MODULES[module])

    def repeats(self, module: str) -> float:
        """The share of the layers in which the module is computed again."""
        return 1.0 if module in self.modules else self.share


@lru_cache(maxsize=1024)
def recomputation(text: Recompute) -> Recomputation:
    """The meaning of a value of `engine.recompute`. ConfigError if it has none.

    >>> recomputation("3/4").share, sorted(recomputation("moe_act,layernorm").modules)
    (0.75, ['layernorm', 'moe_act'])
    """
    if text in RECOMPUTES:
        return Recomputation(float(text == "full"), frozenset(("core_attn",) if text == "selective" else ()))
    if (share := _SHARE.fullmatch(text)) is not None and int(share[1]) < int(share[2]):
        return Recomputation(int(share[1]) / int(share[2]), frozenset())
    names = modules_of(text)
    if names and len(MODULES.keys() & names) == len(names):
        return Recomputation(0.0, frozenset(names))
    known = f"; modules are {', '.join(MODULES)}" if len(names) > 1 or "_" in text else ""
    raise ConfigError(f'engine.recompute is "{text:.80}", which is not known{known}', _HINT)


def known_recompute(value: object) -> Recompute | None:
    """A recorded value of `engine.recompute`; None for one that has no meaning here."""
    with contextlib.suppress(ConfigError):
        return str(value) if recomputation(str(value)) else None
    return None


def modules_of(text: Recompute) -> list[str]:
    """The modules that a value lists, in its order; those of a word or a share are none."""
    return [] if text in RECOMPUTES or "/" in text else [name.strip() for name in text.split(",")]
