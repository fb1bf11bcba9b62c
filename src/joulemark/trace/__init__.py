"""Question 1 from a profiler trace: when the GPU works, when it waits and for what."""
