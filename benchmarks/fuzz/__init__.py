"""Made-up inputs for everything that computes, held against an oracle of its own.

An input is a function of (target, seed, index) alone, so one line repeats a failure:

    python -m benchmarks.soak --fuzz-one quantize 0 1234
"""
