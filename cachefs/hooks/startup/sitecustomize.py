"""Run by every Python that `cachefs run` starts, before its program (see cachefs.hooks). Standard library only."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))
DATALOADER = "torch.utils.data.dataloader"


class DataLoaderFinder:
    """Finds torch's DataLoader as the other finders would, and has it watched once it is loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != DATALOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                load(module)
                watch(module)

            spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


def watch(dataloader: ModuleType) -> None:
    try:
        find_cachefs()
        from cachefs.hooks import loader

        loader.install(dataloader)
    except Exception as error:
        print(f"cachefs: cannot watch torch's DataLoader ({error!r}); the job goes on unpublished", file=sys.stderr)


def find_cachefs() -> None:
    """Make `import cachefs` mean the package that this file belongs to, also where it is not installed.

    The helper process runs that package too, so that both understand each other's messages.
    """
    if "cachefs" in sys.modules:
        return
    package = os.path.dirname(os.path.dirname(HERE))
    spec = importlib.util.spec_from_file_location(
        "cachefs", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is no package")
    module = sys.modules["cachefs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def hand_over() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    others = [path for path in sys.path if os.path.abspath(path) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if isinstance(spec, ModuleSpec) and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, DataLoaderFinder())
hand_over()
