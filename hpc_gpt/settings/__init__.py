"""What a run is to be: experiment, cluster, layout, engine, and how they are settled into one; no torch."""
