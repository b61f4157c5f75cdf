"""Rank processes for cases in Python: README.md."""
