"""The reader of anyone's logs: lines to steps, facts and failures, and these to the records of runs."""
