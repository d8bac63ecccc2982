"""The vector language of the CPU kernels: what is written in LLVM's instructions, and why.

See README.md beside this file for what each piece earns.
"""
