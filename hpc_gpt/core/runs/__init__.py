"""A run on disk: its folder and the files in it. The launcher and the trainer both use it."""
