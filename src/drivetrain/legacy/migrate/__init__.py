"""``drivetrain migrate``: rewrites programs written for Lightning, as far as that is safe."""
