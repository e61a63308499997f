"""How a row's layout and batch follow from what it states: degrees, micro-batches, chunks, layers of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_gpt.plan.row_fields import MOST, Unusable, needed, shown, whole, words
from hpc_gpt.plan.row_words import degrees_of
from hpc_gpt.settings.model_shape import ModelShape, partition_layers

DEFAULT_VOCAB = 51200
_MOST_BALANCED = 300  # layers, above which balancing them takes long


def degrees(row: Mapping[str, Any], assumed: list[str]) -> dict[str, int]:
    """tp, pp and dp: stated, in the words of `parallelism`, or what the GPUs leave."""
    said = degrees_of(row)
    if said.get("cp", 1) > 1:
        raise Unusable(f"context parallelism is not modelled (parallelism {shown(row.get('parallelism'))})")
    if said.get("ep", 1) > 1:
        raise Unusable(f"MoE is not modelled (parallelism {shown(row.get('parallelism'))})")
    found = {name: whole(row, name) or said.get(name) for name in ("tp", "pp", "dp")}
    gpus = whole(row, "gpus")
    unknown = [name for name, degree in found.items() if degree is None]
    # Data parallelism is what is left; who shards everything, or speaks of ZeRO alone, splits no layer.
    sharded = bool(words(row, "sharding") or said) or row.get("zero_stage") == 3 or row.get("fsdp") is not None
    for name in ("tp", "pp"):
        if name in unknown and (len(unknown) > 1 or gpus is None) and sharded:
            found[name] = 1
            unknown.remove(name)
            assumed.append(f"{name} 1")
    if len(unknown) > 1 or (unknown and gpus is None):
        raise Unusable(f"{' and '.join([*unknown, *(['gpus'] if gpus is None else [])])} missing")
    known = 1
    for degree in found.values():
        known *= degree or 1
    if unknown:
        assert gpus is not None
        if gpus % known:
            raise Unusable(f"{unknown[0]} is missing, and gpus {gpus} is no multiple of the other degrees' {known}")
        found[unknown[0]] = gpus // known
    elif gpus is not None and gpus != known:
        split = " x ".join(f"{name} {degree}" for name, degree in found.items())
        raise Unusable(f"gpus is {gpus}, but {split} is {known}")
    return {name: degree or 1 for name, degree in found.items()}


def micro_follows(row: Mapping[str, Any], dp: int) -> bool:
    """Whether `batch` can tell the micro-batch although the row does not: by the passes, or one sample for each."""
    return row.get("global_bs") is not None and (row.get("grad_accum") is not None or whole(row, "global_bs") == dp)


def batch(row: Mapping[str, Any], dp: int, pp: int, assumed: list[str]) -> tuple[int, int, int | None]:
    """Samples of a micro-batch, micro-batches of a step, and the global batch as published (None: not stated)."""
    micro, accumulated = whole(row, "micro_bs"), whole(row, "grad_accum")
    global_batch = whole(row, "global_bs") or _global_from_tokens(row)
    if global_batch is None and (share := whole(row, "batch_per_dp") or whole(row, "local_bs")) is not None:
        global_batch = share * dp
    if micro is None:
        assert global_batch is not None
        accumulated = accumulated or 1
        if global_batch % (dp * accumulated):
            raise Unusable(
                f"micro_bs is missing, and global_bs {global_batch} is not dp {dp} x grad_accum {accumulated} x any"
            )
        micro = global_batch // (dp * accumulated)
    if global_batch is None and accumulated is not None:
        global_batch = micro * accumulated * dp
    if global_batch is None:
        # Enough to fill the pipeline.
        if pp > 1:
            assumed.append(f"{pp} micro-batches")
            return micro, pp, None
        assumed.append("1 micro-batch")
        return micro, 1, micro * dp
    if global_batch < micro * dp:
        raise Unusable(f"global_bs {global_batch} is less than micro_bs {micro} x dp {dp}")
    micro_batches = -(-global_batch // (micro * dp))
    if global_batch % (micro * dp):
        assumed.append(f"global_bs {global_batch} taken as {micro_batches} x micro_bs {micro} x dp {dp}")
    if micro_batches > MOST["grad_accum"]:
        raise Unusable(f"global_bs {global_batch} is absurd for micro_bs {micro} x dp {dp}")
    return micro, micro_batches, global_batch


def _global_from_tokens(row: Mapping[str, Any]) -> int | None:
    """`tokens_per_batch` over seq. A round count of millions that seq does not divide is one of 2^20 each."""
    tokens, seq = row.get("tokens_per_batch"), whole(row, "seq")
    if not isinstance(tokens, (int, float)) or isinstance(tokens, bool) or not seq or not seq <= tokens < 1e12:
        return None
    count = int(tokens)
    if count % seq and count % 10**6 == 0:
        count = count // 10**6 * 2**20
    return max(1, round(count / seq))


def chunks(row: Mapping[str, Any], layers: int, pp: int, assumed: list[str]) -> int:
    """Interleaved chunks a stage. Where only the schedule says so: the fewest, above one, that divide its layers."""
    stated = whole(row, "vp")
    if stated is not None:
        return stated if pp > 1 else 1
    if pp == 1 or "interleav" not in words(row, "schedule") or layers % pp:
        return 1
    per_stage = layers // pp
    chunks = next((count for count in range(2, per_stage + 1) if per_stage % count == 0), 1)
    assumed.append(f"vp {chunks}")
    return chunks


def stage_layers(row: Mapping[str, Any], layers: int, pp: int) -> tuple[int, ...] | None:
    """Layers of each stage where `partition` is not even: a list of them, or DeepSpeed's words for its methods.

    `type:transformer|embedding` counts embedding and head as a layer each; "parameters" makes stages hold as many.
    """
    given = row.get("partition")
    if pp < 2 or pp > layers:
        return None
    if isinstance(given, (list, tuple)):
        whole_numbers = all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in given)
        if not (whole_numbers and len(given) == pp and sum(given) == layers):
            raise Unusable(f"partition is {shown(given)}, but must be {pp} numbers that sum up to layers {layers}")
        return tuple(given)
    said = words(row, "partition")
    if "param" in said and layers <= _MOST_BALANCED:
        shape = ModelShape(
            needed(row, "hidden"), layers, needed(row, "heads"), vocab=whole(row, "vocab") or DEFAULT_VOCAB
        )
        return tuple(partition_layers(shape, pp, "parameters"))
    if "embed" not in said:
        return None
    counted = layers + 2
    stages = [counted // pp + (stage < counted % pp) for stage in range(pp)]
    stages[0] -= 1
    stages[-1] -= 1
    return tuple(stages) if min(stages) > 0 else None
