"""The values of engine.recompute and their meaning."""

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.recomputation import known_recompute, recomputation


@pytest.mark.parametrize(
    ("text", "share", "modules"),
    [
        ("none", 0, set()), ("selective", 0, {"core_attn"}), ("full", 1, set()), ("1/4", 0.25, set()),
        ("moe_act", 0, {"moe_act"}), ("layernorm, moe_act", 0, {"layernorm", "moe_act"}),
    ],
)  # fmt: skip
def test_a_value_is_a_word_a_share_or_modules(text: str, share: float, modules: set[str]) -> None:
    assert recomputation(text) == (share, modules)
    assert known_recompute(text) == text


@pytest.mark.parametrize("text", ["some", "", "4/4", "5/4", "0/4", "1/0", "moe,moe", "moe,full", "moe_act,", "Full"])
def test_any_other_text_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="which is not known") as refused:
        recomputation(text)
    assert refused.value.hint.startswith("use none, selective or full, a share of the layers such as 1/4, or modules")
    assert known_recompute(text) is None
