"""hpc-gpt: plan, render, submit, train and report GPT trainings on Slurm clusters."""

import sys
import zipimport

__version__ = "0.5.0"


class _ArchiveImporter(zipimport.zipimporter):
    """Imports from the archive of a run's code. Python's own compiles a module twice, the first time for its name."""

    def get_filename(self, fullname: str) -> str:
        name = f"{self.archive}/{self.prefix}{fullname.rpartition('.')[2]}"
        return f"{name}/__init__.py" if self.is_package(fullname) else f"{name}.py"


if isinstance(sys.modules[__name__].__loader__, zipimport.zipimporter):
    sys.path_hooks.insert(0, _ArchiveImporter)
