"""`python -m hpc_gpt` is the same command as `hpc-gpt`."""

from hpc_gpt.cli import main

main()
