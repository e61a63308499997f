"""From logs and run folders to records: logs to step tables to runs, and the cause of each attempt's end."""
