"""MLflow: all attempts of a run are one run there, found again by a tag."""

import os
import re
from collections.abc import Sequence

from hpc_gpt.core.sinks import CurveRow, ShownRun, need_package

_RUN, _STEP = "hpc_gpt_run", "hpc_gpt_step"  # tags: the run's id, and the last step that is there
_MOST_ROWS = 50  # in one request
# With its own defaults a server that cannot be reached is waited for four minutes.
_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
              "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true",
              "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}  # fmt: skip


class Mlflow:
    """A run of `experiment` at a tracking server, or in a folder's file store. Nothing can be replaced there: steps
    that it has are left out."""

    def __init__(self, run: ShownRun, uri: str, experiment: str) -> None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        self._client = client = need_package("mlflow").MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        try:
            number = found.experiment_id if found else client.create_experiment(experiment)
        except Exception:  # another run may have just made it
            if (found := client.get_experiment_by_name(experiment)) is None:
                raise
            number = found.experiment_id
        runs = client.search_runs([number], f"tags.{_RUN} = '{run.id}'", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
        else:
            from mlflow.entities import Param

            runs = [client.create_run(number, int(run.began * 1000), {_RUN: run.id}, run.title)]
            params = [Param(_name(key), str(value)) for key, value in run.settings.items()]
            client.log_batch(runs[0].info.run_id, params=params)
        self._id, self._shown = runs[0].info.run_id, int(runs[0].data.tags.get(_STEP, 0))

    def add(self, rows: Sequence[CurveRow]) -> None:
        from mlflow.entities import Metric, RunTag

        new = [row for row in rows if row[0] > self._shown]
        for start in range(0, len(new), _MOST_ROWS):
            metrics = [
                Metric(_name(tag), figure, int(at * 1000), step)
                for step, at, row in new[start : start + _MOST_ROWS]
                for tag, figure in row.items()
            ]
            last = new[start : start + _MOST_ROWS][-1][0]
            self._client.log_batch(self._id, metrics, tags=[RunTag(_STEP, str(last))])
            self._shown = last

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _name(tag: str) -> str:
    """The tag in the characters that MLflow takes."""
    return "/".join(re.sub(r"[^\w. -]", "_", part) for part in tag.split("/", 1))
