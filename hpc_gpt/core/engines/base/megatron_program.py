"""Megatron-LM's program, pretrain_gpt.py: its arguments for a run, and the checkout that the run uses.

Source of the options: megatron/training/arguments.py and megatron/training/config/ of NVIDIA/Megatron-LM (main of
August 2026), megatron/arguments.py before March 2024. The options used here have had these names since 2023.

A checkout's parser is read, never run: to import it would need a GPU build of torch, and take minutes.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.engines.base.megatron_experts import OVERLAP, expert_options, values_of
from hpc_gpt.core.engines.base.megatron_recompute import recompute_options
from hpc_gpt.core.errors import ConfigError, Fault, raise_faults
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.schedule import SCHEDULES, decay_steps_of
from hpc_gpt.core.settings.sized import Sized

VARIABLE, PROGRAM = "MEGATRON_LM", "pretrain_gpt.py"
# The parser since March 2024, and the one before.
_PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")
_OPTION = re.compile(r"""["'](--\w[\w-]*)["']""")
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
# Megatron-LM's names for the decay shapes of WSD; minus_sqrt exists since core_v0.13 (2025).
_WSD_STYLES = {"linear": "linear", "1-sqrt": "minus_sqrt"}
# {engine.cp_exchange: --cp-comm-type}. The parser accepts any text; Transformer Engine compares with these (the help
# has another name for one of them; megatron/core/transformer/transformer_config.py, cp_comm_type).
_CP_COMM_TYPES = {"heads": "a2a", "keys": "all_gather", "ring": "p2p"}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# {option: Megatron's own condition} of options whose communication needs hardware queues of its own.
_FSDP = "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset. (megatron/training/arguments.py)"
_OF_STREAMS = {
    OVERLAP: "Requirements for EP A2A Overlap: expert_model_parallel_size > 1, "
    "CUDA_DEVICE_MAX_CONNECTIONS > 1. (megatron/core/transformer/moe/README.md)",
    "--use-torch-fsdp2": _FSDP,
    "--use-megatron-fsdp": _FSDP,
}
_IN_ORDER = (
    "Using tensor model parallelism or context parallelism require setting the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1, before Blackwell (megatron/training/arguments.py)"
)
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"


def megatron_arguments(resolved: Sized, checkpoints: str, data: str | list[str] | None) -> list[str]:
    """The arguments of pretrain_gpt.py. `checkpoints`: the folder in which it saves and from which it resumes; `data`:
    the path before .bin and .idx, for a mixture a weight and such a path per source, None for mock data.

    The embedding gets as many rows as in our engines. NullTokenizer's `--vocab-size` does not count the end-of-document
    token in versions before 2026, and counts it since then; one less than our vocabulary gives these rows in both.
    """
    own = words_of(resolved.engine.megatron_args)
    arguments: dict[str, object] = {
        **_sizes(resolved),
        **_schedule(resolved, checkpoints),
        **_architecture(resolved.model),
        **expert_options(resolved.model, resolved.layout, resolved.train.dtype, own),
        "--data-path": data,
        **_arithmetic(resolved),
        "--mock-data": data is None,
        **_switches(resolved),
    }
    argv = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            argv += [name, *map(str, value if isinstance(value, list) else [value] if value is not True else [])]
    return [*argv, *resolved.engine.megatron_args]


def _sizes(resolved: Sized) -> dict[str, object]:
    """The options of shape and layout, {option: value}: True for one without a value, None or False to omit it."""
    model, layout = resolved.model, resolved.layout
    return {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp if layout.cp > 1 else None,
        "--cp-comm-type": _CP_COMM_TYPES[resolved.engine.cp_exchange] if layout.cp > 1 else None,
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.mlp_width if model.ffn or not model.is_mixture else model.expert_ffn,
        "--num-attention-heads": model.heads,
        "--seq-length": model.seq,
        "--max-position-embeddings": model.seq,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--init-method-std": 0.02,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": model.vocab - 1,
        "--make-vocab-size-divisible-by": model.padded_vocab // layout.tp,
    }


def _schedule(resolved: Sized, checkpoints: str) -> dict[str, object]:
    """The options of batch, steps, learning rate, logging, evaluation and saving."""
    batch, train = resolved.batch, resolved.train
    evaluation = round(1000 * resolved.data.eval_fraction)
    return {
        "--micro-batch-size": batch.micro_batch,
        "--global-batch-size": batch.global_batch,
        "--train-iters": train.steps,
        "--seed": train.seed,
        "--clip-grad": train.clip,
        "--weight-decay": train.weight_decay,
        "--lr": train.lr,
        "--min-lr": train.min_lr,
        "--lr-decay-style": SCHEDULES[train.decay].megatron,
        "--lr-decay-iters": train.steps,
        "--lr-wsd-decay-style": train.decay == "wsd" and _WSD_STYLES[train.decay_shape],
        "--lr-wsd-decay-iters": train.decay == "wsd" and decay_steps_of(train),
        "--lr-warmup-iters": train.warmup_steps,
        "--log-interval": train.log_every,
        "--eval-interval": train.eval_every or train.steps,
        "--eval-iters": train.eval_batches if train.eval_every else 0,
        "--save": checkpoints,
        "--load": checkpoints,
        "--save-interval": train.save_every or train.steps,  # --save requires it; the last step is always saved
        "--split": f"{1000 - evaluation},{evaluation},0",  # thousandths for training, validation and test
    }


def _architecture(model: ModelShape) -> dict[str, object]:
    """The options of an architecture that differs from GPT-2's."""
    options: dict[str, object] = {}
    if not model.is_gpt2:
        norm = "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
        options |= {"--kv-channels": model.head_width, "--normalization": norm, "--norm-epsilon": model.norm_eps}
    if model.is_grouped:
        options["--num-query-groups"] = model.key_heads
    if model.positions == "rope":
        options |= {"--position-embedding-type": "rope", "--rotary-base": int(model.rope_theta)}
    if model.rope_scaling is not None:
        options["--rope-scaling-factor"] = model.rope_scaling.factor
    if model.rotated != 1:
        options["--rotary-percent"] = model.rotated
    if model.mtp_layers:
        options["--mtp-num-layers"] = model.mtp_layers
    return options | {"--no-rope-freq": model.nope_every}


def _arithmetic(resolved: Sized) -> dict[str, object]:
    """The options of optimizer, loss scale and recomputation."""
    train, engine, model = resolved.train, resolved.engine, resolved.model
    options = dict(optimizer_named(train.optimizer).megatron_options(train) or {})
    if train.dtype == "fp16":
        # The loss scale of our own engines (ds_config).
        options |= {"--initial-loss-scale": 65536, "--loss-scale-window": 1000, "--hysteresis": 2}
    layers = layers_of_chunk(engine, model.layers, resolved.layout.pp)
    return options | recompute_options(engine.recompute, layers)


def _switches(resolved: Sized) -> dict[str, object]:
    """The options without a value."""
    model, layout, train, engine = resolved.model, resolved.layout, resolved.train, resolved.engine
    return {
        "--fp16": train.dtype == "fp16",
        "--bf16": train.dtype == "bf16",
        "--untie-embeddings-and-output-weights": not model.tied,
        "--sequence-parallel": engine.sequence_parallel,
        "--use-distributed-optimizer": engine.sharded_optimizer,
        "--deterministic-mode": train.deterministic,
        "--swiglu": model.is_gated,
        "--disable-bias-linear": model.bias != "all",
        "--add-qkv-bias": model.bias == "qkv",
        "--group-query-attention": model.is_grouped,
        "--qk-layernorm": model.qk_norm is True,
        "--use-rope-scaling": model.rope_scaling is not None,
        "--account-for-embedding-in-pipeline-split": splits_edges(model.layers, layout.pp),
        "--account-for-loss-in-pipeline-split": splits_edges(model.layers, layout.pp),
        # After SIGTERM all ranks save and end together after the current iteration.
        "--exit-signal-handler": True,
    }


def splits_edges(layers: int, pp: int) -> bool:
    """Whether embedding and head each take a layer's place in the split over stages: only if the split is even so but
    not otherwise, as with Llama 3.1's 126 layers over 16 (Grattafiori et al. 2024, arXiv:2407.21783, 3.3.2)."""
    return pp > 1 and layers % pp > 0 and (layers + 2) % pp == 0


def chunks_of(engine: Engine, layers: int, pp: int) -> int:
    """The chunks per stage, by Megatron-LM's own arguments."""
    layers += 2 * splits_edges(layers, pp)
    deep = values_of(words_of(engine.megatron_args)).get(INTERLEAVED, "")
    return max(1, layers // (pp * int(deep))) if deep.isdigit() and int(deep) else 1


def layers_of_chunk(engine: Engine, layers: int, pp: int) -> int:
    """The layers of a chunk of a pipeline stage; where embedding and head take a layer's place, with that."""
    return (layers + 2 * splits_edges(layers, pp)) // (pp * chunks_of(engine, layers, pp))


def words_of(arguments: Sequence[str]) -> list[str]:
    """Splits each `option=value` into option and value.

    >>> words_of(["--seq-length=128", "--bf16"])
    ['--seq-length', '128', '--bf16']
    """
    return [part for argument in arguments for part in argument.split("=", 1)]


def connections_of(arguments: Sequence[str], layout: Layout, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns (CUDA_DEVICE_MAX_CONNECTIONS for the program, a warning if the user's own value is not what it needs).

    1 makes kernels run in the order of their launch, which overlaps the communication of tp and cp; some options need
    more. The user's value always holds.
    """
    option = next((option for option in _OF_STREAMS if option in words_of(arguments)), None)
    given = environment.get(CONNECTIONS)
    if given is None:
        return ("32" if option else "1"), None
    is_one = given == "1"
    if option and is_one:
        needs = _OF_STREAMS[option]
    elif not option and not is_one and layout.tp * layout.cp > 1:
        option, needs = f"tp {layout.tp} x cp {layout.cp}", _IN_ORDER
    else:
        return given, None
    return given, f"{CONNECTIONS} is {given} in your environment, and Megatron-LM says for {option}: {needs}"


def option_names(arguments: Sequence[str]) -> list[str]:
    """The names of the options in a command line."""
    return [word.split("=")[0] for word in arguments if word.startswith("--")]


def checkout_of(resolved: Sized, environment: Mapping[str, str]) -> Path:
    """The checkout that a run uses, as its job finds it: $MEGATRON_LM, else the cluster profile's megatron_lm.

    ConfigError if neither names one, or if its path is not absolute.
    """
    profile = resolved.cluster
    named = profile.environment.get(VARIABLE) or environment.get(VARIABLE) or profile.megatron_lm
    if not named:
        raise ConfigError(
            f"engine megatron-lm runs a checkout of Megatron-LM, but neither {VARIABLE} nor profile {profile.name} "
            "names one",
            f'export {VARIABLE}=/path/to/Megatron-LM, or megatron_lm = "/path/to/Megatron-LM" in the cluster profile',
        )
    checkout = Path(named).expanduser()
    if not checkout.is_absolute():
        raise ConfigError(
            f"the checkout of Megatron-LM is {named}, but a job starts in another folder", "give an absolute path"
        )
    return checkout


def check_checkout(checkout: Path, options: Collection[str] = ()) -> None:
    """Raises ConfigError, with similar names, unless the folder is a checkout whose parser has the options."""
    parser = next((checkout / name for name in _PARSERS if (checkout / name).is_file()), checkout / _PARSERS[0])
    for needed in (checkout / PROGRAM, *([parser] if options else [])):
        if not needed.is_file():
            raise ConfigError(
                f"{checkout} is not a Megatron-LM checkout: it has no {needed.relative_to(checkout)}",
                "git clone https://github.com/NVIDIA/Megatron-LM, and name that folder",
            )
    valid = known_options(parser, checkout / "megatron") if options else set()
    faults = list[Fault]()
    for option in options:
        # `name: bool = True` has the options --no-name and --disable-name.
        if option not in valid and re.sub(r"^--(no|disable)-", "--", option) not in valid:
            close = difflib.get_close_matches(option, sorted(valid), n=2)
            message = f"{checkout} does not know {option}" + (f"; it has {' and '.join(close)}" if close else "")
            faults.append(Fault(message, "use a checkout of 2023 or later: git -C … checkout core_v0.12.0"))
    raise_faults(faults)


def known_options(parser: Path, package: Path) -> set[str]:
    """The options of a checkout's argument parser, read from its source.

    Some are written in the parser as "--name". Since 2025 others are fields of the `package`'s dataclasses, which are
    passed to `ArgumentGroupFactory(Class, …)`; every field in the package counts as known.
    """
    source = parser.read_text(encoding="utf-8", errors="replace")
    options = set(_OPTION.findall(source))
    for path in package.rglob("*.py") if "ArgumentGroupFactory(" in source else ():
        text = path.read_text(encoding="utf-8", errors="replace")
        options |= {f"--{field.replace('_', '-')}" for field in _FIELD.findall(text)} | set(_OPTION.findall(text))
    return options
