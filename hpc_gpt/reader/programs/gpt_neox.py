"""EleutherAI's GPT-NeoX: iteration lines, the dump of arguments with `updated` or `default`, counts."""

import re
from collections.abc import Mapping

from hpc_gpt.reader.lines.arguments import Arguments, quotient, without_unknown
from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import NUMBER, STEP, Dialect, Pattern, figures, line
from hpc_gpt.reader.programs.megatron import NAMES as MEGATRON_NAMES

_ARGUMENT = r"^(?:[^|]{0,80}[\]:] ?)? {1,8}(?P<key>[A-Za-z_]\w{0,79}) \.{0,40} (?P<value>\S.{0,4000}?)\.{0,64}"
_STAGE = re.compile(r"['\"]stage['\"]: (\d)")


def interpret(texts: Mapping[str, str]) -> Fields:
    """The fields of a dump. `model_parallel_size` is tensor parallelism; pipeline size 0 means no pipeline."""
    arguments = Arguments(texts)
    gpus, tp = arguments.whole("world_size"), arguments.whole("model_parallel_size")
    stages = arguments.whole("pipe_parallel_size")
    pp = max(stages, 1) if stages is not None else None
    stage = _STAGE.search(arguments.text("zero_optimization") or "")
    positions = arguments.text("pos_emb")
    checkpointed = arguments.true("checkpoint_activations")
    return without_unknown(
        {
            "engine": "deepspeed-3d" if stages else "deepspeed-zero",
            "gpus": gpus,
            "tp": tp,
            "pp": pp,
            "dp": quotient(gpus, tp, pp),
            "zero_stage": int(stage[1]) if stage else arguments.whole("zero_stage"),
            "micro_batch": arguments.whole("train_micro_batch_size_per_gpu", "batch_size"),
            "micro_batches": arguments.whole("gradient_accumulation_steps", "gas"),
            "global_batch": arguments.whole("train_batch_size"),
            "seq": arguments.whole("seq_length"),
            "hidden": arguments.whole("hidden_size"),
            "layers": arguments.whole("num_layers"),
            "heads": arguments.whole("num_attention_heads"),
            "kv_heads": arguments.whole("num_kv_heads"),
            "ffn": arguments.whole("intermediate_size"),
            "vocab": arguments.whole("padded_vocab_size"),
            "untied_embeddings": arguments.true("no_weight_tying"),
            "position_embedding": {"rotary": "rope"}.get(positions, positions) if positions else None,
            "dtype": arguments.dtype("precision"),
            "recompute": None if checkpointed is None else "full" if checkpointed else "none",
            "flash_attention": "flash" in (arguments.text("attention_config") or "") or None,
            "steps_planned": arguments.whole("train_iters"),
            "log_interval": arguments.whole("log_interval"),
            "eval_interval": arguments.whole("eval_interval"),
            "save_interval": arguments.whole("save_interval", "checkpoint_factor"),
        }
    )


DIALECT = Dialect(
    name="gpt_neox",
    engine="deepspeed-3d",
    patterns=(
        figures(
            rf"\bsamples/sec: (?P<samples_per_s>\d{{1,12}}\.\d{{1,6}}) \| iteration {{1,20}}{STEP}/ {{0,20}}"
            rf"(?P<steps_planned>\d{{1,12}}) {{0,4}}\|(?= elapsed time per iteration \(ms\): {NUMBER} \| learning rate: )",
            " | elapsed time per iteration (ms): ",
            MEGATRON_NAMES + "tflops[TFLOPS]=approx_flops_per_GPU gflops[GFLOPS]=approx_flops_per_GPU",
        ),
        Pattern("argument", _ARGUMENT + r"updated {0,8}$"),
        Pattern("argument", _ARGUMENT + r"default {0,8}$"),
        # The launcher prints the same line for its own world of one.
        line("start", ".configure_distributed_args() using world size: "),
        Pattern(
            "fact",
            r"\.configure_distributed_args\(\) using world size: (?!1 )(?P<gpus>\d{1,9}) and model-parallel size: "
            r"(?P<tp>\d{1,9})\b",
        ),
        Pattern("fact", r"> total params: (?P<params>\d[\d,]{0,30})"),
        Pattern(
            "eval",
            r"\bvalidation results at (?:iteration {1,20}(?P<step>\d{1,12})|the end of training(?! for test)[^|\n]{0,40}) \| "
            r"[^\n]{0,400}?\blm_loss value: "
            r"(?P<loss_eval>[^| ]{1,24}) {0,4}\|",
        ),
        Pattern("end", r"\| exiting the program at iteration \d", ended="done"),
    ),
    interpret=interpret,
)
