"""Megatron-LM's dump of its arguments, from v1.1.5 and its DeepSpeed forks to now, and their meaning."""

import re
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from hpc_gpt.core.engines.base.megatron_experts import SAME_FIGURES
from hpc_gpt.core.recomputation import known_recompute
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.reader.lines.arguments import Arguments, quotient, without_unknown
from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import Dialect, Pattern

# The prefix of a launcher before the two spaces of a line. DeepSpeed dumps a config that looks the same and means
# something else: its `world_size` is the data-parallel size. GPT-NeoX ends each line with `updated` or `default`.
_BEFORE = (
    r"^(?!.{0,400}\[config\.py:)(?!.{0,4000}(?:updated|default) {0,8}$)"
    r"(?:.{0,400}?(?:[\]:|>] ?|(?<= )- ?|\d\d:\d\d:\d\d[\d.,]{0,8} ?))? {1,8}"
)
# {our key: the option's name} of DeepSeek's attention.
_OF_LATENT = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "qk_rope": "qk_pos_emb_head_dim", "v_head": "v_head_dim",
}  # fmt: skip
_DEFAULTS = {entry.name: entry.default for entry in fields(ModelShape)}
_LAYERS = re.compile(r"\[[01](?:, ?[01]){0,999}\]")


def interpret(texts: Mapping[str, str]) -> Fields:
    """The fields of a dump."""
    arguments = Arguments(texts)
    positions = arguments.text("position_embedding_type")
    key_heads = "num_query_groups" if arguments.true("group_query_attention") else "num_key_value_heads"
    layout = _layout_and_batch(arguments, "model_parallel_size" in texts and "tensor_model_parallel_size" not in texts)
    return without_unknown(
        {
            **layout,
            "ep": arguments.whole("expert_model_parallel_size", "moe_expert_parallel_size"),
            "vp": arguments.whole("virtual_pipeline_model_parallel_size"),
            "seq": arguments.whole("seq_length", "encoder_seq_length"),
            "hidden": arguments.whole("hidden_size"),
            "layers": arguments.whole("num_layers", "encoder_num_layers"),
            "heads": arguments.whole("num_attention_heads"),
            "kv_heads": arguments.whole(key_heads),
            "ffn": arguments.whole("ffn_hidden_size"),
            "head_dim": arguments.whole("kv_channels"),
            "vocab": arguments.whole("padded_vocab_size"),
            "vocab_unpadded": arguments.whole("vocab_size"),
            "swiglu": arguments.true("swiglu"),
            "untied_embeddings": arguments.true("untie_embeddings_and_output_weights"),
            # Only the name of an enumeration's member such as PositionEmbeddingType.alibi.
            "position_embedding": positions.rpartition(".")[2] if positions else None,
            "dtype": _dtype(arguments),
            "fp8_products": 1
            if arguments.text("fp8") not in (None, "False") or arguments.true("fp8_hybrid", "fp8_e4m3")
            else None,
            "recompute": _recompute(arguments),
            "sequence_parallel": arguments.true("sequence_parallel"),
            "flash_attention": _flash_attention(arguments),
            "distributed_optimizer": arguments.true("use_distributed_optimizer"),
            "optimizer_offload": arguments.true("cpu_optimizer", "optimizer_cpu_offload", "offload_optimizer_states"),
            "loss_scale": arguments.whole("loss_scale"),
            "steps_planned": arguments.whole("train_iters"),
            "log_interval": arguments.whole("log_interval"),
            "eval_interval": arguments.whole("eval_interval"),
            "save_interval": arguments.whole("save_interval"),
            **_engine(arguments, layout["pp"]),
            **stated_experts(texts),
            **stated_balance(texts),
        }
    )


def _layout_and_batch(arguments: Arguments, old: bool) -> dict[str, int | None]:
    """The layout and the batch. v1.1.5 (`old`) has no `micro_batch_size`: its `batch_size` is the micro-batch, `gas` the
    number of micro-batches, and only the fork with `pipe_parallel_size` has a pipeline."""
    gpus = arguments.whole("world_size")
    # In other programs' dumps `batch_size` may be the batch of all ranks.
    micro_batch = arguments.whole("micro_batch_size", *(["batch_size"] if old else []))
    tp = arguments.whole("tensor_model_parallel_size", "model_parallel_size")
    pp = arguments.whole("pipeline_model_parallel_size", "pipe_parallel_size")
    pp = 1 if pp == 0 or (pp is None and old) else pp
    cp = arguments.whole("context_parallel_size", "ds_sequence_parallel_size")
    dp = arguments.whole("data_parallel_size") or quotient(gpus, tp, pp, cp or 1)
    micro_batches = (arguments.whole("gas", "gradient_accumulation_steps") or 1) if old else None
    global_batch = arguments.whole("global_batch_size")
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


def _engine(arguments: Arguments, pp: int | None) -> Mapping[str, str | int | None]:
    if not arguments.true("deepspeed"):
        return {"engine": "megatron-lm" if arguments.whole("hidden_size") else None}
    zero_stage = arguments.whole("zero_stage")
    return {"engine": "deepspeed-3d" if (pp or 1) > 1 else "deepspeed-zero", "zero_stage": zero_stage}


def _dtype(arguments: Arguments) -> str | None:
    if arguments.text("params_dtype") is not None:
        return arguments.dtype("params_dtype")
    return "bf16" if arguments.true("bf16") else "fp16" if arguments.true("fp16") else None


def _recompute(arguments: Arguments) -> str | None:
    """The recomputation: until 2022 of whole layers (`checkpoint_activations`) or none; since then also selective, or a
    number of layers of each chunk of a stage (`block`); since 2025 also a list of modules."""
    granularity = arguments.text("recompute_granularity", "activations_checkpoint_granularity")
    if granularity == "full":
        return _share_of_layers(arguments)
    if granularity == "selective":
        modules = ",".join(re.findall(r"\w+", arguments.text("recompute_modules") or ""))
        return modules if modules != "core_attn" and known_recompute(modules) else "selective"
    if arguments.true("checkpoint_activations") or arguments.text("activations_checkpoint_method", "recompute_method"):
        return "full"
    names = ("checkpoint_activations", "deepspeed_activation_checkpointing", "recompute_granularity")
    return "none" if arguments.true(*names, "activations_checkpoint_method") is not None else None


def _share_of_layers(arguments: Arguments) -> str:
    """The recomputed share of the layers, full if all are or if their number is not known."""
    count, layers = arguments.whole("recompute_num_layers"), arguments.whole("num_layers", "encoder_num_layers")
    if arguments.text("recompute_method") != "block" or not count or not layers:
        return "full"
    pp = arguments.whole("pipeline_model_parallel_size") or 1
    deep = layers // (pp * (arguments.whole("virtual_pipeline_model_parallel_size") or 1))
    share = Fraction(count, max(deep, count))
    return str(share) if share < 1 else "full"


def _flash_attention(arguments: Arguments) -> bool | None:
    if "flash" in (arguments.text("attention_backend") or ""):
        return True
    return arguments.true("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton")


def stated_experts(texts: Mapping[str, str]) -> dict[str, Any]:
    """The keys of [model] about experts and DeepSeek's attention that differ from its defaults, and the ranks that share
    an expert; None for what is not stated.

    The number of dense layers is right wherever the layers with experts lie; if it is not known, the number of experts
    per token is missing, too. DeepSpeed's fork has a list of numbers of experts, and other names.
    """
    arguments = Arguments(texts)
    stated: dict[str, Any] = {"mtp_layers": arguments.whole("mtp_num_layers") or None}
    if arguments.true("multi_latent_attention"):
        stated |= {key: arguments.whole(option) for key, option in _OF_LATENT.items()}
        stated["head_dim"] = (arguments.whole("qk_head_dim") or 0) + (stated["qk_rope"] or 0)
    counts = [int(count) for count in re.findall(r"\d{1,6}", arguments.text("num_experts") or "")]
    if max(counts, default=0) < 2:
        return stated
    dense, k = _dense_layers(arguments), arguments.whole("moe_router_topk", "topk")
    stated |= {key: arguments.whole(option) for key, option in SAME_FIGURES.items()}
    stated |= {"experts": max(counts), "dense_layers": dense, "experts_per_token": None if dense is None else k}
    if "moe_router_topk" in texts:
        sigmoid = arguments.text("moe_router_score_function") == "sigmoid"
        stated |= {
            "router": "sigmoid" if sigmoid else "softmax",
            "norm_topk": k != 1 if sigmoid else not arguments.true("moe_router_pre_softmax"),
            "router_bias": arguments.true("moe_router_enable_expert_bias"),
            "shared_gate": arguments.true("moe_shared_expert_gate"),
            "router_scale": arguments.figure("moe_router_topk_scaling_factor") or None,
        }
    stated = {key: value for key, value in stated.items() if value not in (None, _DEFAULTS[key])}
    return stated | {"etp": arguments.whole("expert_tensor_parallel_size")}


def stated_balance(texts: Mapping[str, str]) -> Fields:
    """The balance of a mixture: `balance` (loss, bias or none), and the coefficients `balance_coef` and `z_loss_coef` if
    the program trains with these losses."""
    arguments = Arguments(texts)
    kinds = re.findall(r"\w+", texts.get("moe_router_load_balancing_type", ""))  # one is called none
    coefs = re.findall(r"\d+(?:\.\d*)?(?:e-?\d+)?", arguments.text("moe_aux_loss_coeff") or "")
    pairs = zip(kinds, map(float, coefs), strict=False)
    coef = next((coef for kind, coef in pairs if kind.endswith("aux_loss") and coef > 0), None)
    balance = "bias" if arguments.true("moe_router_enable_expert_bias") else "loss" if coef else "none"
    z_loss = arguments.figure("moe_z_loss_coeff") or None
    return without_unknown({"balance": balance if kinds else None, "balance_coef": coef, "z_loss_coef": z_loss})


def _dense_layers(arguments: Arguments) -> int | None:
    """The layers without experts; None if the dump does not state them."""
    layers = arguments.whole("num_layers", "encoder_num_layers")
    if (every := arguments.text("moe_layer_freq", "expert_interval")) is None:
        return 0
    if _LAYERS.fullmatch(every):
        listed = re.findall("[01]", every)
        return listed.count("0") if layers in (None, len(listed)) else None
    if layers is None or not re.fullmatch(r"[1-9]\d{0,3}", every):
        return None
    return layers - -(-layers // int(every))


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
