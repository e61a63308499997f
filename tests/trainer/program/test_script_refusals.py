"""Why a job script is refused: each line and hint to the letter."""

from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.program.job_script import read_job_script, scan

HEAD = "#!/bin/bash\n#SBATCH -t 7\n"
REFUSED = {
    "#!/bin/bash\n# Rendered by hpc-gpt 1\n": "HERE is a script that hpc-gpt rendered | sbatch HERE starts it",
    HEAD + "#" * (4 << 20): "HERE has 4194329 bytes, and Slurm takes at most 4194304 | is it a program?",
    HEAD + "\0": "HERE holds a NUL, which Slurm does not take | is it a program, not a script?",
    HEAD + "\r\n": "HERE has DOS line breaks, which sbatch does not take | dos2unix HERE",
    HEAD + "#PBS -l x\n": "HERE:3: #PBS does not run here | a script for PBS: write its options as #SBATCH lines",
    "#!/bin/sh\n#BSUB -n\n": "HERE:2: #BSUB does not run here | a script for LSF: write its options as #SBATCH lines",
    HEAD + "#SBATCH packjob\n": "HERE:3: a heterogeneous job does not run here | submit it with sbatch",
    HEAD + "#SBATCH -J 'x\n": "HERE:3: a quote has no end: -J 'x | sbatch refuses it",
    HEAD + "#SBATCH : -N2\n": "HERE: a heterogeneous job does not run here | submit it with sbatch",
    HEAD + "#SBATCH x\n": "HERE: 'x' is not an option of sbatch | write --name=value",
    HEAD
    + "#SBATCH --container=x\n": "HERE: --container starts the whole job in a container, and hpc-gpt with it | give "
    "it to srun in the script",
    HEAD + "#SBATCH --version\n": "HERE: --version is not for a run | it only prints: leave it out",
    HEAD + "#SBATCH --gid=1\n": "HERE: --gid is not for a run | submit it as that user",
    HEAD + "#SBATCH –-nodes=2\n": "HERE:3: '–-nodes=2' begins with '–' (U+2013): sbatch takes only hyphens | "
    "write --nodes=2",
    HEAD
    + "#SBATCH -n4\n#SBATCH -—mem=1G\n": "HERE:4: '-—mem=1G' begins with '—' (U+2014): sbatch takes only hyphens | "
    "write --mem=1G",
    HEAD + "#SBATCH −N 2 --comment –x\n": "HERE:3: '−N' begins with '−' (U+2212): sbatch takes only hyphens | write -N",
    HEAD + "SBATCH -N1\n" * 10: "HERE:3: SBATCH -N1: sbatch reads only lines that begin with #SBATCH (also line "
    "4, 5, 6, 7, 8, 9, 10, 11, …) | write #SBATCH -N1",
    "#!/bin/sh\nls\n#SBATCH -t 7\n": "HERE: sbatch reads no directive after the first command, which is in line 2: ls; "
    "it would ignore those in line 3 | move the #SBATCH lines above it",
    HEAD + "if x\n": "bash cannot read HERE: line 4: syntax error: unexpected end of file | bash -n HERE shows it",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:50])
def test_a_script_is_refused_so(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.sh").write_bytes(text.encode())
    with pytest.raises(ConfigError) as refused:
        read_job_script(path)
    assert f"{refused.value} | {refused.value.hint}".replace(str(path), "HERE") == REFUSED[text]
    if len(text) > 4 << 20:
        path.write_text(text[: 4 << 20])
        assert scan(read_job_script(path)) == []
