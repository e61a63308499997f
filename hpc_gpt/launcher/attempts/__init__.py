"""The programs that job scripts start before, beside and after an attempt, and what they decide."""
