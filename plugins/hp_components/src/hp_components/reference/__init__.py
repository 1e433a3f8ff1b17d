"""Every operator as plain torch: the written contract that fast kernels are compared with. Slow, obvious, any device."""
