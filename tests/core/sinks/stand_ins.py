"""Packages that keep what is sent to them in a file: a wandb and an MLflow without a network."""

from pathlib import Path

# It has the steps 1 to 7 on its server. `{init}` is what it does when it is asked for a run that is online.
WANDB = """
import json, os, sys
def say(*words):
    print(json.dumps(words), file=open(os.environ["CALLS"], "a"))
class Settings:
    sync_dir = "/"
    def __init__(self, **_): pass
def teardown():
    say("teardown")
def init(id, mode="online", resume=None, **given):
    say("init", id, mode, resume)
    if mode == "online":
        {init}
    return Run(mode)
class Run:
    disabled, starting_step, settings = False, 8, Settings()
    def __init__(self, mode): self.offline = mode == "offline"
    def log(self, row, step, commit): say("log", step)
    def finish(self): say("finish")
"""

MLFLOW = """
import json, os
from types import SimpleNamespace as Some
class MlflowClient:
    def __init__(self, uri):
        if uri.startswith("http"):
            raise ConnectionError(f"no answer of {uri}")
        self.path = uri.removeprefix("file://") + ".json"
        self.kept = json.load(open(self.path)) if os.path.exists(self.path) else {"runs": []}
    def _keep(self):
        json.dump(self.kept, open(self.path, "w"))
    def get_experiment_by_name(self, name):
        return Some(experiment_id="7") if self.kept.get("experiment") == name else None
    def create_experiment(self, name):
        self.kept["experiment"] = name
        return "7"
    def search_runs(self, ids, filter, max_results):
        return [Some(info=Some(run_id=n), data=Some(tags=run["tags"])) for n, run in enumerate(self.kept["runs"])
                if filter == f"tags.hpc_gpt_run = '{run['tags']['hpc_gpt_run']}'"]
    def create_run(self, number, start_time, tags, run_name):
        self.kept["runs"].append({"name": run_name, "tags": tags, "metrics": [], "params": {}, "status": ["RUNNING"]})
        return self.search_runs([], f"tags.hpc_gpt_run = '{tags['hpc_gpt_run']}'", 1)[0]
    def log_batch(self, id, metrics=(), params=(), tags=()):
        run = self.kept["runs"][id]
        assert not {param[0] for param in params} & set(run["params"])
        run["metrics"] += metrics
        run["params"] |= dict(params)
        run["tags"] |= dict(tags)
        self._keep()
    def update_run(self, id, status):
        self.kept["runs"][id]["status"].append(status)
    def set_terminated(self, id):
        self.update_run(id, "FINISHED")
        self._keep()
"""
ENTITIES = """
def Metric(key, value, timestamp, step): return key, value, timestamp, step
def Param(key, value): return key, value
RunTag = Param
"""


def put_wandb(folder: Path, init: str = "pass", before: str = "") -> str:
    """A folder with such a wandb, whose module begins with the lines `before`."""
    folder.mkdir()
    (folder / "wandb.py").write_text(f"{before}\n{WANDB.replace('{init}', init)}")
    return str(folder)


def put_mlflow(folder: Path) -> str:
    """A folder with such an MLflow; a store at `file://PATH` is PATH.json, and a server does not answer."""
    (folder / "mlflow").mkdir(parents=True)
    (folder / "mlflow" / "__init__.py").write_text(MLFLOW)
    (folder / "mlflow" / "entities.py").write_text(ENTITIES)
    return str(folder)
