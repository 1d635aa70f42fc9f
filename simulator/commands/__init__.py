"""Commands of ``gpumix``, one module per group; ``simulator/cli.py`` says how to add one."""
