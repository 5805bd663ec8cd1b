"""`plait demo`: a real model's feed-forward blocks and a Llama-style block on virtual ranks.

`model` is the plain model, `feed_forward` and `llama` its tensor-parallel parts, `compare` the
errors against fp64, `virtual_engine` the run itself, `report` what is printed, `main` the command.
"""

from plait.cli.demo.main import command

__all__ = ["command"]
