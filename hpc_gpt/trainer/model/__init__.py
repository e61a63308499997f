"""The GPT: one definition for every engine, whole or split over tensor and pipeline parallel ranks."""
