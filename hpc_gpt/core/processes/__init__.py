"""The processes of a run: its lock, its heartbeats, requests to them, and how they are found and ended."""
