"""``python -m fp8attn``: the command line."""

from fp8attn.cli import app

app(prog_name="fp8attn")
