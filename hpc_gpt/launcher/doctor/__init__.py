"""Find faults of a cluster, a node or a profile before a run wastes its allocation on them."""
