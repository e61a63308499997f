"""Runs for the tools that draw curves."""
