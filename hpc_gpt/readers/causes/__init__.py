"""What an attempt failed of: the first cause over all its ranks."""
