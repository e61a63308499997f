"""Files of published rows.

{"rows": [
  {"id": "a-1", "source": "a", "device": "a100-80g", "gpus_per_node": 8, "fabric": "infiniband 8x200G",
   "hidden": 4096, "layers": 32, "heads": 32, "vocab": 50257, "seq": 2048, "gpus": 64, "tp": 4, "pp": 4,
   "micro_bs": 2, "global_bs": 256, "recompute": "full", "dtype": "bf16", "stack": "Megatron-DeepSpeed",
   "zero_stage": 1, "sec_per_iter": 9.1, "memory_gib": 20.5, "memory_kind": "nvidia_smi", "fits": true}
]}

Or {"clusters": {"mine": [...], "theirs": [...]}}: then each cluster gets its own constants.

the machine     device, gpus_per_node, fabric
the model       hidden, layers, heads, seq; vocab (51200), kv_heads, ffn, swiglu, untied
the layout      gpus, tp, pp, dp, of which one may be left out; vp, sequence_parallel, zero_stage, sharding,
                distributed_optimizer, stack, schedule, partition, offload, flash_attention
the batch       micro_bs; global_bs or grad_accum; without either, memory is that of a full pipeline
measured        sec_per_iter, else samples_per_sec, tokens_per_sec_per_gpu, tflops_per_gpu with tflops_kind, mfu;
                memory_gib with memory_kind (nvidia_smi, reserved, allocated), memory_by_stage_gib {stage: [steady,
                peak allocated, peak reserved]}; fits, noisy (predicted, but in no mean)

Unknown fields are ignored. A row that lacks a required field, or has an impossible value, is left out with the field
named; so are mixtures of experts, FP8 and context parallelism, which are not modelled.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from hpc_gpt.core.errors import ConfigError
from tests.plan.machines import machine_named
from tests.plan.published.rows import Rows, row_of

_ROWS_HINT = 'a rows file is {"rows": [...]} or {"clusters": {"name": [...]}}: tests/plan/published/files.py shows one'


def read_rows(path: Path) -> Rows:
    """The rows of a file. ConfigError if it cannot be read, or is no file of rows."""
    return rows_of(_content(path), str(path))


def rows_of(content: object, where: str) -> Rows:
    """The rows of the parsed JSON of the file `where`. Rows of one machine share a Machine."""
    machine = lru_cache(maxsize=1000)(machine_named)
    tables = content if isinstance(content, Mapping) else {}
    clusters = {None: tables["rows"]} if isinstance(tables.get("rows"), list) else tables.get("clusters")
    if not isinstance(clusters, Mapping) or not all(isinstance(rows, list) for rows in clusters.values()):
        raise ConfigError(f"{where}: neither rows nor clusters of rows", _ROWS_HINT)
    return Rows(
        tuple(
            row_of(row, number, None if name is None else str(name), machine)
            for name, rows in clusters.items()
            for number, row in enumerate(rows, 1)
        )
    )


def _content(path: Path) -> object:
    """A file's JSON. ConfigError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", "give a file of rows that can be read") from None
    except ValueError as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", _ROWS_HINT) from None
