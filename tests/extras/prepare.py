"""Compile once what packages compile when they are first used, so that no test waits for it."""

from __future__ import annotations

import importlib.util
import os


def main() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load()


if __name__ == "__main__":
    main()
