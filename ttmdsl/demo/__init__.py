"""The demonstration: `python -m ttmdsl.demo` compiles three layers, checks them, and trains three language models.

Input: specs that ship with the package, and English text of the standard library. Output: a report on stdout and a
figure. Not part of the compiler, which does not import it; here, and only here, layers are called by name.

`python -m ttmdsl.demo.recall` is another command: it trains a small model around every layer to recall.
"""
