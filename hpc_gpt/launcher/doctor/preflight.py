"""The name by which job scripts start `trainer.preflight.nodes`."""

import sys

from hpc_gpt.trainer.preflight.nodes import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
