"""Stubs of packages that serve GPUs alone: any attribute is a class that fails when it is called."""

import importlib.abc
import importlib.machinery
import sys
import types


def _fail(self, *args, **kwargs):
    raise RuntimeError(f"stub {type(self).__name__} called")


class _Any(type):
    """The class of stubs: in annotations they may be joined and subscripted."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Any(name, (), {"__init__": _fail})
        setattr(cls, name, made)
        return made

    def __or__(cls, other):
        return object

    def __ror__(cls, other):
        return object

    def __getitem__(cls, key):
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Any(name, (), {"__init__": _fail, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = _Module(spec.name)
        made.__path__ = []
        made.__version__ = "0"
        return made

    def exec_module(self, module):
        pass


def install(*packages):
    """Find stubs in place of these packages, where they are not installed."""
    sys.meta_path.append(_Finder(set(packages)))
