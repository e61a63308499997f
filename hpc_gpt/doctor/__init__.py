"""What is wrong with a cluster, a node or a profile before a run wastes an allocation on it."""
