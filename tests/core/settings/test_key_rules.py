"""Every key of an experiment and of a cluster profile: its default, which a user relies on who leaves it out, and what
may be done with it. `key=default`, or `key` for one that is open."""

from dataclasses import MISSING, fields

from hpc_gpt.core.engines.base.facts import OUR_PARTS, EngineFacts
from hpc_gpt.core.keys import keys_of
from hpc_gpt.core.settings.cluster import OF_THE_PLANNER, ClusterProfile
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.key_rules import KeyRules
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape

# Table, what a resumption may change, what it affects, its bounds and what else there is: the keys.
KEYS = """
model never nothing: preset hf
model never speed: hidden layers heads vocab seq tied vocab_multiple kv_heads head_dim ffn mlp norm norm_eps positions
    rope_theta rope_scaling bias qk_norm nope_every experts experts_per_token expert_ffn shared_ffn shared_gate
    dense_layers router router_bias expert_groups groups_per_token norm_topk router_scale router_dtype rotated q_lora
    kv_lora
    qk_rope v_head window window_layers sinks mtp_layers
model never schedule: pad_token
data never speed: source=stdlib path tokenizer=byte begin_token=False mask_documents=False end_token
data never speed below=1: eval_fraction=0.05
data never schedule: mix phases=()
data free speed least=0: workers=0
data free speed: on_bad_shard=stop
data free nothing least=0: max_epochs=4.0
engine free speed: name=deepspeed-3d zero_stage partition=layers tiles=1 recompute=none attention=auto
    compile=none compile_backend=inductor sequence_parallel=False
    offload=none activation_offload=False loss_chunks=1 sharded_optimizer=False
    prefetch=True reshard=True megatron_args=() keep_residuals=False one_pass_loss=False
    cp_exchange=heads gather_blocks
layout free speed least=1 defaults=(None,1): cp ep
layout never speed least=1: etp global_batch
layout free speed least=1: tp pp dp shard gpus nodes micro_batch micro_batches
layout free nothing: allow_tp_across_nodes=False
train never speed: dtype=bf16 matmul=none
train never speed branch: optimizer=adamw muon_dtype=bf16
train never speed least=0: clip=1.0
train never schedule: seed=1
train never schedule of_our_loop: init
train never schedule of_our_loop branch: balance
train never schedule least=0: warmup_steps=0 eps=1e-08
train never schedule below=1: beta1=0.9 beta2=0.95
train never schedule branch: decay=cosine decay_shape=linear
train never schedule least=0 branch: lr=0.0003 min_lr=0.0 weight_decay=0.1 balance_coef=0.001 balance_rate=0.001
    z_loss=0.0
train never schedule least=1 branch: decay_steps
train never schedule above=0 branch: muon_lr
train never schedule below=1 branch: muon_momentum=0.95
train never speed least=1 below=21 branch: muon_steps=5
train free schedule least=0: eval_every=0
train free schedule least=1: steps=1000
train free speed: deterministic=False tf32=False optimizer_mode
train free speed least=0: eval_batches=4
train free nothing: save_last=True save_in_background=True until_loss
train free nothing above=0: minutes
train free nothing least=0: save_every=0 keep_last=0 keep_every=0 max_bad_steps=20 hang_multiple=20.0
    hang_floor_s=300.0
train free nothing least=1: log_every=10
train free nothing of_our_loop: save_at=() profile_steps=()
train free nothing above=0 of_our_loop: save_minutes
job free nothing: name time comment mem cpus_per_task dependency exclusive signal_lead_s retry_pause_s preflight
    spare_nodes sbatch=() srun=() restart_in_job
job free nothing above=0: max_gpu_hours
job free nothing site_may_set: partition account qos constraint reservation nodelist exclude
command never speed: args=()
command never nothing: script
command free speed: run= per=gpu
command free nothing: workdir=. setup=() resume checkpoints complete stop_signal=TERM pattern snapshot=True link=()
    values
command free nothing above=0: hang_s
notify free nothing: command on=('ended','failed','retried')
notify free nothing above=0: timeout_s=20.0
track free nothing: tensorboard=False wandb mlflow
plan free nothing: like kind attention grad_sum dp_overlap tp_overlap fused_loss states dispatcher routing ep_overlap
    cuda_graphs=() edges_as_layers whole_gradients whole_logits dropless padded_experts fp8_head ep_outside_dp
plan free nothing least=1: chunks offloaded_layers
"""

PROFILE = """
description= scheduler=slurm device fabric gpus_per_node=4 cpus_per_node gpu_flag=gres gpu_type partition account qos
constraint reservation time mem exclusive=False chain=requeue signal_lead_s=120 retry_pause_s=30 preflight=False
spare_nodes=0 bad_node_hours=24.0 setup=() modules=() purge_modules=True venv python stage megatron_lm container
node_suffix= sbatch=() srun=() machine calibration to_add
"""

SHAPE = """
vocab=50257 seq=1024 tied=True vocab_multiple=64 kv_heads head_dim ffn mlp=gelu norm=layernorm positions=learned
bias=all embedding_norm=False norm_eps=1e-05 rope_theta=10000.0 rope_scaling qk_norm=False nope_every pad_token
experts experts_per_token expert_ffn shared_ffn shared_gate=False dense_layers=0 router=softmax router_bias=False
expert_groups groups_per_token norm_topk=False router_scale=1.0 router_dtype rotated=1.0 q_lora kv_lora qk_rope v_head
window window_layers sinks=False mtp_layers=0
"""


def shown(name: str, default: object) -> str:
    return name if default is None else f"{name}={default}".replace(" ", "")


def words_of(rules: KeyRules, default: object) -> list[str]:
    bounds = [f"{bound}={number}" for bound in ("least", "above", "below")
              if (number := getattr(rules, bound)) is not None]  # fmt: skip
    marks = [name for name in ("site_may_set", "of_our_loop", "branch") if getattr(rules, name)]
    more = [shown("defaults", rules.defaults)] if rules.defaults != (default,) else []
    return [rules.resume, *(rules.affects or ("nothing",)), *bounds, *marks, *more]


def test_each_key_has_this_default_and_these_rules() -> None:
    lines = [line.partition(": ") for line in KEYS.strip().replace("\n    ", " ").split("\n")]
    stated = {f"{words}: {key}" for words, _, keys in lines for key in keys.split()}
    found = {
        f"{' '.join([table.name, *words_of(key.metadata['rules'], key.default)])}: {shown(key.name, key.default)}"
        for table in fields(Experiment)
        if table.name != "name"
        for key in fields(table.default_factory)  # type: ignore[arg-type]
    }
    assert found == stated


def test_a_key_for_a_plan_alone_says_so_and_names_its_part() -> None:
    planned = {key.name for key in fields(Model) if not key.metadata["rules"].trains}
    assert planned == {key.name for key in keys_of(Model) if "plan only" in key.means}
    assert sorted(OUR_PARTS) == ["experts", "qk_norm", "rotated", "window"]
    assert ModelShape(64, 2, 4, qk_norm=True).special_keys == ()
    shape = ModelShape(64, 2, 4, bias="none", qk_norm="width", experts=2, rotated=0.5, kv_lora=8, window=4, sinks=True,
                       mtp_layers=1)  # fmt: skip
    assert EngineFacts().shape_fault(shape) == (
        "it has a norm of all queries as one, experts, heads that are rotated in part, DeepSeek's attention "
        "(model.kv_lora), layers with a window, heads with sinks, MTP layers (model.mtp_layers)"
    )


def test_a_profile_and_a_shape_have_these_defaults() -> None:
    for kind, stated in ((ClusterProfile, PROFILE), (ModelShape, SHAPE)):
        found = [shown(key.name, key.default) for key in fields(kind) if key.default is not MISSING]
        assert found == stated.split()
    assert OF_THE_PLANNER == ("fabric", "machine", "calibration", "to_add")
