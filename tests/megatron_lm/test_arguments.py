"""A run in Megatron's words, and a checkout that knows them or does not."""

import argparse
import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines.base.megatron_program import (
    CONNECTIONS,
    check_checkout,
    connections_of,
    known_options,
    megatron_arguments,
    option_names,
)
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.engines.megatron_lm import ENGINE
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile, Container
from hpc_gpt.core.settings.data_source import MixedSource
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Decay, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import SCHEDULES, ScheduleFacts
from hpc_gpt.reader.programs.megatron_arguments import interpret, stated_balance, stated_experts
from tests.megatron_lm.checkout import make_checkout

PROFILE = ClusterProfile(name="test", gpus_per_node=8)


def settle(
    profile: ClusterProfile = PROFILE, model: Model | None = None, data: Data | None = None, **parts
) -> Resolved:
    tables = {name: parts.pop(name, {}) for name in ("engine", "layout", "train")}
    return resolve(
        Experiment(
            model=model or Model(hidden=64, layers=4, heads=8, vocab=50257, seq=128),
            data=data or Data(),
            engine=Engine(**{"name": "megatron-lm", **tables["engine"]}),
            layout=LayoutRequest(**{"micro_batch": 2, "micro_batches": 4, **tables["layout"]}),
            train=Train(**tables["train"]),
        ),
        profile,
    )


def options(resolved: Resolved) -> dict[str, str | bool]:
    """The command line as a table: option -> value, True where it has none."""
    words = megatron_arguments(resolved, "/run/checkpoints", "/data/text")
    table: dict[str, str | bool] = {}
    for number, word in enumerate(words):
        if word.startswith("--"):
            follows = words[number + 1] if number + 1 < len(words) else "--"
            assert word not in table, f"{word} twice"
            table[word] = True if follows.startswith("--") else follows
    return table


MIXTURE = Model(
    hidden=64, layers=4, heads=8, vocab=512, seq=128, bias="none", experts=8, experts_per_token=2, expert_ffn=32,
    router="sigmoid", norm_topk=True,
)  # fmt: skip
ALONE = {"tp": 1, "pp": 1, "gpus": 8}
RATES = {"lr": 0.01, "min_lr": 0.002, "weight_decay": 0.03, "beta1": 0.4, "beta2": 0.5, "eps": 6e-7, "clip": 0.8}
SCHEDULE = {"steps": 90, "warmup_steps": 9, "seed": 11, "log_every": 12, "eval_every": 0, "dtype": "fp16"}
# Each switch, dtype, optimizer, schedule and shape in some command line.
LINES = {
    "as it is by default": {},
    "a row of the seed's table": {
        "model": Model(preset="48b", seq=1024),
        "layout": {"gpus": 64, "tp": 4, "pp": 16, "micro_batches": 1024},
        "train": {"dtype": "fp16", "steps": 1000, "warmup_steps": 80, "save_every": 250},
        "engine": {"recompute": "full"},
    },
    # Neither evaluated nor saved on the way: Megatron divides by the intervals, so they are the run's length.
    "every rate, and no evaluation": {"train": SCHEDULE | RATES},
    "a line": {"train": {"decay": "linear"}},
    "wsd": {"train": {"decay": "wsd", "decay_shape": "1-sqrt", "steps": 200, "warmup_steps": 9}},
    "sgd in fp32, evaluated": {
        "train": {"optimizer": "sgd", "dtype": "fp32", "eval_every": 50, "eval_batches": 3},
        "data": Data(eval_fraction=0.1),
    },
    "tp and sequence parallelism": {
        "engine": {"sequence_parallel": True, "recompute": "selective"},
        "layout": {"tp": 2},
        "train": {"deterministic": True},
    },
    "half of each stage's layers recomputed": {
        "engine": {"recompute": "1/2"},
        "layout": {"tp": 1, "pp": 2, "gpus": 8},
    },
    "modules recomputed, of a router of sigmoids": {
        "model": MIXTURE,
        "engine": {"recompute": "layernorm,moe_act", "sequence_parallel": True},
        "layout": {"tp": 2, "pp": 1, "dp": 4, "ep": 2},
        "train": {"dtype": "bf16"},
    },
    "experts in fp16": {"model": MIXTURE, "layout": ALONE, "train": {"dtype": "fp16"}},
    **{
        f"cp that exchanges {exchange}": {
            "engine": {"cp_exchange": exchange},
            "layout": {"tp": 2, "pp": 1, "cp": 2, "dp": 2},
        }
        for exchange in ("heads", "keys", "ring")
    },
    "a sharded optimizer": {"engine": {"sharded_optimizer": True}, "layout": {"tp": 1, "dp": 8}},
    "an untied head": {"model": Model(hidden=64, layers=4, heads=8, tied=False)},
    **{
        name: {"model": Model(preset=name), "layout": ALONE}
        for name in ("llama3.1-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "smollm3-3b")
    },
}


def test_command_lines_are_those_that_were_read_in_review(file_regression):
    """pytest tests/megatron_lm --force-regen      after a change that is meant"""
    text = ""
    for name, parts in LINES.items():
        words = megatron_arguments(settle(**parts), "/run/checkpoints", "/data/text")
        text += f"# {name}\n" + " ".join(words).replace(" --", "\n--") + "\n\n"
    file_regression.check(text, basename="arguments", extension=".txt")


def test_random_tokens_are_its_own_mock_data():
    assert settle().data == Data(source="megatron", path="stdlib")
    words = megatron_arguments(settle(data=Data(source="random")), "c", None)
    assert "--mock-data" in words
    assert "--data-path" not in words


def test_a_mixture_is_a_weight_and_a_prefix_for_each_source():
    mix = {"web": MixedSource("web", "megatron", 3.0), "code": MixedSource("code", "megatron", 1.0)}
    resolved = settle(data=Data(source="mix", mix=mix))
    words = megatron_arguments(resolved, "c", ["0.25", "/data/code", "0.75", "/data/web"])
    first = words.index("--data-path") + 1
    assert words[first : first + 5] == ["0.25", "/data/code", "0.75", "/data/web", "--optimizer"]
    assert "--mock-data" not in words


@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 4),
    vocab=st.integers(300, 60000), multiple=st.sampled_from([8, 64, 128]), micro=st.integers(1, 4),
    count=st.integers(1, 6),
)  # fmt: skip
def test_layout_batch_and_rows_are_the_runs_own(tp, pp, dp, vocab, multiple, micro, count):
    model = Model(hidden=64, layers=4, heads=8, vocab=vocab, seq=128, vocab_multiple=multiple)
    layout = {"tp": tp, "pp": pp, "dp": dp, "gpus": tp * pp * dp, "micro_batch": micro, "micro_batches": count}
    try:
        resolved = settle(model=model, layout=layout)
    except ConfigError:
        raise
    except ValueError:
        return  # a layout that no nodes hold
    found = options(resolved)
    assert int(found["--global-batch-size"]) == micro * count * dp
    # Megatron pads to a multiple of (its own number x tp); NullTokenizer has as many tokens, or one more.
    step = int(found["--make-vocab-size-divisible-by"]) * tp
    for tokens in (int(found["--vocab-size"]), int(found["--vocab-size"]) + 1):
        assert -(-tokens // step) * step == resolved.model.padded_vocab
    assert int(found["--vocab-size"]) >= vocab - 1


def test_embedding_and_head_take_a_layers_place_for_equal_stages():
    def words(layers: int, pp: int, *own: str) -> str:
        layout = {"tp": 1, "pp": pp, "gpus": pp}
        run = settle(
            model=Model(hidden=64, layers=layers, heads=2, vocab=256, seq=64),
            layout=layout,
            engine={"megatron_args": own},
        )
        return " ".join(megatron_arguments(run, "checkpoints", "prefix"))

    edges = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert edges in words(4, 3)
    assert edges in words(10, 4, "--num-layers-per-virtual-pipeline-stage", "1")
    assert "account-for" not in words(4, 2)


def test_a_schedule_that_it_does_not_have_is_refused(monkeypatch):
    assert set(SCHEDULES) == set(get_args(Decay))
    monkeypatch.setitem(SCHEDULES, "linear", ScheduleFacts(None, by_length=True))
    with pytest.raises(UserError, match="decay is linear, a schedule that Megatron-LM does not have") as caught:
        settle(train={"decay": "linear", "steps": 20, "warmup_steps": 2})
    assert "use train.decay = cosine, constant or wsd, or another engine" in str(caught.value.hint)


def test_a_ring_takes_keys_that_no_rank_could_have_whole():
    model = Model(hidden=64, layers=4, heads=8, kv_heads=1, vocab=256, seq=64)
    found = options(settle(model=model, engine={"cp_exchange": "ring"}, layout={"cp": 4, "tp": 1, "gpus": 8}))
    assert (found["--context-parallel-size"], found["--cp-comm-type"]) == ("4", "p2p")
    assert int(found["--global-batch-size"]) == 2 * 4 * 2


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "Megatron-LM")


def test_a_checkout_that_knows_them_all_by_one_spelling(checkout):
    found = set()
    for parts in LINES.values():
        ENGINE.check_program(settle(**parts), {"MEGATRON_LM": str(checkout)})
        found |= set(option_names(megatron_arguments(settle(**parts), "c", "d")))
    assert len(found) > 45
    assert all(option == option.lower() and "_" not in option for option in found)


def test_the_options_read_from_source_are_those_the_parser_has(checkout, monkeypatch):
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("arguments", checkout / "megatron" / "training" / "arguments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    real = {option for action in parser._actions for option in action.option_strings}
    # Fields that the factory leaves out, or gives another name, count as known.
    known = known_options(Path(module.__file__), checkout / "megatron")
    others = {"--timers", "--wd-incr-steps", "--override-opt_param-scheduler"}
    assert known | {"--no-log-throughput"} == real | others
    assert {"--global-batch-size", "--no-log-throughput", "--num-layers"} <= real
    check_checkout(checkout, [*sorted(real), *sorted(others), "--disable-manual-gc-eval"])
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)


def test_an_unknown_argument_is_named_with_what_comes_close(tmp_path):
    old = make_checkout(tmp_path / "old", without=("recompute-granularity", "hidden-size", "lr-wsd-decay-iters"))
    with pytest.raises(ConfigError) as refused:
        ENGINE.check_program(settle(engine={"recompute": "selective"}), {"MEGATRON_LM": str(old)})
    assert str(refused.value).splitlines() == [
        f"{old} does not know --hidden-size; it has --ffn-hidden-size and --moe-ffn-hidden-size",
        f"{old} does not know --recompute-granularity; it has --recompute-num-layers and --recompute-modules",
    ]
    with pytest.raises(ConfigError, match="does not know --lr-wsd-decay-iters"):
        ENGINE.check_program(settle(train={"decay": "wsd"}), {"MEGATRON_LM": str(old)})
    with pytest.raises(ConfigError, match="does not know --no-such-option-anywhere"):
        ENGINE.check_program(
            settle(engine={"megatron_args": ("--no-such-option-anywhere",)}), {"MEGATRON_LM": str(old)}
        )


def test_which_checkout_is_meant_and_that_it_is_one(tmp_path, checkout):
    resolved = settle()
    (checkout / "megatron" / "training" / "arguments.py").unlink()
    with pytest.raises(ConfigError, match=r"it has no megatron/training/arguments\.py"):
        ENGINE.check_program(resolved, {"MEGATRON_LM": str(checkout)})
    # The environment's before the profile's, as in the script; one in an image cannot be looked at.
    named = settle(ClusterProfile(name="test", gpus_per_node=8, megatron_lm=str(tmp_path / "profile")))
    with pytest.raises(ConfigError, match="profile is not a Megatron-LM checkout"):
        ENGINE.check_program(named, {})
    with pytest.raises(ConfigError, match=str(checkout)):
        ENGINE.check_program(named, {"MEGATRON_LM": str(checkout)})
    image = Container("apptainer", "/images/a.sif")
    ENGINE.check_program(
        settle(ClusterProfile(name="test", gpus_per_node=8, megatron_lm="/opt/megatron-lm", container=image)), {}
    )


def test_an_older_parser_lies_elsewhere(tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "megatron" / "arguments.py").write_text("group.add_argument('--num-layers', '--layers', type=int)\n")
    check_checkout(tmp_path, ["--num-layers", "--layers"])
    with pytest.raises(ConfigError, match="does not know --lr"):
        check_checkout(tmp_path, ["--lr"])


def test_further_words_stand_behind_ours_and_never_against_them():
    own = ["--transformer-impl", "local", "--num-workers=4"]
    words = megatron_arguments(settle(engine={"megatron_args": tuple(own)}), "/run/checkpoints", "/data/text")
    assert words[-3:] == own
    assert {"--transformer-impl", "--num-workers"} <= set(option_names(words))


WIDTHS = st.sampled_from([8, 16, 24, 48])


@st.composite
def mixtures(draw) -> Model:
    """A mixture that Megatron-LM's options can say."""
    experts = draw(st.sampled_from([2, 4, 8, 12]))
    k = draw(st.integers(1, experts))
    router = draw(st.sampled_from(["softmax", "topk-softmax", "sigmoid"])) if k > 1 else "softmax"
    groups = draw(st.sampled_from([None, 2]))
    return Model(
        hidden=64, layers=4, heads=8, vocab=512, seq=128, positions="rope", norm="rmsnorm", mlp="swiglu", bias="none",
        experts=experts, experts_per_token=k, expert_ffn=draw(WIDTHS), shared_ffn=draw(st.none() | WIDTHS),
        dense_layers=(dense := draw(st.integers(0, 3))), ffn=draw(WIDTHS) if dense else None, router=router,
        norm_topk=router == "sigmoid" or (router == "softmax" and k > 1 and draw(st.booleans())),
        router_bias=router == "sigmoid" and draw(st.booleans()), router_scale=draw(st.sampled_from([1.0, 2.5])),
        expert_groups=groups, groups_per_token=groups and draw(st.integers(-(-2 * k // experts), 2)),
    )  # fmt: skip


OF_EXPERTS = {
    *("experts", "experts_per_token", "expert_ffn", "shared_ffn", "shared_gate", "dense_layers", "router"),
    *("router_bias", "expert_groups", "groups_per_token", "norm_topk", "router_scale"),
}


def dumped(resolved: Resolved) -> dict[str, str]:
    """The command line as Megatron-LM dumps it: {argument: text}."""
    texts = {option.removeprefix("--").replace("-", "_"): str(value) for option, value in options(resolved).items()}
    if "moe_layer_freq" in texts:
        texts["moe_layer_freq"] = str(eval(texts["moe_layer_freq"]))
    return texts


@given(model=mixtures(), ep=st.sampled_from([1, 2, 4]), etp=st.sampled_from([None, 1]), shared_gate=st.booleans())
def test_its_dump_of_a_mixture_states_the_same_mixture(model, ep, etp, shared_gate):
    model = replace(model, shared_gate=shared_gate and model.shared_ffn is not None)
    layout = {"tp": 2, "pp": 1, "dp": 4, "ep": ep, "etp": etp}
    if model.experts % ep:
        return
    resolved = settle(model=model, layout=layout, engine={"sequence_parallel": True})
    found = stated_experts(texts := dumped(resolved))
    assert (interpret(texts)["ep"], found.pop("etp")) == (resolved.layout.ep, resolved.layout.expert_tp)
    # A softmax of the chosen ones is a softmax of all, normed.
    said = resolved.model
    said = replace(said, router="softmax", norm_topk=True) if said.router == "topk-softmax" else said
    others = {name: value for name, value in asdict(said).items() if name not in OF_EXPERTS}
    assert ModelShape(**others, **found) == said


def test_the_balance_is_ours_unless_its_own_options_say_it():
    plain = Model(hidden=64, layers=4, heads=8, vocab=512, seq=128, experts=8, experts_per_token=2, expert_ffn=32,
                  norm_topk=True, bias="none")  # fmt: skip
    assert stated_balance(dumped(settle(model=plain))) == {"balance": "loss", "balance_coef": 0.001}
    biased = replace(plain, router="sigmoid", router_bias=True)
    assert stated_balance(dumped(settle(model=biased))) == {"balance": "bias"}
    own = ("--moe-router-load-balancing-type=seq_aux_loss", "--moe-aux-loss-coeff=1e-4", "--moe-z-loss-coeff", "1e-3",
           "--moe-token-dispatcher-type", "flex")  # fmt: skip
    run = settle(model=plain, engine={"megatron_args": own})
    words = megatron_arguments(run, "c", None)
    assert [word for word in words if "dispatcher" in word] == ["--moe-token-dispatcher-type"]
    said = {word.partition("=")[0].removeprefix("--").replace("-", "_"): word.partition("=")[2] for word in own[:2]}
    assert stated_balance({**said, "moe_z_loss_coeff": "0.001"}) == {
        "balance": "loss", "balance_coef": 1e-4, "z_loss_coef": 0.001,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"router": "softmax", "router_bias": True}, "it has a bias only for router sigmoid, not for softmax"),
        ({"router": "sigmoid", "norm_topk": False}, "it norms a sigmoid's weights exactly if k is above 1"),
        ({"experts_per_token": 1}, "its softmax over one expert is always 1"),
        ({"qk_norm": "width"}, "it has a norm of all queries as one"),
    ],
)
def test_a_router_that_it_does_not_have_is_refused(keys, why):
    shape = {"experts": 8, "experts_per_token": 2, "expert_ffn": 32, "norm_topk": True, "bias": "none", **keys}
    with pytest.raises(ConfigError, match=why):
        settle(model=Model(hidden=64, layers=4, heads=8, vocab=512, seq=128, **shape))


def test_experts_over_tp_need_parts_of_the_sequence_and_no_bias():
    shape = {"hidden": 64, "layers": 4, "heads": 8, "vocab": 512, "seq": 128, "norm_topk": True}
    mixture = Model(experts=8, experts_per_token=2, expert_ffn=32, bias="none", **shape)
    with pytest.raises(UserError, match="the model has experts and tp is 2, and Megatron-LM refuses"):
        settle(model=mixture, layout={"tp": 2, "pp": 1, "dp": 4, "ep": 2})
    with pytest.raises(UserError, match="2 ranks share an expert with biases, which Megatron-LM does not divide"):
        settle(model=replace(mixture, bias="all"), layout={"tp": 2, "pp": 1, "dp": 4})


@pytest.mark.parametrize(
    ("own", "traits"),
    [
        (("--moe-token-dispatcher-type", "allgather"), {"dispatcher": "allgather"}),
        (("--moe-token-dispatcher-type=flex", "--moe-enable-deepep"), {"dispatcher": "deepep"}),
        (("--moe-token-dispatcher-type=flex", "--moe-flex-dispatcher-backend", "hybridep"), {"dispatcher": "hybridep"}),
        (("--moe-token-dispatcher-type=flex", "--moe-flex-dispatcher-backend", "other"), {}),
        (("--moe-router-force-load-balancing", "--overlap-moe-expert-parallel-comm"),
         {"routing": "forced balance", "ep_overlap": True}),
        (("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn", "moe_router", "--swiglu"),
         {"cuda_graphs": ("attn", "moe_router")}),
        (("--cuda-graph-impl", "transformer_engine"), {"cuda_graphs": ("full",)}),
        (("--cuda-graph-scope", "mamba"), {}),
    ],
)  # fmt: skip
def test_its_own_arguments_say_how_experts_run(own, traits):
    assert ENGINE.stated_traits(Engine(name="megatron-lm", megatron_args=own)) == {"dispatcher": "alltoall"} | traits


@pytest.mark.parametrize(
    ("own", "tp", "theirs", "connections", "says"),
    [
        ((), 1, None, "1", None),
        ((), 2, "8", "8", "Using tensor model parallelism or context parallelism require setting"),
        ((), 1, "8", "8", None),
        (("--overlap-moe-expert-parallel-comm",), 2, None, "32", None),
        (("--overlap-moe-expert-parallel-comm",), 2, "1", "1", "Requirements for EP A2A Overlap"),
        (("--use-megatron-fsdp",), 1, None, "32", None),
        (("--use-megatron-fsdp",), 1, "1", "1", "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset."),
    ],
)
def test_an_option_brings_its_connections_and_theirs_win(own, tp, theirs, connections, says):
    found, warning = connections_of(own, Layout(tp, 1, 1), {CONNECTIONS: theirs} if theirs else {})
    assert found == connections
    assert (warning is None) if says is None else says in warning and f"is {theirs} in your environment" in warning


@pytest.mark.parametrize(
    ("changed", "proposed"),
    [
        ({}, True), ({"recompute": "layernorm,moe_act"}, True), ({"recompute": "moe"}, False),
        ({"recompute": "1/2"}, False), ({"dispatcher": "allgather"}, False), ({"dtype": "fp32"}, False),
        ({"pp": 2}, False), ({"pp": 2, "vp": 2}, True), ({"ep": 1}, False), ({"micro_batches": 1}, False),
    ],
)  # fmt: skip
def test_an_overlap_is_proposed_only_where_it_is_not_refused(changed, proposed):
    run = Training(
        preset("qwen3-30b-a3b"), **{"dp": 8, "ep": 4, "micro_batches": 8, "dispatcher": "alltoall", **changed}
    )
    arguments, _ = ENGINE.overlaps(run)
    assert ("--overlap-moe-expert-parallel-comm" in arguments) is proposed
    if proposed:  # what is proposed is accepted
        own = (*arguments, *ENGINE.with_chunks(Engine(), run).megatron_args)
        wanted = Engine(name="megatron-lm", recompute=run.recompute, megatron_args=own)
        assert [*ENGINE.own_faults(wanted, run.layout, Train(dtype=run.dtype), run.shape)] == []


def test_a_note_says_that_experts_are_multiplied_one_by_one():
    notes = {
        dtype: [*ENGINE.notes(settle(model=MIXTURE, layout=ALONE, train={"dtype": dtype}))]
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert notes["bf16"] == []
    assert notes["fp16"] == ["--moe-grouped-gemm is for bf16 alone: in fp16 experts are multiplied one by one"]
    assert len(notes["fp32"]) == 1
