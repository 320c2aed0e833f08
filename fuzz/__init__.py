"""Fuzzers: random input to the parts of laconic that read what others wrote. `make fuzz` runs each for FUZZ_SECONDS.

A fuzzer is a module with a command line, `python -m fuzz.codes --seconds 60 --seed 0`, and exits with 1 at the first
input that breaks a promise. Every find becomes a test.
"""
