"""One decoded step over caches: few launches, no host synchronisation, CUDA-graph capturable."""

from nsa.kernels.decode.step import nsa_decode_triton, step_kernels, why_not_decode

__all__ = ["nsa_decode_triton", "step_kernels", "why_not_decode"]
