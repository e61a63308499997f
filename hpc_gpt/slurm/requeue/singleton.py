"""The jobs of a run have one name and wait for each other: for sites that refuse a requeue."""

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.resolved import Resolved, folder_name
from hpc_gpt.slurm.requeue import Requeue


class Singleton(Requeue):
    at_once = True
    follows = " by singleton jobs"
    shown = "--job-name=…-RUN --dependency=singleton "

    def check(self, resolved: Resolved) -> None:
        asked = resolved.job.dependency
        if asked and "?" in asked:
            raise ConfigError(
                f"job.dependency {asked!r} holds a ?, which cannot be joined with the chain's own singleton",
                "separate the conditions with commas, or leave it out",
            )

    def flags(self, resolved: Resolved, run_id: str) -> list[str]:
        self.check(resolved)
        asked = resolved.job.dependency
        return [
            f"--job-name={folder_name(resolved.job.name or resolved.name)}-{run_id}",
            f"--dependency={f'{asked},' if asked else ''}singleton",
        ]


REQUEUE = Singleton()
