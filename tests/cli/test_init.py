"""hpc-gpt init: what it refuses, what it never overwrites, and the file of the planner's best layout."""

from pathlib import Path

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import write_new
from hpc_gpt.core.settings.experiment_file import load_experiment
from tests.cli.command import error_of, in_process
from tests.core.weights.test_folder import LLAMA, write_folder


def refused(*arguments: object, cwd: Path) -> tuple[str, str]:
    """(message, hint) of `hpc-gpt init ARGUMENTS`, which exits with 2 and writes nothing."""
    before = sorted(cwd.rglob("*"))
    done = in_process("init", *arguments, cwd=cwd, code=2)
    assert done.stdout == ""
    assert sorted(cwd.rglob("*")) == before
    message, hint = error_of(done)
    assert "\n" not in message
    return message, hint


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "big.toml").write_text("mine")
    message, _ = refused("big", "--model", "gpt2", "--gpus", "8", "--cluster", "a100-80g-8", cwd=tmp_path)
    assert message == "big.toml exists, and nothing is overwritten"


def test_if_one_file_cannot_be_written_none_is(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write /proc/none/b\.toml: No such file or directory"):
        write_new({tmp_path / "a.toml": "text", Path("/proc/none/b.toml"): "text"})
    assert list(tmp_path.iterdir()) == []


def test_the_files_that_it_is_given_are_named_by_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.tokens").write_bytes(b"")
    given = ("--model", "gpt2", "--gpus", "2", "--set", "data.source=tokens", "--set", "data.path=a.tokens")
    in_process("init", "far.toml", "-o", "away", *given, "--cluster", "a100-80g-8", cwd=tmp_path, code=0)
    assert load_experiment(str(tmp_path / "away" / "far.toml")).data.path == str(tmp_path / "a.tokens")


def test_published_weights_get_a_learning_rate_for_continuing(tmp_path: Path) -> None:
    write_folder(tmp_path / "weights", LLAMA)
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    options = ("--gpus", "1", "--cluster", "a100-80g-8", "--set", "train.init=weights")
    for name, more, lr in (("more", (), 2e-5), ("own", ("--set", "train.lr=1e-4"), 1e-4)):
        in_process("init", name, *options, *more, cwd=tmp_path, code=0)
        experiment = load_experiment(str(tmp_path / f"{name}.toml"))
        assert experiment.train.lr == lr
        assert experiment.train.init == experiment.model.hf == str(tmp_path / "weights")
        assert "# lr 2e-05 is usual for trained weights, 0.0003 for random" in (tmp_path / f"{name}.toml").read_text()
    submit = ("submit", *options[:-4], "--cluster", "local", *options[-2:], "--set", "data.source=random", "--dry-run")
    assert "note: train.lr is 0.0003, the default for random weights" in in_process(*submit, cwd=tmp_path).stderr
    assert "the default for random" not in in_process(*submit, "--set", "train.lr=3e-4", cwd=tmp_path).stderr


def test_a_layout_of_unknown_host_memory_is_written_with_a_word(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('device = "v100-16g"\ngpus_per_node = 4\nfabric = "nvlink"\n')
    done = in_process("init", "big", "--model", "48b", "--gpus", "4", "--cluster", "mine.toml", cwd=tmp_path, code=0)
    assert "note: no layout is known to fit: all that fit on the cards offload, and tp" in done.stderr
    assert "give host_memory_gib in the profile's [machine]" in done.stderr
