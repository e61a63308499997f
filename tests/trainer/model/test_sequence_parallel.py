"""The group of a model whose activations are split by position between blocks."""

from typing import Any, cast

import torch

from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.sequence_parallel import SequenceParallel
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel


def test_it_has_all_that_the_group_has() -> None:
    anything = cast(Any, object())
    given = {"group": anything, "given": anything, "empty": anything, "device": torch.device("meta")}
    tp = TensorParallel(1, 2, **given, context=ContextParallel(), experts=ExpertParallel())
    split = SequenceParallel.over(tp)
    assert type(split) is SequenceParallel
    assert vars(split) == vars(tp)
    assert split.parts == 2
    alone = TensorParallel()
    assert SequenceParallel.over(alone) is alone
