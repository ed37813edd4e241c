"""The parts of ``launch/bench/multigpu.py``; each is a program of its own under torchrun."""
