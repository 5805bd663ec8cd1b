"""Tile orders of persistent kernels: a Python form and a Triton form of each, tested equal.

The Python modules need no Triton; `plait.schedules.lang` holds the device forms.
"""
