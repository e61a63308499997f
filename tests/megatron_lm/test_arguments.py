"""A run in Megatron's words, and a checkout that knows them or does not."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines.base.megatron_program import check_checkout, known_options, megatron_arguments, option_names
from hpc_gpt.core.engines.megatron_lm import ENGINE
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile, Container
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.mixture import MixedSource
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved
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


def test_a_ring_takes_keys_that_no_rank_could_have_whole():
    model = Model(hidden=64, layers=4, heads=8, kv_heads=1, vocab=256, seq=64)
    found = options(settle(model=model, engine={"cp_exchange": "ring"}, layout={"cp": 4, "tp": 1, "gpus": 8}))
    assert (found["--context-parallel-size"], found["--cp-comm-type"]) == ("4", "p2p")
    assert int(found["--global-batch-size"]) == 2 * 4 * 2


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "Megatron-LM")


@pytest.mark.parametrize("parts", LINES.values(), ids=LINES)
def test_a_checkout_that_knows_them_all(checkout, parts):
    ENGINE.check_program(settle(**parts), {"MEGATRON_LM": str(checkout)})


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
        f"{old} does not know --hidden-size; it has --ffn-hidden-size and --hidden-dropout",
        f"{old} does not know --recompute-granularity; it has --recompute-num-layers and --recompute-method",
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


def test_every_option_is_in_the_stand_ins_parser_by_one_spelling():
    found = set()
    for parts in LINES.values():
        found |= set(option_names(megatron_arguments(settle(**parts), "c", "d")))
    assert len(found) > 45
    assert all(option == option.lower() and "_" not in option for option in found)


def test_further_words_stand_behind_ours_and_never_against_them():
    own = ["--transformer-impl", "local", "--num-workers=4"]
    words = megatron_arguments(settle(engine={"megatron_args": tuple(own)}), "/run/checkpoints", "/data/text")
    assert words[-3:] == own
    assert {"--transformer-impl", "--num-workers"} <= set(option_names(words))
