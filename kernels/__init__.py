"""One attention problem, several implementations of it, and the table that picks one.

Nothing is imported here until it is asked for. With the checkout's root on ``sys.path`` this folder is importable as
``kernels``, the name of a package that transformers needs: asked for by that name it gives way to that package, or if
that is not installed has a ``__version__`` below every one that transformers accepts.
"""

__version__ = "0.0.0"

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    _others = [path for path in sys.path if os.path.realpath(path) != _root]  # "" is the working directory
    _spec = importlib.machinery.PathFinder.find_spec(__name__, _others)
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(_spec)  # what an import statement then returns
        _spec.loader.exec_module(sys.modules[__name__])
