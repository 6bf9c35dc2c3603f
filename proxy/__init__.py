"""An OpenAI-compatible server in front of LLM engines that speak only token ids.

`proxy/README.md` is the map: render, generate and derender are the three stages, `pipeline.py` joins them.
"""

__version__ = "0.1.0"


class CannotStart(Exception):
    """What keeps a command from doing its work, in words for whoever started it."""
