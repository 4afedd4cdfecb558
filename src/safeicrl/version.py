"""The library's version; a test keeps it equal to the one in pyproject.toml."""

VERSION = "0.2.0.dev0"
