"""The order of a mixture: shares kept after any number of samples, phases, and a place for every number."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.settings.data_source import MixedSource, mixture_shares, phase_steps
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens import description
from hpc_gpt.trainer.tokens.build import build_megatron, build_tokens
from hpc_gpt.trainer.tokens.order import MixtureOrder
from hpc_gpt.trainer.tokens.run_data import check_beside, ensure_data, located
from hpc_gpt.trainer.tokens.samples import open_samples
from tests.trainer.tokens.shard_folders import SEQ, reading


def describe_data(resolved):
    """The lines as they are printed."""
    return [str(line) for line in description.describe_data(resolved)]


weights = st.floats(1e-6, 1e6) | st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0, 7.0])
# Each source's weights in two phases, of which one in each phase is above 0.
mixtures = st.lists(st.tuples(weights, weights | st.just(0.0)), min_size=1, max_size=9).filter(
    lambda each: any(second for _, second in each)
)


def order(each: Sequence[tuple[float, ...]], begins: Sequence[int]) -> MixtureOrder:
    mix = {f"s{place}": MixedSource("a", weight=tuple(own[: len(begins)])) for place, own in enumerate(each)}
    return MixtureOrder(mixture_shares(mix, begins[1:]), begins)


def whole(resolved: Resolved, numbers: range) -> list[tuple[int, ...]]:
    samples = open_samples(resolved)
    return [tuple(samples.train(number).tolist()) for number in numbers]


@given(each=mixtures, far=st.integers(0, 2**63 - 1))
@settings(max_examples=100, deadline=None)
def test_after_any_number_of_samples_each_source_has_its_share(each: list[tuple[float, float]], far: int) -> None:
    one = order(each, [0])
    total = sum(Fraction(repr(own[0])) for own in each)
    shares = {f"s{place}": Fraction(repr(own[0])) / total for place, own in enumerate(each)}
    for number in (*range(40), far):
        counts = one.counts(number)
        assert sum(counts.values()) == number
        assert all(abs(count - shares[name] * number) < len(each) for name, count in counts.items())


@given(each=mixtures, second=st.integers(0, 40), far=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_sample_of_a_source_comes_once_and_in_turn(each, second, far):
    """Also over a phase's begin, and from any number on, as a resume asks for it."""
    one = order(each, [0, second])
    for first in (0, far):
        seen = one.counts(first)
        for number in range(first, first + 60):
            name, own = one.place(number)
            assert own == seen[name]
            seen[name] += 1
            if number >= second:
                assert each[int(name[1:])][1] > 0
        assert seen == one.counts(first + 60)


def test_the_order_is_this_one_for_good() -> None:
    """A change here would change the data of every run that is resumed by a new version."""
    one = order([(0.5, 0.0), (0.3, 0.5), (0.2, 0.5)], [0, 12])
    found = " ".join("{}:{}".format(*one.place(number)) for number in range(18))
    assert found == ("s0:0 s1:0 s2:0 s0:1 s0:2 s1:1 s0:3 s2:1 s1:2 s0:4 s0:5 s1:3 s1:4 s2:2 s1:5 s2:3 s1:6 s2:4")


def test_a_phase_begins_with_the_first_step_after_its_tokens() -> None:
    assert (phase_steps([], 100), phase_steps([99, 100, 101, 200.5], 100)) == ([0], [0, 1, 1, 2, 3])
    assert phase_steps([30e9], 4 << 20) == [0, 7153]


def test_the_order_of_the_tables_does_not_matter() -> None:
    mix = {name: MixedSource(name, weight=weight) for name, weight in (("b", 1.0), ("a", 1.0))}
    shares = mixture_shares(mix, ())
    assert [*shares[0]] == ["a", "b"]
    assert MixtureOrder(shares, [0]).place(0) == ("a", 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.tokens of 2000 `a`, b.tokens of 1000 `b`, and Megatron's pair m of 500 `m`, each with an end of document."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("a", 2000), ("b", 1000), ("m", 500)):
        (folder / f"{name}.txt").write_text("".join(f"{name}{place:03d}" for place in range(count // 4)))
        if name == "m":
            build_megatron(folder / "m.txt", folder / "m")
        else:
            build_tokens(folder / f"{name}.txt", folder / f"{name}.tokens")
    return folder


def mixing(files: Path, weights: dict[str, Any], phases: tuple[float, ...] = (), **data: Any) -> Resolved:
    """A run of the mixture, whose batch is 4 samples of SEQ tokens."""
    paths = {"a": files / "a.tokens", "b": files / "b.tokens", "m": files / "m"}
    mix = {
        name: MixedSource(str(paths[name]), "megatron" if name == "m" else "tokens", weight)
        for name, weight in weights.items()
    }
    plain = reading("random", "", **{"max_epochs": 0.0, "eval_fraction": 0.1, **data})
    return replace(plain, data=replace(plain.data, source="mix", path=None, mix=mix, phases=phases))


def test_a_sample_is_its_sources_and_evaluation_is_of_the_rest(files: Path) -> None:
    run = mixing(files, {"a": 0.5, "b": 0.25, "m": 0.25})
    samples = open_samples(run)
    alone = {
        name: open_samples(reading("megatron" if name == "m" else "tokens", run.data.mix[name].path, eval_fraction=0.1))
        for name in "abm"
    }
    order = MixtureOrder(mixture_shares(run.data.mix, ()), [0])
    for number in range(300):  # several epochs of m
        name, own = order.place(number)
        assert samples.train(number).tolist() == alone[name].train(own).tolist()
    for name, one in alone.items():
        kept = {tuple(samples.sources[name].evaluation(number).tolist()) for number in range(60)}
        assert kept == {tuple(one.evaluation(number).tolist()) for number in range(60)}
        trained = {tuple(one.train(number).tolist()) for number in range(one.train_size)}
        assert not kept & trained


def test_a_second_phase_reads_on_in_each_source(files: Path) -> None:
    """After 40 tokens, that is 2.5 steps of 4 samples of SEQ = 4: with the fourth step, sample 12."""
    run = mixing(files, {"a": (1.0, 0.0), "b": (0.0, 1.0)}, phases=(40.0,))
    found = whole(run, range(24))
    assert found[:12] == whole(mixing(files, {"a": 1.0}), range(12))
    assert found[12:] == whole(mixing(files, {"b": 1.0}), range(12))


def test_its_identity_is_that_of_all_its_files(files: Path) -> None:
    of_b, again, of_m = (
        open_samples(mixing(files, {"a": 1.0, other: weight})).identity
        for other, weight in (("b", 1.0), ("b", 2.0), ("m", 1.0))
    )
    assert of_b == again != of_m


def test_what_is_read_of_each_source_is_said(files: Path) -> None:
    run = mixing(files, {"a": (3.0, 1.0), "b": (1.0, 0.0)}, phases=(8000.0,))
    # 1000 steps of 4 samples; the second phase after 500 of them.
    first, a, b = describe_data(run)
    assert first == "data: a mixture of 2 sources, 16,000 tokens in 1,000 steps of 4 samples; phase 2 from step 501 on"
    assert a.startswith("data: a: 75 %, then 100 %, 14,000 tokens, ")
    assert b.startswith("data: b: 25 %, then 0 %, 2,000 tokens, ")
    assert b.endswith(f"{files / 'b.tokens'}")
    sizes = {name: open_samples(run).sources[name].train_size for name in "ab"}
    assert f"{14000 / SEQ / sizes['a']:.3g} epochs of {sizes['a'] * SEQ:,}" in a
    late = describe_data(mixing(files, {"a": (1.0, 1.0)}, phases=(1e9,)))
    assert late[0].endswith("phase 2 from step 62,500,001 on, which is not reached")


def test_a_branch_reads_a_mixture_in_its_own_steps_alone(files: Path) -> None:
    run = mixing(files, {"a": (0.9, 0.1), "b": (0.1, 0.9)}, phases=(4800.0,), max_epochs=4.0)
    first, *_ = describe_data(replace(run, data_from=600))
    assert first.endswith("6,400 tokens in 400 steps of 4 samples; phase 2 from step 901 on")
    ensure_data(replace(run, data_from=600), make=False)
    with pytest.raises(DataError, match="700 steps read parts of the mixture"):
        ensure_data(replace(run, data_from=300), make=False)


def test_a_source_read_too_often_is_refused(files: Path) -> None:
    # 4000 samples, of 449 in a and 224 in b.
    run = mixing(files, {"a": 0.9, "b": 0.1}, max_epochs=4.0)
    with pytest.raises(
        DataError, match=r"1,000 steps read parts of the mixture more than data\.max_epochs = 4 times: a 8 "
    ) as no:
        ensure_data(run, make=False)
    assert "b " not in str(no.value).partition("times: ")[2]
    for limit in (0.0, 9.0):
        assert ensure_data(mixing(files, {"a": 0.9, "b": 0.1}, max_epochs=limit)) is None


def test_files_of_different_tokenizers_are_refused(files: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / f"{name}.txt").write_text(name * 400)
        build_tokens(tmp_path / f"{name}.txt", tmp_path / f"{name}.tokens", "char")
    run = mixing(files, {"a": 1.0})
    for one, other, words in (("x", "y", "first with char:"), ("x", files / "a", "with byte")):
        mix = {"first": MixedSource(str(tmp_path / f"{one}.tokens"), weight=1.0),
               "other": MixedSource(str(tmp_path / f"{other}.tokens"), weight=1.0)}  # fmt: skip
        with pytest.raises(
            DataError, match="the mixture's files were made with different tokenizers: first with char"
        ) as no:
            ensure_data(replace(run, data=replace(run.data, mix=mix, tokenizer="char")))
        assert words in str(no.value)


def test_what_a_source_lacks_is_said_of_its_file(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mixing(files, {"a": 1.0})
    evaluated = replace(run, train=replace(run.train, eval_every=1), data=replace(run.data, eval_fraction=0.001))
    with pytest.raises(DataError, match=r"a\.tokens has 2 tokens for evaluation"):
        ensure_data(evaluated)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    lost = replace(run, data=replace(run.data, mix={"a": MixedSource("lost.tokens", weight=1.0)}))
    with pytest.raises(DataError, match="lost") as no:
        ensure_data(lost, beside=tmp_path)
    assert no.value.hint.startswith(f"looked for in {tmp_path}, {here}, ")


def test_relative_paths_are_found_beside_the_experiment(files: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = mixing(files, {"a": 1.0, "m": 1.0})
    mix = {"a": replace(run.data.mix["a"], path="a.tokens"), "m": replace(run.data.mix["m"], path="m")}
    relative = replace(run, data=replace(run.data, mix=mix))
    assert located(relative, files) == run
    assert check_beside(relative.data, files) == files
    (tmp_path / "m.idx").touch()
    with pytest.raises(DataError, match=r"data\.mix\.m\.path m is ambiguous"):
        check_beside(relative.data, files)
