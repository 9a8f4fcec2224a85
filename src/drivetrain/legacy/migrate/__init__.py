"""``drivetrain migrate``: programs written for Lightning, rewritten for drivetrain as far as that is safe."""
