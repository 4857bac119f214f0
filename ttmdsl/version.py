"""The version of this package, and the oldest versions that a generated module runs with."""

VERSION = "0.1.0"
TORCH = "2.6"
TRITON = "3.3"
