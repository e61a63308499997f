"""Other programs' ways to hold their states: a module each, with a `STATES`. Published rows are predicted by them."""
