"""Megatron-LM's dump of its arguments, from v1.1.5 and its DeepSpeed forks to now, and what they mean."""

import re
from collections.abc import Mapping

from hpc_gpt.reader.pattern import Arguments, Dialect, Fields, Pattern, quotient, without_unknown

# What a launcher puts before the two spaces of a line. DeepSpeed dumps a config that looks the same and means other
# things: its `world_size` is the data-parallel size. GPT-NeoX ends each line with `updated` or `default`.
_BEFORE = (
    r"^(?!.{0,400}\[config\.py:)(?!.{0,4000}(?:updated|default) {0,8}$)"
    r"(?:.{0,400}?(?:[\]:|>] ?|(?<= )- ?|\d\d:\d\d:\d\d[\d.,]{0,8} ?))? {1,8}"
)


def interpret(texts: Mapping[str, str]) -> Fields:
    """The fields of a dump."""
    given = Arguments(texts)
    positions = given.text("position_embedding_type")
    layout = _layout_and_batch(given, "model_parallel_size" in texts and "tensor_model_parallel_size" not in texts)
    return without_unknown(
        {
            **layout,
            "ep": given.whole("expert_model_parallel_size"),
            "vp": given.whole("virtual_pipeline_model_parallel_size"),
            "seq": given.whole("seq_length", "encoder_seq_length"),
            "hidden": given.whole("hidden_size"),
            "layers": given.whole("num_layers", "encoder_num_layers"),
            "heads": given.whole("num_attention_heads"),
            "kv_heads": _kv_heads(given),
            "ffn": given.whole("ffn_hidden_size"),
            "head_dim": given.whole("kv_channels"),
            "vocab": given.whole("padded_vocab_size"),
            "vocab_unpadded": given.whole("vocab_size"),
            "swiglu": given.true("swiglu"),
            "untied_embeddings": given.true("untie_embeddings_and_output_weights"),
            # Of an enumeration such as PositionEmbeddingType.alibi, only the name.
            "position_embedding": positions.rpartition(".")[2] if positions else None,
            "experts": _experts(given),
            "experts_per_token": given.whole("moe_router_topk", "topk") if _experts(given) else None,
            "dtype": _dtype(given),
            "fp8_products": 1
            if given.text("fp8") not in (None, "False") or given.true("fp8_hybrid", "fp8_e4m3")
            else None,
            "recompute": _recompute(given),
            "sequence_parallel": given.true("sequence_parallel"),
            "flash_attention": _flash_attention(given),
            "distributed_optimizer": given.true("use_distributed_optimizer"),
            "optimizer_offload": given.true("cpu_optimizer", "optimizer_cpu_offload", "offload_optimizer_states"),
            "loss_scale": given.whole("loss_scale"),
            "steps_planned": given.whole("train_iters"),
            "samples_total": given.whole("train_samples"),
            "log_interval": given.whole("log_interval"),
            "eval_interval": given.whole("eval_interval"),
            "save_interval": given.whole("save_interval"),
            **_engine(given, layout["pp"]),
        }
    )


def _layout_and_batch(given: Arguments, old: bool) -> dict[str, int | None]:
    """v1.1.5 (`old`) has no `micro_batch_size`: its `batch_size` is the micro-batch, `gas` the number of micro-batches,
    and only the fork with `pipe_parallel_size` has a pipeline."""
    gpus = given.whole("world_size")
    # In other programs' dumps `batch_size` may be the batch of all ranks.
    micro_batch = given.whole("micro_batch_size", *(["batch_size"] if old else []))
    tp = given.whole("tensor_model_parallel_size", "model_parallel_size")
    pp = given.whole("pipeline_model_parallel_size", "pipe_parallel_size")
    pp = 1 if pp == 0 or (pp is None and old) else pp
    cp = given.whole("context_parallel_size", "ds_sequence_parallel_size")
    dp = given.whole("data_parallel_size") or quotient(gpus, tp, pp, cp or 1)
    micro_batches = (given.whole("gas", "gradient_accumulation_steps") or 1) if old else None
    global_batch = given.whole("global_batch_size")
    if global_batch is None and micro_batch and micro_batches and dp:
        global_batch = micro_batch * micro_batches * dp
    return {
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "micro_batch": micro_batch,
        "micro_batches": micro_batches,
        "global_batch": global_batch,
    }


def _engine(given: Arguments, pp: int | None) -> Mapping[str, str | int | None]:
    if not given.true("deepspeed"):
        return {"engine": "megatron-lm" if given.whole("hidden_size") else None}
    zero_stage = given.whole("zero_stage")
    return {"engine": "deepspeed-3d" if (pp or 1) > 1 else "deepspeed-zero", "zero_stage": zero_stage}


def _dtype(given: Arguments) -> str | None:
    if given.text("params_dtype") is not None:
        return given.dtype("params_dtype")
    return "bf16" if given.true("bf16") else "fp16" if given.true("fp16") else None


def _recompute(given: Arguments) -> str | None:
    """Until 2022 a layer was recomputed whole (`checkpoint_activations`) or not at all; since then a part can be."""
    granularity = given.text("recompute_granularity", "activations_checkpoint_granularity")
    if granularity in ("full", "selective"):
        return granularity
    whole = given.true("checkpoint_activations", "deepspeed_activation_checkpointing")
    if given.true("checkpoint_activations") or given.text("activations_checkpoint_method", "recompute_method"):
        return "full"
    known = whole is not None or given.true("recompute_granularity", "activations_checkpoint_method") is not None
    return "none" if known else None


def _kv_heads(given: Arguments) -> int | None:
    if given.true("group_query_attention"):
        return given.whole("num_query_groups")
    return given.whole("num_key_value_heads")


def _experts(given: Arguments) -> int | None:
    """None for a dense model. DeepSpeed's forks write a list, `[1]`."""
    experts = max(map(int, re.findall(r"\d{1,6}", given.text("num_experts") or "")), default=0)
    return experts if experts > 1 else None


def _flash_attention(given: Arguments) -> bool | None:
    if "flash" in (given.text("attention_backend") or ""):
        return True
    return given.true("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton")


DIALECT = Dialect(
    name="megatron_arguments",
    patterns=(
        Pattern(
            "argument", rf"{_BEFORE}(?P<key>[A-Za-z_]\w{{0,79}}) \.{{2,60}} (?P<value>\S.{{0,4000}})", literal=" .."
        ),
        # A name as long as the column is followed by one dot or none.
        Pattern(
            "argument", rf"{_BEFORE}(?P<key>[A-Za-z]\w{{30,79}}) (?:\. | )(?P<value>[^\s.].{{0,4000}})", literal="_"
        ),
    ),
    interpret=interpret,
)
