"""What engines share: the questions that others ask them, and what ours, and DeepSpeed's, have in common."""
