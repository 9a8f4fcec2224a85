"""Mistakes in programs written for Lightning: each is a function that makes one, in Lightning's own names.

``tests/compat/mistakes.json`` holds what Lightning 2.6.6 raises for each. ``python -m tests.compat.mistakes FILE``
writes that file in an environment that has Lightning and the optional packages of the tests.
``tests/compat/test_exceptions.py`` compares it with what drivetrain raises.
Import this only where ``lightning`` can be imported: with Lightning installed, or after ``compat.install()``.
"""
