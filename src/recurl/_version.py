"""Version of recurl, read by pyproject.toml and by the package."""

__version__ = "0.2.0"
