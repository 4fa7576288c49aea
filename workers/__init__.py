"""The GPU side of rollq: a pool worker around a vLLM engine.

The way of a sample, by file:

    claim.py -> prompt.py -> resume.py -> generate.py -> report.py
    (claim)     (settle)     (budget)     (engine)       (checkpoint, release, finish)

`updates.py` swaps weights under it (`fetch.py`, `turns.py`, `swap.py`), `leases.py` keeps it
ours, `worker.py` holds it together.
"""
