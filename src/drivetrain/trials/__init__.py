"""The command ``drivetrain advise``: try what may make a program faster, and report what does."""
