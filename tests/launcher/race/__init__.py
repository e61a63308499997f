"""Tests of races: rounds, visits, and the figures that they measure."""
