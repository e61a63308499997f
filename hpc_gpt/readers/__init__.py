"""From what a program left behind to a Record: one small module per log dialect."""
