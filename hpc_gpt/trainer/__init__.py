"""What runs on the nodes: our trainer, a supervised program, the probes before them."""
