"""Computing a network: in integers, in floats, and the proof that both agree."""
