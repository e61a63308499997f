"""The interface of an engine: every question that others ask it, with the answers of plain data parallelism in PyTorch.

An engine's module has a subclass with the answers in which it differs. `trainer/engines/` has a module of the same
name, which trains; without one, the engine is another program, which the job starts.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from hpc_gpt.core.engines.base.owners import Deal
from hpc_gpt.core.engines.base.training import AttentionMask, StateBytes, States, Training, plain_states
from hpc_gpt.core.errors import ConfigError, Fault
from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.recomputation import RECOMPUTES, Recompute, recomputation
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Command, CpExchange, Data, Engine, Matmul, Train
from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.services import Plan
from hpc_gpt.core.settings.shape_split import context_fault
from hpc_gpt.core.settings.sized import Sized

# Switches of the model: every engine that trains our own model accepts them.
OUR_MODEL = frozenset(
    {
        "recompute",
        "attention",
        "compile",
        "compile_backend",
        "keep_residuals",
        "activation_offload",
        "loss_chunks",
        "one_pass_loss",
        "cp_exchange",
    }
)


# The parts of `ModelShape.special_keys` that our own model has.
OUR_PARTS = frozenset(name for name, rules in key_rules(Model).items() if rules.part and rules.trains)


class EngineFacts(States):
    """The facts about an engine, without torch."""

    # --- what it is
    order: ClassVar[int] = 100  # the place in lists
    plan_order: ClassVar[int] = 100  # of equally fast engines the plan takes the one with the lowest number
    packages: ClassVar[tuple[str, ...]] = ("torch",)  # the packages that its ranks need in addition to the launcher's
    trains_our_model: ClassVar[bool] = True  # whether it trains our model with our loss, not another program's
    is_program: ClassVar[bool] = False  # whether the job starts another program instead of our trainer
    takes_command: ClassVar[bool] = False  # whether it starts the program of [command]

    # --- what it splits, and its switches in [engine]
    axes: ClassVar[frozenset[str]] = frozenset()  # the axes that it can split besides dp
    shape_parts: ClassVar[frozenset[str]] = frozenset()  # `special_keys` of shapes that it trains, too
    # Whether it can shard within groups of layout.shard ranks, each of which holds a replica.
    has_replicas: ClassVar[bool] = False
    cp_exchanges: ClassVar[tuple[CpExchange, ...]] = ("heads", "keys")  # values of engine.cp_exchange
    zero_stages: ClassVar[tuple[int, ...]] = (0,)
    default_stage: ClassVar[int] = 0
    switches: ClassVar[frozenset[str]] = OUR_MODEL
    alternatives: ClassVar[Mapping[str, str]] = {}  # {a switch that it lacks: another setting that does the same}
    recomputes: ClassVar[tuple[Recompute, ...]] = RECOMPUTES
    recomputes_parts: ClassVar[bool] = False  # whether it also recomputes a share of the layers, or a list of modules
    compiles_edges: ClassVar[bool] = True  # whether embedding and head can be compiled, too
    # Number formats in which it can train the layers' matrix products (train.matmul).
    matmuls: ClassVar[frozenset[Matmul]] = frozenset({"none"})
    trains_fp16_on_cpu: ClassVar[bool] = True
    least_steps_after_warmup: ClassVar[int] = 0
    no_save: ClassVar[str] = ""  # why it cannot save on request, and what to do instead

    # Keys of a config.json that matter only to training, and that it does not follow: `submit` and `doctor` name them.
    unfollowed: ClassVar[frozenset[str]] = frozenset(
        {"resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "output_router_logits"}
    )

    # --- its checkpoints
    # Whether it saves 16-bit weights, too, not the fp32 master weights alone.
    saves_weights_again: ClassVar[bool] = False

    # --- memory and time
    counts_evaluation: ClassVar[bool] = True  # whether an evaluation is predicted as our loop does it
    has_dropout: ClassVar[bool] = False
    has_fused_kernels: ClassVar[bool] = False  # whether it has kernels of its own for norms, activations and residuals
    has_fused_gate: ClassVar[bool] = False  # whether one kernel computes the gate and its product
    # Whether GELU is a chain of products and a tanh, each of which keeps its inputs.
    has_composed_gelu: ClassVar[bool] = False
    selects_operators: ClassVar[bool] = False  # whether selective recomputation chooses operators, as in torchtitan
    scatters_outputs: ClassVar[bool] = False  # whether each tensor-parallel rank sends only its part to the next stage
    keeps_partitioned_outputs: ClassVar[bool] = False  # whether tp divides the outputs that wait for their gradients
    gathers_one_by_one: ClassVar[bool] = False  # whether ZeRO-3 gathers each parameter by itself
    overlaps_reduction: ClassVar[bool] = False  # whether gradients are reduced during the backward pass
    reduces_experts_last: ClassVar[bool] = False  # but those of experts, if ep divides them, only after it
    has_chunks: ClassVar[bool] = False  # whether a pipeline stage can have interleaved chunks

    @property
    def has_zero(self) -> bool:
        """Whether the engine shards by a ZeRO stage."""
        return len(self.zero_stages) > 1

    @property
    def trainer(self) -> str:
        """The module that trains; for a program, the module of the rank that starts it, which needs no torch."""
        return f"hpc_gpt.trainer.engines.{self.name.replace('-', '_')}"

    @property
    def writes_metrics(self) -> bool:
        """Whether our loop writes the metrics, with a loss per line; another program's are read from its log."""
        return not self.is_program

    def splits(self, axis: str) -> bool:
        """Whether the engine splits the model over `axis` (tp, pp or cp)."""
        return axis in self.axes

    def can_recompute(self, recompute: Recompute) -> bool:
        """Whether it has this value of engine.recompute."""
        return recompute in self.recomputes or (self.recomputes_parts and recompute not in RECOMPUTES)

    def nearest_recompute(self, recompute: Recompute) -> Recompute:
        """The nearest of its words to another value: full for a half of the layers, or for a whole MLP."""
        again = recomputation(recompute)
        whole = again.share >= 0.5 or not again.modules.isdisjoint(("mlp", "moe"))
        words: tuple[Recompute, ...] = ("full",) if whole else ("selective", "none")
        return next(word for word in words if word in self.recomputes)

    def follows(self, key: str) -> bool:
        """Whether the engine follows a key of [train], as some are only for our own loop."""
        return not (self.is_program and key_rules(Train)[key].of_our_loop)

    # --- rules

    def program_of(self, command: Command) -> Command | None:
        """`[command]`, with its values filled in, if the engine starts that, else None."""
        return None

    def table_faults(self, command: Command, plan: Plan, data: Data) -> Iterator[Fault]:
        """The faults of `[command]` and `[plan]`, or that the engine has no use for them; those of `[data]` that the
        engine cannot read."""
        if command != Command():
            yield Fault(
                f"the table [command] is given, but engine {self.name} does not start a program of yours",
                'set engine.name = "command", or leave [command] out',
                keys=("command",),
            )
        if plan != Plan():
            yield Fault(
                f"the table [plan] is given, but plan already knows engine {self.name}",
                "leave [plan] out, which is for engine command; for Megatron-LM set engine.megatron_args",
                keys=("plan",),
            )

    def planned_as(self, plan: Plan) -> str | None:
        """The engine that stands for a user's own program in a plan; None if this engine starts none. ConfigError if
        `[plan]` does not name one."""
        return None

    def refuse_program(self, why: str, hint: str) -> None:
        """Raises ConfigError if the engine starts a user's own program. `why`: the end of the message, which says
        what such a program prevents."""
        if self.takes_command:
            raise ConfigError(f"engine {self.name} starts a program of your own: {why}", hint)

    def check_export(self) -> None:
        """Raises ConfigError if its checkpoints have another program's format."""
        if self.takes_command:
            message = "the run's checkpoints are its program's own: nothing to export"
            raise ConfigError(message, "the program itself converts them")
        if self.is_program:
            raise ConfigError(
                f"engine {self.name} keeps checkpoints in its own format, which hpc-gpt does not read",
                "its own program converts them; Megatron-LM has tools/checkpoint/convert.py",
            )

    def check_branch(self, run: str) -> None:
        """Raises ConfigError if other runs cannot begin from a checkpoint of `run`."""
        if self.is_program:
            raise ConfigError(
                f"run {run} uses engine {self.name}: its checkpoints belong to its program, and stay with the run",
                "submit a new run, with the program's own option to load one",
            )

    def stage_that_runs(self, stage: int) -> int:
        """The ZeRO stage that runs if `stage` is requested."""
        return stage

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        """The settings that only this engine cannot run; a plan asks the same."""
        return iter(())

    def shape_fault(self, shape: ModelShape) -> str | None:
        """The reason why the engine cannot train a model of this shape; None if it can."""
        if shape.embedding_norm:
            return "it has a norm after the embedding"
        if shape.is_mixture and self.trains_our_model and shape.bias == "all":
            return 'its experts have biases (model.bias = "all"; "none" and "qkv" have none there)'
        lacking = [key_rules(Model)[key].part for key in shape.special_keys if key not in self.shape_parts]
        return f"it has {', '.join(lacking)}" if lacking else None

    def context_fault(self, shape: ModelShape, layout: Layout, engine: Engine) -> Fault | None:
        """The reason why the engine cannot divide samples over cp for such a model; None if it can."""
        return context_fault(shape, layout, engine.cp_exchange, engine.sequence_parallel)

    def has_optimizer(self, optimizer: OptimizerFacts) -> bool:
        """Whether the engine can train with it."""
        return True

    def offload_faults(self, engine: Engine) -> Iterator[Fault]:
        """The reasons why the engine cannot offload as requested; only called if it has the switch."""
        return iter(())

    def data_of(self, data: Data) -> Data:
        """`[data]` as the engine reads it."""
        return data

    def sized_faults(self, resolved: Sized) -> Iterator[Fault]:
        """The contradictions that show only once all settings are known, as the program would refuse them after hours
        in the queue."""
        return iter(())

    def notes(self, resolved: Sized) -> Iterator[str]:
        """The notes for a user on what the engine does differently with such a run."""
        return iter(())

    def config_files(self, resolved: Resolved) -> dict[str, Any]:
        """The files for the run folder with the configuration of a library: {name: JSON values}."""
        return {}

    def check_program(self, resolved: Resolved, environment: Mapping[str, str]) -> None:
        """Refuses a run if the job will not find its program; `environment`: the submitter's."""

    def why_not(self, verb: str, resolved: Resolved) -> str:
        """The reason why a run cannot `save`, `stop` or `requeue` on request; empty if it can."""
        return self.no_save if verb == "save" else ""

    # --- as the planner sees it

    def is_searched(self, profile: ClusterProfile | None) -> bool:
        """Whether a plan tries the engine without a request: for the cluster profile, or for any if that is None."""
        return self.trains_our_model

    def keeps_scores(self, engine: Engine, device: str | None) -> bool:
        """Whether attention keeps its matrix of scores: among PyTorch's kernels only `math` does."""
        return engine.attention == "math"

    def mask(self, engine: Engine, shape: ModelShape, dtype: str, device: str | None, documents: bool) -> AttentionMask:
        """The mask that attention gets, with `documents` kept apart or a window. Ours needs none in 16 bits from sm_80
        on, with heads of up to 256; windows need none with FlexAttention either (trainer/engines/attention.py)."""
        if not self.trains_our_model:
            return "none"
        is_newer = not (device or "cpu").startswith(("v100", "cpu"))
        takes_rows = is_newer and dtype != "fp32" and shape.head_width <= 256 and engine.attention in ("auto", "flash")
        flexes = is_newer and engine.attention == "auto" and shape.head_width >= 16
        if takes_rows:
            return "none"
        if shape.windowed and not flexes:
            return "documents" if documents else "window"
        if not shape.windowed:
            return "documents" if documents else "none"
        return "full" if documents and shape.windowed < shape.layers else "none"

    def splits_edges(self, layers: int, pp: int) -> bool:
        """Whether embedding and head each take a layer's place in the split over stages."""
        return False

    def chunks(self, engine: Engine, layers: int, pp: int) -> int:
        """The number of interleaved chunks per pipeline stage."""
        return 1

    def stated_traits(self, engine: Engine) -> dict[str, Any]:
        """The fields of a Training that the engine's own arguments in `[engine]` state, or that it has by itself."""
        return {"dispatcher": "alltoall"} if self.trains_our_model and "ep" in self.axes else {}

    def stated_recompute(self, engine: Engine) -> Recompute | None:
        """The recomputation that the engine's own arguments in `[engine]` state; None if they state none."""
        return None

    def overlaps(self, training: Training) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Returns (arguments that hide communication without changing the arithmetic, the fields of a Training that
        they change). A plan shows them beside the best layout, as the program may lack them."""
        return (), {}

    def with_chunks(self, engine: Engine, training: Training) -> Engine:
        """`[engine]` with the training's chunks."""
        return engine

    def rule(self, training: Training) -> str:
        return "fp32"

    def state_bytes(self, training: Training) -> StateBytes:
        return plain_states(training)

    def stops_early(self, training: Training) -> bool:
        """A layer of ours that is compiled, or has products in 8 bits, saves its tensors at its end."""
        return self.trains_our_model and not training.compiled and training.matmul == "none"

    def sharding(self, training: Training) -> int:
        """The ZeRO stage that describes what is sharded over dp."""
        return training.zero_stage

    def optimizer_ranks(self, training: Training) -> int:
        """The number of ranks over which the optimizer's states are divided."""
        return training.data_ranks if self.sharding(training) >= 1 or training.sharded_optimizer else 1

    def deals(self, training: Training) -> tuple[Deal, ...]:
        """The parameters that ranks update for each other; none if each rank updates by itself what it has."""
        return ()

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """The optimizer's own; a sharded one distributes whole parameters."""
        if training.offload != "none":
            return 0.0
        params /= training.data_ranks if training.sharded_optimizer else 1
        return training.optimizer_facts.update_bytes(training.optimizer_mode, params, matrix, table)

    def gathered(self, training: Training, gradients: bool = True) -> tuple[float, float]:
        """Returns (bytes in the layers' passes, bytes in the loss) of gathered weights; with `gradients`, also of
        theirs."""
        return 0.0, 0.0

    def blocks_gathered(self, training: Training) -> int:
        """The number of layers whose sharded weights are gathered together."""
        return 1

    def overwrites_logits(self, training: Training) -> bool:
        """Whether the gradient of the logits overwrites them: in one pass, or compiled together with the head, as in
        the pieces of a chunked loss. With tp the loss has its own backward pass, which compiles to the same code."""
        with_head = training.compiled_head or (training.compiled_loss and training.loss_chunks > 1)
        return training.one_pass_loss or (with_head and training.tp == 1)

    def logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak of a backward pass (counted: tests/planner/test_held_bytes.py).

        The log-softmax, its gradient and the gradient of the logits, all in fp32 whatever the dtype, 4 each. Over tp:
        the softmax, the gradient, and its copy in 16 bits. Compiled: the logits and their gradient.
        """
        width = training.width
        if self.overwrites_logits(training):
            return width
        if training.tp > 1:
            return 8.0 if training.dtype == "fp32" else 10.0
        return 2 * width if training.compiled_loss else 12.0

    def evaluated_logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak of an evaluation (counted like `logit_bytes`).

        The logits, their fp32 copy, and the log-softmax, which overwrites the copy over tp. In fp32 the copy is only
        made to drop the padding of the vocabulary. Compiled, or in one pass: only the logits.
        """
        width = training.width
        if training.one_pass_loss or training.compiled_loss:
            return width
        if training.tp > 1:
            return width + 4
        has_copy = training.dtype != "fp32" or training.shape.padded_vocab > training.shape.vocab
        return width + (8.0 if has_copy else 4.0)

    # --- communication

    def reduced_bytes(self, training: Training) -> float:
        """Bytes per parameter of the gradients that are reduced over dp and cp: ours in fp32, whatever the dtype."""
        summed = training.grad_sum or ("fp32" if training.program_states is None else "bf16")
        return 4.0 if summed == "fp32" else 2.0

    def update_traffic(self, training: Training) -> tuple[float, float]:
        """Bytes per parameter that rings over cp x dp send for a step's update, if weights are not sharded: (to sum up
        gradients, on the way back). A sharded optimizer gathers weights, any other the sums."""
        summed = self.reduced_bytes(training)
        return summed, training.width if training.sharded_optimizer else summed

    def sends_of_owners(self, training: Training) -> list[tuple[float, int, int]]:
        """(bytes, ranks, their distance) of each send after an update, from the rank that has done it to the others."""
        return []

    def sends_parts(self, training: Training) -> bool:
        """Whether each of tp ranks routes its part of a micro-batch's tokens and sends copies of it to experts, whose
        ranks gather the rows that they share, as in Megatron-LM and others. In our model each rank sends copies of all
        tokens to its part of each expert, and the outputs of tokens are summed over tp, as an MLP's are."""
        return training.program_states is not None or self.is_program

    # --- other programs of its kind

    pads_vocabulary: ClassVar[bool] = True  # so it trains a model like GPT-2's, unless its log says otherwise
    any_model: ClassVar[bool] = False  # it trains any model of a library

    def engine_with_deepspeed(self, has_stages: bool) -> str | None:
        """The engine's name for a log of its program in which DeepSpeed prints too; `has_stages`: with a pipeline. None
        if its program does not use DeepSpeed."""
        return None
