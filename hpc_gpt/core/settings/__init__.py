"""Settings of a run: experiment, cluster, layout, engine, and their resolution. Imports no torch."""
