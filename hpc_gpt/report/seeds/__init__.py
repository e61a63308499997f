"""The tables of the seeds in their own columns, their figures beside ours."""
