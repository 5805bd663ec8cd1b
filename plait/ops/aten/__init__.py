"""Overriding ATen from Python: registered once, gated for ever, with an exact way back."""
