"""From what logs say to runs: which are one, what ran, how fast, how it ended, each with where it is known from."""
