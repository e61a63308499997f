"""[data.mix]: files that extend others, rows and options reach each key; what contradicts itself is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, raise_faults
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.data_source import MixedSource, evaluation_shares
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.settings.experiment_file import folder_of_data, load_experiment, read_experiment
from hpc_gpt.core.settings.grid import parse_override
from hpc_gpt.core.settings.resolved import Resolved, config_hash, speed_hash
from hpc_gpt.core.settings.services import Plan
from hpc_gpt.core.settings.stored import experiment_of, experiment_text

MIX = """\
extends = "demo"
[data.mix.web]
path = "web.tokens"
weight = 0.7
[data.mix.code]
path = "code"
source = "megatron"
weight = 0.3
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    (tmp_path / "mixed.toml").write_text(MIX)
    return tmp_path / "mixed.toml"


def resolved(file: Path | str, *options: str, row: str | None = None, **keys: object) -> Resolved:
    overrides = {key.replace("__", "."): value for key, value in keys.items()} | dict(map(parse_override, options))
    return resolve(load_experiment(str(file), overrides, row), load_profile("local"))


def weights(run: Resolved) -> dict[str, object]:
    return {name: one.weight for name, one in (run.data.mix or {}).items()}


def test_its_tables_are_read(mixed: Path) -> None:
    run = resolved(mixed)
    assert run.data.source == "mix"
    assert run.data.mix == {
        "web": MixedSource("web.tokens", "tokens", 0.7),
        "code": MixedSource("code", "megatron", 0.3),
    }
    assert evaluation_shares(run.data.mix, ()) == {"code": 0.3, "web": 0.7}


def test_the_default_source_gives_way_to_it(mixed: Path) -> None:
    """As a branch and a program that builds an experiment have it."""
    experiment = load_experiment(str(mixed))
    plain = replace(experiment, data=replace(experiment.data, source="stdlib"))
    assert resolve(plain, load_profile("local")) == resolved(mixed)


def test_options_rows_and_files_that_extend_it_reach_each_key(mixed: Path) -> None:
    assert weights(resolved(mixed, "data.mix.web.weight=0.4")) == {"web": 0.4, "code": 0.3}
    assert resolved(mixed, "data.mix.web.path=1984").data.mix["web"].path == "1984", "a text, without quotes"
    more = resolved(mixed, "data.mix.books.path=b.tokens", "data.mix.books.weight=1")
    assert weights(more) == {"web": 0.7, "code": 0.3, "books": 1.0}
    assert weights(resolved(mixed, "data.mix.code=")) == {"web": 0.7}
    child = mixed.with_name("child.toml")
    child.write_text('extends = "mixed"\n[data]\nphases = [1e6]\nmix.web.weight = [1, 0]\nmix.code.weight = [0, 1]\n')
    assert weights(resolved(child)) == {"web": (1.0, 0.0), "code": (0.0, 1.0)}
    assert resolved(child).data.phases == (1e6,)
    sweep = mixed.with_name("sweep.toml")
    sweep.write_text(
        'extends = "mixed"\n[rows]\nlow = { data.mix.web.weight = 0.1 }\n"high" = { data.mix.web.weight = 0.9 }\n'
    )
    assert [weights(resolved(sweep, row=row))["web"] for row in ("low", "high")] == [0.1, 0.9]


def test_it_is_part_of_the_hash_and_comes_back_from_its_text(mixed: Path) -> None:
    run = resolved(mixed)
    assert Resolved.from_json(run.to_json()) == run
    phased = resolved(mixed, "data.phases=[30e9]", "data.mix.web.weight=[0.7,0.5]")
    assert Resolved.from_json(phased.to_json()) == phased
    assert resolve(experiment_of(phased), load_profile("local")) == phased
    (text := mixed.with_name("again.toml")).write_text(experiment_text(phased, "again"))
    assert resolve(load_experiment(str(text)), load_profile("local")) == phased
    others = [resolved(mixed, "data.mix.web.weight=0.4"), phased, resolved(mixed, "data.mix.web.path=other")]
    assert len({config_hash(one) for one in (run, *others)}) == 4
    assert speed_hash(others[0]) == speed_hash(run)
    assert config_hash(resolved(mixed, "data.max_epochs=9")) == config_hash(run)


def test_paths_are_looked_up_beside_the_file_that_states_them(mixed: Path) -> None:
    (mixed.parent / "web.tokens").touch()
    (mixed.parent / "code.idx").touch()
    (other := mixed.parent / "other").mkdir()
    child = other / "child.toml"
    child.write_text('extends = "../mixed"\n[data.mix.books]\npath = "books.tokens"\nweight = 1\n')
    run = resolved(child)
    paths = {name: one.path for name, one in run.data.mix.items()}
    assert paths == {"web": "../web.tokens", "code": "../code", "books": "books.tokens"}
    assert folder_of_data(read_experiment(str(child)), None, None) == other
    assert folder_of_data(read_experiment(str(mixed)), None, None) == mixed.parent
    given = {f"data.mix.{name}.path": "x" for name in ("web", "code")}
    assert folder_of_data(read_experiment(str(mixed)), given, None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["data.path=a.tokens"], "data.path is a.tokens beside the mixture [data.mix]"),
        (["data.source=random"], 'data.source is "random" beside the mixture [data.mix]'),
        (["data.source=stream"], 'data.source is "stream" beside the mixture [data.mix]'),
        (["data.mix.web.source=stream"], "data.mix.web.source: input should be 'tokens' or 'megatron'"),
        (["data.mix.web.weight=0"], "data.mix.web.weight is 0, but must be a number above 0"),
        (["data.mix.web.weight=-1"], "data.mix.web.weight is -1, but must be a number above 0"),
        (["data.mix.web.weight=nan"], "data.mix.web.weight is nan, but must be a number above 0"),
        (["data.mix.web.weight=[0.5,0.5]"], "data.mix.web.weight has 2 weights, but data.phases makes 1 phase"),
        (["data.phases=[1e6]", "data.mix.web.weight=[0,0]"], "data.mix.web.weight is [0, 0], but must be numbers"),
        (["data.phases=[1e6]", "data.mix.web.weight=[1,-1]"], "data.mix.web.weight is [1, -1], but must be numbers"),
        (["data.phases=[2e6,1e6]"], "data.phases is [2e+06, 1e+06], but its numbers of tokens must be"),
        (["data.phases=[0]"], "data.phases is [0], but its numbers"),
        (["data.phases=[inf]"], "data.phases is [inf], but its numbers"),
        (["data.phases=[1e6]", "data.mix.web.weight=[1,0]", "data.mix.code.weight=[1,0]"], "weight is 0 in phase 2"),
        (["data.mix.web.path="], "data.mix.web names no file"),
        (["data.mix.web.weight="], "data.mix.web has no weight"),
        (["data.mix.web=", "data.mix.code="], "[data.mix] has no source"),
        (["data.mix.a b.path=x", "data.mix.a b.weight=1"], "a source of the mixture is called 'a b'"),
        (["data.mix.web.wieght=1"], "unknown key data.mix.web.wieght; did you mean data.mix.web.weight?"),
        (["engine.name=megatron-lm", "layout.tp=1", "layout.pp=1"], "data.mix.web.source is tokens, but Megatron-LM"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(mixed: Path, options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as no:
        resolved(mixed, *options)
    assert words in str(no.value)
    assert len(str(no.value).splitlines()) == 1
    assert no.value.hint


def test_phases_and_the_source_mix_need_one() -> None:
    for option, words in (("data.phases=[1e6]", "data.phases is [1e+06]"), ("data.source=mix", 'data.source is "mix"')):
        with pytest.raises(ConfigError) as no:
            resolved("demo", option)
        assert str(no.value).startswith(words)


def test_megatron_lm_takes_weights_and_no_phases(mixed: Path) -> None:
    options = ["engine.name=megatron-lm", "layout.tp=1", "layout.pp=1", "engine.zero_stage="]
    pairs = [*options, "data.mix.web.source=megatron"]
    assert resolved(mixed, *pairs).data.source == "mix"
    phased = [*pairs, "data.phases=[1e6]"]
    with pytest.raises(ConfigError, match=r"data\.phases is given, but Megatron-LM has one set of weights"):
        resolved(mixed, *phased)


def test_a_program_of_your_own_is_told_of_none(mixed: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[data\] is given"):
        raise_faults(engine_named("command").table_faults(Command(run="x"), Plan(), resolved(mixed).data))
