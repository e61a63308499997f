"""From what a program left behind to a Record: logs to step tables to runs, and what an attempt failed of."""
