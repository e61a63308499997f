"""Published weights: the folder that transformers writes, its config, its names, and what identifies it."""
