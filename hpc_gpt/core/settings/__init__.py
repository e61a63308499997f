"""What a run is to be: experiment, cluster, layout, engine, and how they are resolved. Imports no torch."""
