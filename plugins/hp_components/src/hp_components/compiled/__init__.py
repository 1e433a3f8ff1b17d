"""Kernels in C++ for CPUs, compiled for the processor at hand when a process first needs them."""
