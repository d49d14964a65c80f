"""One attention problem, several implementations of it, and the table that picks one.

Nothing is imported here until it is asked for, and ``__version__`` is there for a reason: with the checkout's root on
``sys.path`` this folder is importable as ``kernels``, a name that transformers looks for, imports and asks its version.
``0.0.0`` is below every version it accepts, so it leaves the folder alone.
"""

__version__ = "0.0.0"
