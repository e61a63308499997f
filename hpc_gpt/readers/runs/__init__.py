"""From run folders and logs to runs: which files are of one, what ran, how fast, how it ended, each with its source."""
