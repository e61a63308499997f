"""A search for layouts as a table, in words, as JSON and as a page."""
