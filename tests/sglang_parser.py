"""SGLang's own parser of its command line, without what needs CUDA: run with the folder of an unpacked wheel, and words as JSON.

Real are its argument groups and server_args; the rest of sglang and what it imports is a stand-in that does nothing.
Writes what the parser made of each list of words.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REAL = ("server_args", "arg_groups", "arg_groups.choices", "arg_groups.arg_utils", "arg_groups.argparse_actions", "arg_groups.field_order",
        "utils.server_args_config_parser")  # fmt: skip


class Nothing(type):
    """A class that stands for any name: as a decorator it gives back what it is given, as a list it is empty."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Nothing("made", (), {})

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __contains__(cls, item: Any) -> bool:
        return True

    def __add__(cls, other: Any) -> Any:
        return other

    __radd__ = __or__ = __ror__ = __add__


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        inner = name.removeprefix("sglang.srt.")
        if inner in REAL or inner.startswith("arg_groups.fields"):
            return importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Module(spec.name)
        module.__path__ = [str(self.folder / spec.name.replace(".", "/"))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def main() -> None:
    folder, asked, answer = map(Path, sys.argv[1:])
    sys.meta_path.insert(0, Finder(folder))
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    out = []
    for words in json.loads(asked.read_text()):
        merged = ConfigArgumentMerger(parser).merge_config_with_args(words)
        out.append(
            {name: value for name, value in vars(parser.parse_args(merged)).items() if not isinstance(value, Nothing)}
        )
    answer.write_text(json.dumps(out, default=str))


if __name__ == "__main__":
    main()
