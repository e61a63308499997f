"""A checkout laid out as Megatron-LM's: the stand-in for its program, and an argument parser in both of its styles."""

import shutil
from pathlib import Path

# As in megatron/training/config/training_config.py: fields that become options.
CONFIG = """
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class BaseConfig:
    global_batch_size: int | None = None


@dataclass(kw_only=True)
class TrainingConfig(BaseConfig):
    micro_batch_size: int | None = None
    train_iters: int | None = None
    exit_signal_handler: bool = False
    manual_gc_eval: bool = True
    override: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--override-opt_param-scheduler"]}})
    wd_incr_steps: int | None = field(init=False, default=None)
    timers: object = None
"""

# As in megatron/training/arguments.py: options one by one, and a factory for the fields of a class.
ARGUMENTS = """
import argparse


class ArgumentGroupFactory:
    def __init__(self, kind, exclude=None):
        self.names = [name for base in reversed(kind.__mro__) for name in getattr(base, "__annotations__", {})]
        self.kind, self.exclude = kind, exclude or []

    def build_group(self, parser):
        for name in self.names:
            if name not in self.exclude and name != "wd_incr_steps":
                flag = getattr(self.kind, name) is False
                option = "--" + name.replace("_", "-")
                parser.add_argument(option, **({"action": "store_true"} if flag else {"type": int}))


def add_arguments(parser):
    from megatron.training.config.training_config import TrainingConfig

    exclude = [
        # cannot be given on a command line
        "timers",
    ]
    factory = ArgumentGroupFactory(TrainingConfig, exclude=exclude)
    factory.build_group(parser)
    group = parser.add_argument_group(title="others")
    group.add_argument("--data-path", nargs="*", default=None)
    group.add_argument("--log-throughput", action=argparse.BooleanOptionalAction)
%s
"""

# What follows an option's name in add_argument -> the options.
_OPTIONS = {
    "type=int": "tensor-model-parallel-size pipeline-model-parallel-size num-layers hidden-size ffn-hidden-size "
    "num-attention-heads seq-length max-position-embeddings vocab-size make-vocab-size-divisible-by seed log-interval "
    "eval-interval eval-iters save-interval lr-decay-iters lr-warmup-iters lr-wsd-decay-iters "
    "recompute-num-layers hysteresis loss-scale-window initial-loss-scale num-layers-per-virtual-pipeline-stage "
    "kv-channels num-query-groups rotary-base no-rope-freq context-parallel-size num-experts moe-router-topk "
    "moe-ffn-hidden-size expert-model-parallel-size expert-tensor-parallel-size",
    "type=float": "attention-dropout hidden-dropout init-method-std clip-grad weight-decay lr min-lr adam-beta1 "
    "adam-beta2 adam-eps sgd-momentum norm-epsilon rope-scaling-factor moe-aux-loss-coeff",
    "type=str": "tokenizer-type lr-decay-style lr-wsd-decay-style save load split optimizer recompute-granularity "
    "recompute-method normalization position-embedding-type cp-comm-type moe-router-score-function moe-router-dtype "
    "moe-token-dispatcher-type moe-router-load-balancing-type",
    "nargs='*', type=str": "recompute-modules",
    "action='store_true'": "fp16 bf16 untie-embeddings-and-output-weights sequence-parallel use-distributed-optimizer "
    "deterministic-mode mock-data swiglu disable-bias-linear add-qkv-bias group-query-attention qk-layernorm "
    "use-rope-scaling account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
    "moe-grouped-gemm",
}


def make_checkout(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """A checkout that knows every option but those in `without`."""
    lines = [
        f"    group.add_argument('--{name}', {how})"
        for how, names in _OPTIONS.items()
        for name in names.split()
        if name not in without
    ]
    training = folder / "megatron" / "training"
    (training / "config").mkdir(parents=True)
    (training / "arguments.py").write_text(ARGUMENTS % "\n".join(lines))
    (training / "config" / "training_config.py").write_text(CONFIG)
    shutil.copy(Path(__file__).with_name("stand_in.py"), folder / "pretrain_gpt.py")
    return folder
