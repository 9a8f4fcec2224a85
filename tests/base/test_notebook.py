"""Outputs in a notebook; that a kernel shows them is in ``callbacks/test_notebook_progress.py``."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.base import notebook

KERNEL = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))


def test_a_script_displays_nothing_and_prints(capsys: Any) -> None:
    assert not notebook.can_display()
    notebook.show("plain", "<b>rich</b>")
    assert capsys.readouterr().out == "plain\n"


def test_a_kernel_can_display_and_its_forked_copy_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", KERNEL)
    assert notebook.can_display()
    copy = os.fork()
    if copy == 0:
        os._exit(notebook.can_display())
    assert os.waitpid(copy, 0)[1] == 0


def test_a_shell_without_a_kernel_cannot_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not notebook.can_display()


def test_every_cell_of_a_table_is_escaped() -> None:
    html = notebook.table([("<script>", "a & b"), ("x", 3)], ("<name>",))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
    assert "&lt;name&gt;" in html
    assert html.count("<tr>") == 3


def test_a_table_without_headings_has_no_head() -> None:
    assert "<thead>" not in notebook.table([("a",)])
