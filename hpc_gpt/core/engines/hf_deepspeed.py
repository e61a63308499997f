"""transformers' own model under ZeRO 1 to 3."""

from collections.abc import Iterator

from hpc_gpt.core.engines.base.deepspeed import DeepspeedFacts
from hpc_gpt.core.engines.base.facts import OUR_PARTS
from hpc_gpt.core.engines.base.training import AttentionMask
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape


class HfDeepspeed(DeepspeedFacts):
    order, plan_order = 50, 60
    packages = ("torch", "deepspeed", "transformers")
    trains_our_model = False
    zero_stages, default_stage = (1, 2, 3), 3
    switches = frozenset({"offload", "recompute", "attention", "compile", "compile_backend"})
    recomputes = ("none", "full")
    compiles_edges = False
    gathers_one_by_one = True
    has_composed_gelu = True  # "gelu_new" in GPT-2's configs
    any_model = True
    shape_parts = OUR_PARTS

    def shape_fault(self, shape: ModelShape) -> str | None:
        from hpc_gpt.core.weights.classes import architecture_of  # few commands ask for a shape of this engine's

        fault = super().shape_fault(shape)
        if fault is None and shape.router_dtype and shape.router != "sigmoid":
            return "transformers' routers multiply in train.dtype, not in model.router_dtype"
        return fault or (None if architecture_of(shape) else "transformers has no class for its shape")

    def mask(self, engine: Engine, shape: ModelShape, dtype: str, device: str | None, documents: bool) -> AttentionMask:
        """transformers gives SDPA booleans for a window, which no flash kernel takes; torch makes numbers of them in
        each layer, and autograd keeps these (transformers 5.23, masking_utils.sdpa_mask; sdp_utils of torch 2.13)."""
        return "layers" if shape.windowed and not self.keeps_scores(engine, device) else "none"

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        if engine.attention not in ("auto", "math"):
            yield Fault(f"engine.attention is {engine.attention}, which engine hf-deepspeed does not have",
                        "use auto (torch chooses) or math")  # fmt: skip


ENGINE = HfDeepspeed()
