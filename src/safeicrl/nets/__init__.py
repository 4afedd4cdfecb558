"""Networks: the transformer that reads a trial, and the heads that act and predict on top of it."""
