"""The engines: one module each behind one protocol, and what they share to compute a step."""
