"""What drivetrain does inside of other libraries: one file per library, with the names that a program imports."""
