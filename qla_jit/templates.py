"""Which templates does this version have, and what is their source?"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from . import kernel_templates


@functools.cache
def template_sources() -> dict[str, str]:
    """SHA-256 of the source of every template, by the template's name."""
    names = [module.name for module in pkgutil.iter_modules(kernel_templates.__path__) if not module.ispkg]
    modules = [importlib.import_module(f"{kernel_templates.__name__}.{name}") for name in names]
    return {module.TEMPLATE.name: module.TEMPLATE.source_sha256() for module in modules if hasattr(module, "TEMPLATE")}
