"""Parts of drivetrain that run inside other libraries: one file per library, with the names that a program imports."""
