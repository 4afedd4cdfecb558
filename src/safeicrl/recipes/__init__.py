"""Whole trainings: what they are made of, those with a name, and how they run."""
