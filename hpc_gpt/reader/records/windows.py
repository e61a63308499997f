"""Counts the keys that a token attends to, if a program's arguments limit attention to a window.

The formulas count whole attention: s keys for a sequence of s tokens, not halved for causality. For a layer with a
window of w keys they count w. A window whose layers are not known gives no figure.
"""

import math
import re
from collections.abc import Mapping, Sequence

_OFF = ("", "none", "null", "false", "0", "-1", "[]", "{}", "l")  # `l`: nanochat's, whose layers are all long
# Arguments of any program that limit the keys that a token attends to.
_LIMITS = re.compile(
    r"\W*(?:(?:\w+_)?(?:sliding|attn|attention|local)_(?:\w+_)?window\w*|window_(?:size|pattern)|window_attn\w*"
    r"|attention_chunk_size|sparse_attention)\W*"
)
# Arguments that only modify another argument.
_DETAILS = ("use_sliding_window", "window_attn_skip_freq", "max_window_layers")
# transformers' models with a window in every layer, and those with a switch for it, which is off by default.
_IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_MISTRALS = 4096  # the window of a Mistral configuration that does not name one
_PAIR = re.compile(r"[(\[]?\s*(-?\d{1,12})\s*(?:,\s*(-?\d{1,12})\s*)?,?[)\]]?")
_MARKS = "\"=:'"
_WHOLE_ATTENTION = ("global", "flash")  # GPT-NeoX's names


def attention_keys(arguments: Mapping[str, str], seq: int | None, layers: int | None) -> tuple[float | None, str]:
    """(keys that a token attends to, the mean over the layers, "") if a window is shorter than `seq`; (None, reason) if
    the keys are unknown; (None, "") for attention over all of `seq`.

    `arguments`: a program's as its dialect reads them; names from transformers' configuration include quotes.
    """
    texts = {name: text.strip().strip("'\"") for name, text in arguments.items()}
    limits = {
        name: text
        for name, text in texts.items()
        if _LIMITS.fullmatch(name) and text.lower() not in _OFF and name.strip(_MARKS) not in _DETAILS
    }
    odd = set(re.findall(r"[a-z_]{3,}", texts.get("attention_config", "").lower())) - set(_WHOLE_ATTENTION)
    if odd := odd - {"none", "all"}:
        return None, f"attention_config has {' and '.join(sorted(odd))}, so a token's keys are not known"
    if (kind := texts.get("attention_type:", "global")) not in (
        "global",
        "full",
    ) and "sliding_window_size:" not in limits:
        return None, f"attention_type is {kind}, so a token's keys are not known"
    if not limits:
        silent = texts.get('"model_type"') == "mistral" and '"sliding_window"' not in texts
        return None, "the log does not say mistral's sliding_window" if silent and (seq or 0) > _MISTRALS else ""
    if len(limits) > 1:
        return None, f"{' and '.join(sorted(name.strip(_MARKS) for name in limits))} limit attention"
    ((name, text),) = limits.items()
    limit = f"{name.strip(_MARKS)} is {text[:40]}"
    window, some = _window(name.strip(_MARKS), text)
    if window is None:
        return None, f"{limit}, which limits attention in a way that hpc-gpt does not read"
    if window == math.inf or (seq is not None and window >= seq):
        return None, ""
    share = _share(name, texts, layers) if not some else None
    if share is None:
        return None, f"{limit}, and the log does not say in which layers"
    if not share or seq is None:
        return None, ""
    return share * window + (1 - share) * seq, ""


def _window(name: str, text: str) -> tuple[float | None, bool]:
    """(keys of a window, whether only some layers may have it); None instead of the keys if they are not a number."""
    match = _PAIR.fullmatch(text)
    if match is None or name not in ("window_size", "sliding_window", "sliding_window_size", "sliding_window_width",
                                     "attention_chunk_size"):  # fmt: skip
        return None, True
    left = int(match[1])
    if left < 0:
        return math.inf, False
    # Megatron's and NeoX's windows count the keys before a token.
    before = name in ("window_size", "sliding_window_width")
    return float(left + 1 if before else left), name == "attention_chunk_size"


def _share(name: str, texts: Mapping[str, str], layers: int | None) -> float | None:
    """The share of the layers that have the window, None if it is not known."""
    if name == "window_size":
        return _megatrons_share(texts.get("window_attn_skip_freq", ""), layers)
    if name == "sliding_window_width":
        kinds = set(re.findall(r"[a-z_]{3,}", texts.get("attention_config", "").lower())) & set(_WHOLE_ATTENTION)
        return {("flash",): 1.0, ("global",): 0.0}.get(tuple(kinds))  # only flash attention has a window
    if name == "sliding_window_size:":  # MaxText's
        kind = texts.get("attention_type:", "global")
        alike = texts.get("decoder_block:") in ("llama2", "mistral")
        return {"local_sliding": 1.0, "global": 0.0}.get(kind) if alike else None
    model_type = texts.get('"model_type"')
    if name.strip('"=') != "sliding_window":
        return None
    if model_type in _SWITCHED:
        first = texts.get('"max_window_layers"', "")
        switch = {"true": True, "false": False}.get(texts.get('"use_sliding_window"', "").lower())
        if switch is False:
            return 0.0
        is_known = switch and layers and first.isdecimal()
        return max(0, layers - int(first)) / layers if is_known and layers else None
    return 1.0 if model_type in _IN_EVERY_LAYER else None


def _megatrons_share(skipped: str, layers: int | None) -> float | None:
    """The share of Megatron-LM's layers with a window: all, all but every N-th, or the layers with a 1 in a list."""
    if skipped.lower() in ("", "none"):
        return 1.0
    if layers and re.fullmatch(r"\d{1,6}", skipped) and int(skipped):
        return (layers - layers // int(skipped)) / layers
    if layers and re.fullmatch(r"\[[01](?:, ?[01]){0,9999}\]", skipped):
        ones, all_ = skipped.count("1"), skipped.count("1") + skipped.count("0")
        return ones / layers if all_ == layers else None
    return None


def of_options(line: Sequence[str]) -> dict[str, str]:
    """A command line's options in the form of a dump: {name: value}.

    >>> of_options(["--window-size", "128,0", "--swiglu", "--window-attn-skip-freq=4"])
    {'window_size': '128,0', 'swiglu': 'True', 'window_attn_skip_freq': '4'}
    """
    options: dict[str, list[str]] = {}
    name = ""
    for word in line:
        if word.startswith("--"):
            name, has_value, value = word[2:].replace("-", "_", word.partition("=")[0].count("-")).partition("=")
            options[name] = [value] if has_value else []
        elif name:
            options[name].append(word)
    return {option: ",".join(values) or "True" for option, values in options.items()}
