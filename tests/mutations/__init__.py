"""One-line faults, each with the tests that must fail on it: `make mutations`."""
