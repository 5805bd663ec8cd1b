"""Helpers for tests of plait and of users' own kernels: virtual ranks, comparison, compilation."""
