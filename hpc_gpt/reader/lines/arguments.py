"""A program's dump of arguments, read by names."""

import contextlib
import math
from collections.abc import Iterator, Mapping

from hpc_gpt.reader.lines.fields import Fields

_NONE = ("None", "none", "null", "")
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "16-mixed", "16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "32"), "fp32"),
}


def dtype_named(text: str) -> str | None:
    """The dtype fp16, bf16 or fp32 by any of its names; None for another one.

    >>> dtype_named("torch.half"), dtype_named("bf16-mixed"), dtype_named("int8")
    ('fp16', 'bf16', None)
    """
    return _DTYPES.get(text.lower().replace("torch.", "").strip())


class Arguments:
    """A dump of arguments. Each method reads the first of its names that the dump has with a value other than None."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def text(self, *names: str) -> str | None:
        """The argument's text, stripped."""
        for name in names:
            value = self._texts.get(name)
            if value is not None and value.strip() not in _NONE:
                return value.strip()
        return None

    def figure(self, *names: str) -> float | None:
        """The argument as a number; any other text counts as missing."""
        return next(self._figures(names), None)

    def whole(self, *names: str) -> int | None:
        """The argument as a whole number (`1.0` is one); any other text counts as missing."""
        return next((int(value) for value in self._figures(names) if value.is_integer()), None)

    def _figures(self, names: tuple[str, ...]) -> Iterator[float]:
        for name in names:
            text = self.text(name)
            with contextlib.suppress(ValueError):
                if text is not None and len(text) <= 32 and math.isfinite(value := float(text)):
                    yield value

    def true(self, *names: str) -> bool | None:
        """True if one of the arguments is `True`, else False; None if all are missing."""
        values = [self._texts[name].strip() for name in names if name in self._texts]
        return any(text in ("True", "true") for text in values) if values else None

    def dtype(self, *names: str) -> str | None:
        """The argument as fp16, bf16 or fp32."""
        return dtype_named(self.text(*names) or "")


def without_unknown(fields: Mapping[str, str | int | float | None]) -> Fields:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def quotient(gpus: int | None, *factors: int | None) -> int | None:
    """The quotient gpus / (product of factors); None if one is unknown or the product does not divide gpus."""
    positive = [factor for factor in factors if factor and factor > 0]
    product = math.prod(positive)
    return gpus // product if len(positive) == len(factors) and gpus and gpus % product == 0 else None
