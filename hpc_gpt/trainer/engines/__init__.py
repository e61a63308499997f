"""The engines, one module each, their protocol, and what they share."""
