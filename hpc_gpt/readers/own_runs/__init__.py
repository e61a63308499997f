"""Our own run folders as records and curves."""
