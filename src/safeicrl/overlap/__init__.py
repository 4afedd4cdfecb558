"""Playing on the cores while the accelerator learns."""
