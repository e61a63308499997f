"""The GPT as a list of layers, which DeepSpeed's PipelineModule splits into stages."""

from itertools import accumulate
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor

from hpc_gpt.core.settings.experiment import Partition
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import partition_layers
from hpc_gpt.trainer.model.documents import Documents
from hpc_gpt.trainer.model.gpt import Block, PositionEmbedding, loss_of
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.norm import norm_kind
from hpc_gpt.trainer.model.sequence_parallel import SequenceParallel
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, VocabParallelEmbedding, VocabParallelHead
from hpc_gpt.trainer.model.vocab_loss import ChunkedLoss


def layer_specs(shape: ModelShape, initial: InitialWeights, tp: TensorParallel, techniques: Techniques) -> list[Any]:
    """The model as DeepSpeed's layer specifications: embedding, learned positions if there are any, blocks, norm, head.

    A stage builds only its own layers. The positions are not in the tied embedding's module: DeepSpeed marks every
    parameter of a tied module as a replica and leaves it out of the gradient norm.
    """
    rows, hidden = shape.padded_vocab, shape.hidden
    embedding: tuple[Any, ...] = (VocabParallelEmbedding, "embedding", rows, hidden, tp, initial, shape.pad_token)
    first, last = LayerSpec(*embedding), LayerSpec(VocabParallelHead, "head", rows, hidden, tp, initial)
    if shape.tied:
        first = TiedLayerSpec("embedding", *embedding)
        last = TiedLayerSpec("embedding", *embedding, forward_fn=_logits)
    blocks = [LayerSpec(Block, number, shape, tp, initial, techniques) for number in range(shape.layers)]
    position = [LayerSpec(PositionEmbedding, "position", shape.seq, hidden, tp, initial)]
    norm = LayerSpec(norm_kind(shape), "norm", shape, tp)
    return [first, *position[: _before_blocks(shape) - 1], *blocks, norm, last]


def _before_blocks(shape: ModelShape) -> int:
    """The number of layers before the blocks: the embedding, and learned positions."""
    return 2 if shape.positions == "learned" else 1


def _logits(embedding: VocabParallelEmbedding, hidden: Tensor) -> Tensor:
    return embedding.logits(hidden)


class StagedGpt(PipelineModule):  # type: ignore[misc]
    """This rank's stage of the model. DeepSpeed treats some class names specially, but not this one."""

    def __init__(
        self,
        shape: ModelShape,
        seed: int,
        topology: Any,
        tp: TensorParallel,
        techniques: Techniques,
        partition: Partition = "layers",
    ) -> None:
        self.shape = shape
        self.partition = partition
        tp = SequenceParallel.over(tp) if techniques.sequence_parallel else tp
        loss = loss_of(shape, tp, techniques)
        specs = layer_specs(shape, tp.initial(seed, shape.layers), tp, techniques)
        super().__init__(layers=specs, topology=topology, loss_fn=loss)
        # A chunked loss computes the logits itself, so the last stage does not run the head. (The layer stays in the
        # list from which DeepSpeed saves.)
        self._layers_run = len(self.forward_funcs)
        if isinstance(loss, ChunkedLoss) and self.stage_id == self.num_stages - 1:
            self._layers_run -= 1
            loss.attach(self.tied_modules["embedding"] if shape.tied else self.forward_funcs[-1])

    def forward(self, stage_input: Tensor, documents: Documents | None = None) -> Tensor:
        """Token numbers or the previous stage's output, and the micro-batch's documents, which are not sent between
        stages -> hidden states, or on the last stage logits.

        DeepSpeed's forward counts its calls in an attribute, so each call would be compiled again.
        """
        for layer in self.forward_funcs[: self._layers_run]:
            takes = isinstance(layer, (Block, PositionEmbedding))
            stage_input = layer(stage_input, documents) if takes else layer(stage_input)
        return stage_input

    def _partition_layers(self, method: str = "ours") -> None:
        """Splits the blocks by `partition_layers`; embedding and positions come first, norm and head last.

        DeepSpeed's methods build every layer on every rank to count parameters.
        """
        blocks = partition_layers(self.shape, self.num_stages, self.partition)
        blocks[0] += _before_blocks(self.shape)
        blocks[-1] += 2
        self.parts = [0, *accumulate(blocks)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """DeepSpeed's method without autograd: torch warns of a broadcast that it cannot differentiate."""
        super()._synchronize_tied_weights()
