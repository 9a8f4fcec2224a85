"""Helpers that two or more folders use. They import torch and the standard library only."""

from __future__ import annotations
