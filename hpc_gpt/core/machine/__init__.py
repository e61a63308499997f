"""The GPUs of this machine."""
