"""Arguments as programs dump them, read as what they mean: `None` is none, `True` is true, `1.0` is one."""

from __future__ import annotations

from collections.abc import Mapping

Settled = dict[str, str | int | float]
_NONE = ("None", "none", "null", "")
_DTYPES = {
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "fp16": "fp16",
    "torch.bfloat16": "bf16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "torch.float32": "fp32",
    "torch.float": "fp32",
    "fp32": "fp32",
}


class Arguments:
    """A dump, {argument: text}. Each reading takes the first of the names that is there and is no None."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def text(self, *names: str) -> str | None:
        """The text as it stands, without space around it."""
        for name in names:
            found = self._texts.get(name)
            if found is not None and found.strip() not in _NONE:
                return found.strip()
        return None

    def whole(self, *names: str) -> int | None:
        """A whole number; a text that is none counts as missing."""
        for name in names:
            text = self.text(name)
            try:
                value = float(text) if text is not None and len(text) <= 32 else None
            except ValueError:
                continue
            if value is not None and value.is_integer():
                return int(value)
        return None

    def true(self, *names: str) -> bool | None:
        """Whether any of them is `True`; None where all are missing."""
        found = [self._texts[name].strip() for name in names if name in self._texts]
        return any(text in ("True", "true") for text in found) if found else None

    def dtype(self, *names: str) -> str | None:
        """fp16, bf16 or fp32."""
        return _DTYPES.get(self.text(*names) or "")


def without_unknown(found: Mapping[str, str | int | float | None]) -> Settled:
    """The fields that have a value."""
    return {name: value for name, value in found.items() if value is not None}


def quotient(gpus: int | None, *factors: int | None) -> int | None:
    """gpus / (product of factors), None where one is unknown or it does not divide."""
    product = 1
    for factor in factors:
        if not factor or factor < 0:
            return None
        product *= factor
    return gpus // product if gpus and gpus % product == 0 else None
