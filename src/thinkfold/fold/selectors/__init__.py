"""All fold methods by name: each file here is one, found without a list."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.fold.selector import Selector


def names() -> tuple[str, ...]:
    """The names of all selectors: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def create(name: str, **options: Any) -> Selector:
    """The selector of that name; `options` are the fields of its class.

    Raises ParameterError for a name or an option that does not exist.
    """
    if name not in names():
        raise ParameterError("selector", f"there is no {name!r}, there are {', '.join(names())}")
    module = import_module(f"{__name__}.{name}")
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    found = [kind for kind in own if hasattr(kind, "select")]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must hold one class with select(), it holds {len(found)}")
    if unknown := set(options) - set(getattr(found[0], "__dataclass_fields__", ())):
        raise ParameterError("selector", f"{name} has no option {', '.join(sorted(unknown))}")
    return found[0](**options)
