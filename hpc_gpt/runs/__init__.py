"""A run as it lies on disk: its folder and what each file in it says, to the launcher and the trainer alike."""
