"""The checkpoints of a run: which are whole, which stay, what space they need, which run resumes from which."""
