"""The version, in one place: pyproject.toml and the package read it here."""

__version__ = "0.2.0"
