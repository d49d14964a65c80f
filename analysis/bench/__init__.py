"""Benchmarks. Each module is a script: ``python -m fp8attn.analysis.bench.reference``."""
