"""MuJoCo's robots: models, physics, pictures."""
