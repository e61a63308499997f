"""The note on a job on Slingshot whose NCCL took TCP sockets: in the record, so in `report`, and in `why`."""

import gzip
from pathlib import Path

import pytest

from hpc_gpt.reader.runs.sockets import OF_NETWORK, OVER_SOCKETS
from hpc_gpt.report.why import explain
from tests.made_runs import add_attempt, make_run, metrics_line, read_run
from tests.reader.made_logs import iterations, run_of

HSN = "nid1:7:9 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.253.1.2<0> [1]hsn1:10.253.1.3<0>"
SLOW = "nid1:7:9 [0] NCCL INFO NET/Socket : Using [0]bond0:10.1.1.2<0>"
SENT = "nid1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [send] via NET/Socket/0"
TAKEN = "nid1:7:9 [0] NCCL INFO Using network Socket"
GOOD = "nid1:7:9 [0] NCCL INFO Using network AWS Libfabric"


@pytest.mark.parametrize(
    ("fabric", "lines", "noted"),
    [
        *(("slingshot 4x200G", each, True) for each in ((HSN,), (SLOW,), (SENT,), (TAKEN,))),
        *(("slingshot 4x200G", each, False) for each in ((TAKEN, GOOD), ())),
        ("infiniband 4x200G", (TAKEN,), True),
    ],
)
def test_an_own_run_has_the_note_if_its_fabric_is_slingshot(logs, tmp_path: Path, fabric, lines, noted) -> None:
    (site := tmp_path / "site.toml").write_text(f'extends = "generic-slurm"\nfabric = "{fabric}"\n')
    run = make_run(logs, str(site))
    attempt = add_attempt(run, [metrics_line(1)], None)
    attempt.log.write_text("".join(f"{line}\n" for line in ("4 ranks on nid[1-2]", *lines)))
    expected = [OVER_SOCKETS] if noted and "slingshot" in fabric else []
    assert [flag for flag, kind in read_run(run).all_flags if kind == OF_NETWORK] == expected
    assert explain(run.run_id, logs).notes == expected
    assert ('"fabric"' in (run.path / "resolved.json").read_text()) == ("slingshot" in fabric)


@pytest.mark.parametrize(("line", "noted"), [(HSN, True), (SLOW, False), (GOOD, False)])
def test_another_programs_log_has_it_by_the_interface(tmp_path: Path, line, noted) -> None:
    lines = [line, *iterations(1, 6)]
    assert (OVER_SOCKETS in run_of(lines).record.flags) == noted
    (log := tmp_path / "a.log.gz").write_bytes(gzip.compress("".join(f"{each}\n" for each in lines).encode()))
    assert explain(str(log), tmp_path).notes == [OVER_SOCKETS] * noted
