"""signSGD: what the verbs say of it, and that it trains."""

import json

import pytest

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from tests.cli.command import hpc_gpt, in_process

ALONE = ("--tp", "1", "--pp", "1", "--cluster", "local", "--set", "data.source=random", "--set", "train.steps=4")


def test_a_rank_holds_no_states_of_it() -> None:
    training = Training(ModelShape(64, 2, 2), engine="ddp", dtype="bf16", optimizer="sign-sgd")
    assert engine_named("ddp").state_bytes(training).optimizer == 4
    assert training.optimizer_facts.moved_bytes("fused", 0.5) == 22


def test_help_has_it_and_keys_of_others_are_named() -> None:
    assert "sign-sgd" in in_process("help", "keys").stdout
    page = in_process(
        "submit", "demo", "--dry-run", *ALONE, "--set", "train.optimizer=sign-sgd", "--set", "train.eps=1"
    )
    assert 'train.eps has no effect: train.optimizer is "sign-sgd", which has no such key' in page.stderr


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed-zero"])
def test_a_run_on_two_ranks(engine: str) -> None:
    asked = ("--set", "train.optimizer=sign-sgd", "--set", "train.lr=1e-3", "--set", "train.decay=constant")
    hpc_gpt("submit", "demo", "--engine", engine, "-G", "2", *ALONE, *asked, "--wait", code=0)
    (record,) = json.loads(in_process("report", "--json").stdout)["records"]
    assert (record["engine"], record["gpus"], record["ended"]) == (engine, 2, "done")
    assert record["loss_last"] < record["loss_first"]
