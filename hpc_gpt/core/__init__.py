"""What a run is to be, and what is on disk: what the trainer, the reader and the launcher all use."""
