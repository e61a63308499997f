"""What each engine says of itself, and what DeepSpeed and Megatron-LM are given: every figure, switch and name as
it was measured or read, so that one that moves by accident fails."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hpc_gpt.core.engines import ds_config_of, engines
from hpc_gpt.core.engines.base.deepspeed import DeepspeedFacts
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.megatron_program import megatron_arguments
from hpc_gpt.core.engines.base.training import States, Training
from hpc_gpt.core.settings.experiment import Data, Engine, Model
from tests.core.engines.trainings import SMALL
from tests.core.settings.test_ds_config import settings
from tests.megatron_lm.test_arguments import RATES, SCHEDULE, settle

# Of an engine of which nothing is said; {} is a set.
PLAIN = """
order=100 plan_order=100 packages=('torch',) trains_our_model=True is_program=False takes_command=False axes={}
shape_parts={}
cp_exchanges=('heads','keys') has_replicas=False zero_stages=(0,) default_stage=0 switches={OURS} alternatives={}
recomputes=('none','selective','full') recomputes_parts=False compiles_edges=True matmuls={none}
trains_fp16_on_cpu=True least_steps_after_warmup=0 no_save=
unfollowed={attn_pdrop,embd_pdrop,initializer_range,output_router_logits,resid_pdrop}
saves_weights_again=False counts_evaluation=True has_dropout=False has_fused_kernels=False
has_fused_gate=False has_composed_gelu=False selects_operators=False scatters_outputs=False
keeps_partitioned_outputs=False gathers_one_by_one=False overlaps_reduction=False reduces_experts_last=False
has_chunks=False
pads_vocabulary=True any_model=False
is_unfused=None synchronizations=1.0 scales_first=False is_pytorchs=False splits_by_dtensor=False buckets_a_reduction=1
gathers_ahead=False
"""
OURS = {"activation_offload", "attention", "compile", "compile_backend", "cp_exchange", "keep_residuals",
        "loss_chunks", "one_pass_loss", "recompute"}  # fmt: skip
# Of each engine what differs, but for the words of hints (tests/cli/refused/engines.txt).
ENGINES = {
    "deepspeed-3d": """order=10 plan_order=20 packages=('torch','deepspeed')
        axes={cp,pp,tp} zero_stages=(0,1) default_stage=1
        shape_parts={experts,qk_norm,rotated,window}
        switches={OURS,partition,sequence_parallel} compiles_edges=False trains_fp16_on_cpu=False
        has_fused_kernels=True keeps_partitioned_outputs=True buckets_a_reduction=2""",
    "deepspeed-zero": """order=20 plan_order=30 packages=('torch','deepspeed')
        axes={cp,tp} zero_stages=(0,1,2,3) default_stage=1
        shape_parts={experts,qk_norm,rotated,window}
        switches={OURS,offload,sequence_parallel,tiles} trains_fp16_on_cpu=False
        has_fused_kernels=True gathers_one_by_one=True synchronizations=0.1""",
    "fsdp": """order=30 plan_order=40 axes={cp,ep,tp} has_replicas=True shape_parts={experts,qk_norm,rotated,window}
        switches={OURS,gather_blocks,offload,prefetch,reshard} matmuls={fp8-tensor,none}
        selects_operators=True overlaps_reduction=True pads_vocabulary=False synchronizations=0.1 scales_first=True
        is_pytorchs=True""",
    "ddp": """order=40 plan_order=10 axes={cp,ep} switches={OURS,sharded_optimizer}
        shape_parts={experts,qk_norm,rotated,window}
        matmuls={fp8-tensor,none} overlaps_reduction=True reduces_experts_last=True pads_vocabulary=False
        synchronizations=0.1 scales_first=True""",
    "hf-deepspeed": """order=50 plan_order=60 packages=('torch','deepspeed','transformers') trains_our_model=False
        zero_stages=(1,2,3)
        default_stage=3 shape_parts={experts,qk_norm,rotated,window}
        switches={attention,compile,compile_backend,offload,recompute}
        recomputes=('none','full') compiles_edges=False trains_fp16_on_cpu=False
        has_composed_gelu=True
        gathers_one_by_one=True any_model=True""",
    "megatron-lm": """order=60 plan_order=50 packages=() trains_our_model=False is_program=True axes={cp,ep,etp,pp,tp}
        shape_parts={experts,mtp_layers,rotated} cp_exchanges=('heads','keys','ring') compiles_edges=False
        least_steps_after_warmup=1 recomputes_parts=True
        switches={cp_exchange,megatron_args,recompute,sequence_parallel,sharded_optimizer}
        saves_weights_again=True counts_evaluation=False
        unfollowed={attn_pdrop,embd_pdrop,initializer_range,output_router_logits,pad_token_id,resid_pdrop}
        has_dropout=True
        has_fused_kernels=True has_fused_gate=True scatters_outputs=True has_chunks=True""",
    "command": """order=70 packages=() trains_our_model=False is_program=True takes_command=True axes={cp,ep,etp,pp,tp}
        switches={recompute} recomputes_parts=True unfollowed={}""",
}  # fmt: skip
NAMES = [name for kind in (EngineFacts, States, DeepspeedFacts) for name in kind.__annotations__ if name != "name"]

# ZeRO-3 with all on the host, in bf16 on dp 2; `section: its keys`.
DEEPSPEED = """
.: train_batch_size=24 train_micro_batch_size_per_gpu=2 gradient_accumulation_steps=6 gradient_clipping=0.5
  prescale_gradients=False gradient_predivide_factor=1.0 communication_data_type=fp32 disable_python_gc=False
  zero_allow_untested_optimizer=True zero_force_ds_cpu_optimizer=False steps_per_print=None wall_clock_breakdown=False
  memory_breakdown=False dump_state=False
.data_types: grad_accum_dtype=fp32
.bf16: enabled=True immediate_grad_update=True check_grad_overflow=False
.fp16: enabled=False auto_cast=False loss_scale=0 initial_scale_power=16 loss_scale_window=1000 hysteresis=2
  consecutive_hysteresis=False min_loss_scale=1
.zero_optimization: stage=3 reduce_scatter=True contiguous_gradients=True overlap_comm=True reduce_bucket_size=1693376
  use_multi_rank_bucket_allreduce=True allgather_partitions=True allgather_bucket_size=1693376
  round_robin_gradients=False parameter_alignment=False load_from_fp32_weights=True elastic_checkpoint=False
  ignore_unused_parameters=True compute_grad_norm=True enable_sanity_checks=False sub_group_size=3176
  stage3_prefetch_bucket_size=50000000 stage3_param_persistence_threshold=128 stage3_module_granularity_threshold=0
  stage3_model_persistence_threshold=9223372036854775807 stage3_max_live_parameters=1000000000
  stage3_max_reuse_distance=1000000000 stage3_gather_16bit_weights_on_model_save=False
  stage3_use_all_reduce_for_fetch_params=False stage3_allgather_sequential=False memory_efficient_linear=False
  zero_hpz_partition_size=1 zero_quantized_weights=False zero_quantized_nontrainable_weights=False
  zero_quantized_gradients=False override_module_apply=True log_trace_cache_warnings=False
  pipeline_loading_checkpoint=False
.zero_optimization.offload_optimizer: device=cpu pin_memory=True buffer_count=4 pipeline_read=False
  pipeline_write=False fast_init=False ratio=1.0
.zero_optimization.offload_param: device=cpu pin_memory=True buffer_count=5 buffer_size=100000000
  max_in_cpu=1000000000
.checkpoint: tag_validation=Ignore load_universal=False use_node_local_storage=False
.timers.throughput: enabled=False synchronized=False
.flops_profiler: enabled=False
.comms_logger: enabled=False
"""

# Llama 3.1 of 8B over tp 2 x pp 2 x cp 2, with every rate; test_arguments.py reads each option of other runs.
MEGATRON = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 1024
--max-position-embeddings 1024 --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
--tokenizer-type NullTokenizer --vocab-size 128255 --make-vocab-size-divisible-by 64128 --micro-batch-size 2
--global-batch-size 16 --train-iters 90 --seed 11 --clip-grad 0.8 --weight-decay 0.03 --lr 0.01 --min-lr 0.002
--lr-decay-style WSD --lr-decay-iters 90 --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 7 --lr-warmup-iters 9
--log-interval 12 --eval-interval 30 --eval-iters 3 --save /run --load /run --save-interval 15 --split 900,100,0
--kv-channels 128 --normalization RMSNorm --norm-epsilon 1e-05 --num-query-groups 8 --position-embedding-type rope
--rotary-base 500000 --rope-scaling-factor 8.0 --data-path /data --optimizer adam --adam-beta1 0.4 --adam-beta2 0.5
--adam-eps 6e-07 --initial-loss-scale 65536 --loss-scale-window 1000 --hysteresis 2 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --fp16 --untie-embeddings-and-output-weights --sequence-parallel
--use-distributed-optimizer --deterministic-mode --swiglu --disable-bias-linear --group-query-attention
--use-rope-scaling --exit-signal-handler
"""


def said_of(engine: EngineFacts) -> dict[str, str]:
    return {name: shown(getattr(engine, name, 1)) for name in NAMES}


def shown(value: object) -> str:
    if isinstance(value, frozenset):
        rest = {"OURS", *(value - OURS)} if value >= OURS else value
        return f"{{{','.join(sorted(rest))}}}"
    return str(value).replace(" ", "")


def stated(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def flat(table: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield from flat(value, f"{at}.{key}") if isinstance(value, dict) else [f"{at or '.'}: {key}={value}"]


def test_each_engine_says_this_of_itself() -> None:
    plain, worded = stated(PLAIN), ("alternatives", "no_save")
    assert said_of(EngineFacts()) == plain
    for name, engine in engines().items():
        found, wanted = said_of(engine), plain | stated(ENGINES[name])
        assert {key: found[key] for key in found if key not in worded} == {
            key: wanted[key] for key in wanted if key not in worded
        }, name


def test_deepspeed_is_given_these_values() -> None:
    lines = [line.partition(": ") for line in DEEPSPEED.strip().replace("\n  ", " ").split("\n")]
    resolved = settings("bf16", 3, name="deepspeed-zero", offload="full")
    wanted = {f"{section}: {key}" for section, _, keys in lines for key in keys.split()}
    assert set(flat(ds_config_of(resolved))) == wanted
    assert list(flat(ds_config_of(settings())["pipeline"])) == [
        ".: activation_checkpoint_interval=0", ".: use_reentrant=False", ".: pipe_partitioned=False",
        ".: grad_partitioned=False",
    ]  # fmt: skip


def test_megatron_is_given_these_words() -> None:
    resolved = settle(
        model=Model(preset="llama3.1-8b", seq=1024), data=Data(eval_fraction=0.1),
        layout={"gpus": 16, "tp": 2, "pp": 2, "cp": 2},
        engine={"recompute": "full", "sequence_parallel": True, "sharded_optimizer": True},
        train=SCHEDULE | RATES | {"decay": "wsd", "decay_shape": "1-sqrt", "decay_steps": 7, "deterministic": True,
                                  "eval_every": 30, "eval_batches": 3, "save_every": 15},
    )  # fmt: skip
    assert " ".join(megatron_arguments(resolved, "/run", "/data")) == " ".join(MEGATRON.split())


REDUCE, GATHER, PRODUCTS = "--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"
OF_DP, OF_TP = {"dp_overlap": True, "gathers_wait": False}, {"tp_overlap": True}
SHARDED: dict[str, Any] = {"dp": 2, "sharded_optimizer": True}
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("more", "arguments", "changed"),
    [
        ({}, (), {}), ({"sharded_optimizer": True}, (), {}), ({"dp": 2}, (REDUCE,), OF_DP),
        ({"cp": 2}, (REDUCE,), OF_DP),
        (SHARDED, (REDUCE, GATHER), OF_DP), ({**SHARDED, "dp_overlap": True}, (), {}),
        ({**SHARDED, "dp_overlap": True, "gathers_wait": True}, (GATHER,), OF_DP),
        ({"dp": 2, "dp_overlap": True, "gathers_wait": True}, (), {}), ({"tp": 2}, (), {}),
        (SPLIT, (PRODUCTS,), OF_TP), ({**SPLIT, "tp_overlap": True}, (), {}),
        ({**SHARDED, **SPLIT}, (REDUCE, GATHER, PRODUCTS), OF_DP | OF_TP),
    ],
)  # fmt: skip
def test_what_hides_communication_is_what_is_not_hidden(more: dict, arguments: tuple, changed: dict) -> None:
    assert engines()["megatron-lm"].overlaps(Training(SMALL, **more)) == (arguments, changed)


def test_chunks_are_an_argument() -> None:
    facts, option = engines()["megatron-lm"], "--num-layers-per-virtual-pipeline-stage"
    for words, chunks in (((), 1), ((option, "3"), 4), ((f"{option}=2",), 6), ((option, "0"), 1), ((option, "x"), 1),
                          ((option, "24"), 1), ((option,), 1)):  # fmt: skip
        assert facts.chunks(Engine("megatron-lm", megatron_args=words), 24, 2) == chunks, words
    given = Engine("megatron-lm", megatron_args=("--a", option, "4", f"{option}=2", "--b", "5"))
    for vp, added in ((1, ()), (3, (option, "4"))):
        engine = facts.with_chunks(given, Training(SMALL, pp=2, vp=vp))
        assert engine.megatron_args == ("--a", "--b", "5", *added)
