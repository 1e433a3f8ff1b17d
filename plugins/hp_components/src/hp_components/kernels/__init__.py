"""The torch-native kernels of hp-components, for CPUs and CUDA devices. Contracts: docs/reference/kernels.md."""
