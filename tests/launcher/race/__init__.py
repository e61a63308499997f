"""What a race measures, and how."""
