"""Predicted times of overlapped operators, and what is computed from measured ones."""
