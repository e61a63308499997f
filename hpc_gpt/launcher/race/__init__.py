"""A race: rows of one training measured in turns, in one job or on this machine."""
