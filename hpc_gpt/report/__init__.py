"""Records shown as tables: for a terminal, a pipe, a page or another program."""
