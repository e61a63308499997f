"""The worth of each term for mixtures of experts: the errors on their published rows without it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from bench.published.rows import PublishedRow, Rows
from bench.published.scores import Scores, choosing, predict_rows, predicted_only, score
from hpc_gpt.core.engines.base.programs import Megatron, MegatronFsdp, Program
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.planner import experts, layer_bytes, layer_time
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.step_time import _StepModel

FILE = "moe2.json"


def _one_product(training: Training, rates: Any, kind: Any) -> float:
    """All rows of a rank as one product."""
    etp = training.expert_tp
    return sum(
        rates.layer_product_s(
            experts.expert_rows(training), sum(each.rows_on(etp) for each in parts), parts[0].columns_on(etp)
        )
        for parts in kind.products.values()
        if parts[0].is_routed
    )


def _only_gate(training: Training, kind: Any, gate_bytes: float) -> float:
    return experts.expert_rows(training) * gate_bytes * kind.routed[-1].columns_on(training.expert_tp)


def _over_all_ranks(model: _StepModel, training: Training, params: float, of_experts: float, each: float, rate: float):
    return model.links.ring_s((params + of_experts) * each, training.data_ranks, training.tp, rate)


# {term: what replaces it: constants, functions of a module or a class, or a change of every row's training}
TERMS: dict[str, dict[str, Any]] = {
    "products by expert": {"expert_products_s": _one_product},
    "grouped products in FP8": {"experts.eight_bits.hopper": 1.0},
    "dispatch and combine": {"exchange_s": lambda training, links: 0.0},
    "a copy to each node": {"dispatcher": "alltoall"},
    "its overlap": {"ep_overlap": False},
    "gradients beside products": {"dense_weights": layer_bytes.weights_on},
    "router and permutation": {"expert_pass_bytes": _only_gate},
    "etp sorts its own rows": {"sent_rows": experts.expert_rows},
    "padding in 8 bits": {"_padding_bytes": lambda training: 0.0},
    "biases of experts": {"_is_biased": lambda training: False},
    "launches": {"launching_s": lambda training, host_s: 0.0},
    "the wait for the router": {"waits_for_router": lambda training: False},
    "modules computed again": {"_modules_s": lambda *layer: 0.0},
    "the memory that they free": {"freed_by_modules": lambda training, layer: []},
    "the loss in place": {"logit_bytes": Program.logit_bytes},
    "the worst load": {"experts.worst_load": 1.0},
    "padding to the largest": {"experts.largest_load": 1.0},
    "dropped tokens": {"dropless": True},
    "CUDA graphs": {"cuda_graphs": ()},
    "etp": {"etp": None},
    "gathers ahead": {"gathers_ahead": False},
    "reduction by two groups": {"_over_replicas_s": _over_all_ranks},
}


# layer_time before layer_bytes: a term is replaced where the time of a layer asks for it.
_OWNERS: tuple[Any, ...] = (experts, layer_time, layer_bytes, _StepModel, Megatron, MegatronFsdp)


def errors_without(rows: Rows, term: str | None = None) -> Scores:
    """The scores of the rows with data sheets, without a term."""
    with _without(term) as changes:
        entries = tuple(_changed(entry, changes) for entry in rows.entries)
        return score(predicted_only(predict_rows(Rows(entries), choosing(()))))


@contextmanager
def _without(term: str | None) -> Iterator[dict[str, Any]]:
    replaced = TERMS[term] if term else {}
    fields = Training.__dataclass_fields__
    with ExitStack() as stack:
        for name, value in replaced.items():
            if name in VALUES:
                stack.enter_context(mock.patch.dict(VALUES, {name: value}))
            elif name not in fields:
                owner: Any = next(one for one in _OWNERS if name in vars(one))
                stack.enter_context(mock.patch.object(owner, name, value))
        yield {name: value for name, value in replaced.items() if name in fields}


def _changed(entry: Any, changes: dict[str, Any]) -> Any:
    if not isinstance(entry, PublishedRow) or not changes:
        return entry
    training = entry.training
    if "etp" in changes and training.tp * training.data_ranks % (training.ep * training.tp):
        return entry
    if "dispatcher" in changes and training.dispatcher is not None:
        return entry if training.dispatcher == "allgather" else replace(entry, training=replace(training, **changes))
    return replace(entry, training=replace(training, **changes))
