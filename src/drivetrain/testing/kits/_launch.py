"""The program of the checks for launchers; a launcher may run it again in each process."""

import sys

from drivetrain.testing.kits.launcher import program

if __name__ == "__main__":
    program(sys.argv[1])
