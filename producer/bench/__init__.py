"""`rollq bench`: what the pool costs, as ratios within one run. See `cli.py`."""
