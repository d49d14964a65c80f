"""Triton kernels for any GPU with FP8 tensor cores (sm_89 and later); with TRITON_INTERPRET=1 they run on a CPU."""
