"""The program that the checks for launchers start. A launcher may run this program again in each process."""

import sys

from drivetrain.testing.kits.launcher import program

if __name__ == "__main__":
    program(sys.argv[1])
