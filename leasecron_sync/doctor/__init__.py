"""Whether a store can keep what the library promises: checks that change nothing in it.

One module for each kind of store, and what they share. To add a kind, write a function that takes
the backend and an ``Examination``, and give it a row in ``examine.py``.
"""
