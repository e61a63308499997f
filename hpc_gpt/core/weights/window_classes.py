"""The classes of transformers (5.23) whose layers attend to a window, and which layers do."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Windows:
    """A class with windows: which layers have one, unless the file has `layer_types` and the class reads them
    (`typed`); the default of `sliding_window`, and of `max_window_layers`; `switched`: only with `use_sliding_window`.
    """

    layers: Literal["all", "even", "from", "even below", "unrotated"]
    default: int | None
    first: int | None = None
    switched: bool = False
    typed: bool = True

    def slides(self, layer: int, first: int | None, rotates: bool) -> bool:
        """Whether a layer has the window where no `layer_types` say so; `first`: the file's `max_window_layers`."""
        return {
            "all": True,
            "even": layer % 2 == 0,
            "from": first is not None and layer >= first,
            "even below": first is not None and layer < first and layer % 2 == 0,
            "unrotated": not rotates,
        }[self.layers]

    def holds(self, windowed: int, layers: int) -> bool:
        """Whether a file of the class can say that so many of the layers have the window."""
        return self.typed or windowed in (0, layers)


_QWEN = Windows("from", 4096, 28, switched=True)
# Other classes have no window, whatever their file says.
WINDOWS = {
    "MistralForCausalLM": Windows("all", 4096, typed=False),
    "MixtralForCausalLM": Windows("all", None, typed=False),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": Windows("even below", 4096, 28, switched=True),
    "Qwen3MoeForCausalLM": Windows("all", 4096, switched=True, typed=False),
    "Dots1ForCausalLM": Windows("from", 4096, 62),
    "SmolLM3ForCausalLM": Windows("unrotated", None, switched=True),
    "GptOssForCausalLM": Windows("even", 128),
}
