"""Clusters for the tests, each started when first asked for and ended with the session."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import put
from tests.slurm.cluster import BARE, LEDGER, NARROW, SMALL, Cluster, ClusterSpec, running_services
from tests.slurm.launcher import Launcher
from tests.slurm.services import Services, daemon_environment
from tests.slurm.site import checks_spec
from tests.slurm.stories import Teller, stories_of

_HERE = f"{Path(__file__).parent}/"
PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "sbatch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "story(STORY): the test looks at that story, see tests/slurm/stories.py")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(_HERE):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.xdist_group("slurm" if on_small(item) else "slurm-apart"))


def on_small(item: pytest.Item) -> bool:
    """Whether the test uses the cluster of most tests and the stories on it: one worker has that, another the rest."""
    return not {"small", "launcher", "told"}.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    path = daemon_environment()["PATH"]
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if os.getuid() != 0 or missing:
        why = f"no {', '.join(missing)} here" if missing else "not root"
        pytest.skip(f"a real Slurm cluster needs root and Debian's slurm-wlm slurmdbd munge mariadb-server: {why}")
    with running_services() as running:
        yield running


def running(spec: ClusterSpec, services: Services) -> Iterator[Cluster]:
    cluster = Cluster(spec, services)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def cluster_of(spec: ClusterSpec) -> Any:
    @pytest.fixture(scope="session")
    def cluster(services: Services) -> Iterator[Cluster]:
        yield from running(spec, services)

    return cluster


def launcher_on(name: str) -> Any:
    """hpc-gpt on the cluster of that fixture."""

    @pytest.fixture(scope="session")
    def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
        return Launcher(request.getfixturevalue(name), tmp_path_factory.mktemp(name), within=name != "small")

    return launcher


small, launcher = cluster_of(SMALL), launcher_on("small")  # nodes of 4 pretend GPUs, accounting, preemption
bare, bare_launcher = cluster_of(BARE), launcher_on("bare")  # no accounting, and jobs are forgotten 2 s after their end
ledger, ledger_launcher = cluster_of(LEDGER), launcher_on("ledger")  # as `bare`, but sacct remembers
# Arrays of 4 elements at most, 40 jobs in all, and what sacctmgr limits is enforced.
narrow, narrow_launcher = cluster_of(NARROW), launcher_on("narrow")


@pytest.fixture(scope="session")
def checks(services: Services) -> Iterator[Cluster]:
    """Answers `sbatch --test-only`: 64 nodes and more, with all that the shipped profiles ask for."""
    yield from running(checks_spec(), services)


@pytest.fixture(scope="session")
def told(launcher: Launcher, request: pytest.FixtureRequest) -> Iterator[Teller]:
    """Gives the end of a story. The stories of all selected tests have begun."""
    teller = Teller(launcher)
    try:
        teller.begin(stories_of(request.session.items))
        yield teller
    finally:
        teller.stop()


@pytest.fixture(autouse=True)
def _stories_begin(request: pytest.FixtureRequest) -> None:
    """They begin with the first test on their cluster, whichever it is."""
    if on_small(request.node) and stories_of(request.session.items):
        request.getfixturevalue("told")


LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
# sbatch takes the job, and its answer does not come through. What only asks is answered.
DEAF = """#!/bin/bash
case " $* " in *" --test-only "*) exec {sbatch} "$@" ;; esac
{sbatch} "$@" >&2 && echo "{lost}" >&2
exit 1
"""


def sbatch_in(folder: Path, text: str) -> dict[str, str]:
    """The environment in which sbatch is this script."""
    put(folder / "sbatch", text)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def deaf(tmp_path: Path) -> dict[str, str]:
    return sbatch_in(tmp_path / "deaf", DEAF.format(sbatch=shutil.which("sbatch"), lost=LOST))
