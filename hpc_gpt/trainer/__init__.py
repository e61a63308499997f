"""The programs that run on the nodes: our trainer, a supervised program, the probes before them."""
