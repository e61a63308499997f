"""The GPT: one definition for every engine, whole or split over tensor-parallel and pipeline-parallel ranks."""
