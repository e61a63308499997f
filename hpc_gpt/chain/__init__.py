"""What a run does after each attempt: whether it goes on, when, and on which nodes; and how far that will take it."""
