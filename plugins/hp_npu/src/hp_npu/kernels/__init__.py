"""The kernels, one module for what shares an operator of torch_npu. Contracts: docs/reference/kernels.md."""
