"""Environments: see api.py for what one is, registry.py for those that ship."""
