"""``farflung plan`` against whole trainings of every recipe."""
