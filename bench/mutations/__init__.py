"""One-line faults that nobody chose, each drawn by a seed and put into a copy of the tree: `make mutations`."""
