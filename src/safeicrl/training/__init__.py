"""The parts of the host loop: its settings, how a run begins, steps, is logged and keeps its best policies."""
