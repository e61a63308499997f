"""What a bench measures, and how."""
