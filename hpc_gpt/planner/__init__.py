"""Prediction of which layouts fit and how fast they are, from shapes and physics, before anyone queues."""
