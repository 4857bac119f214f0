"""Times of layers beside those of their peers (`ttmdsl bench`), and tables of launch configurations (`ttmdsl tune`).

Nothing here is imported by the compiler. clock.py measures, subjects.py says what, peers.py names what others offer,
measure.py makes the rows, report.py prints and draws them, first.py is a first call in a process of its own, tune.py
chooses configurations.
"""
